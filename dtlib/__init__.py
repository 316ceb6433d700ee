"""Distributed deep learning that you can read: CONTRIBUTING.md lists the layers.

``import dtlib`` loads neither torch nor MPI, so ``dtlib doctor`` runs even if one of the two is broken.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# For type checkers, which cannot follow the lazy imports below.
if TYPE_CHECKING:
    from dtlib.comm import Communicator as Communicator
    from dtlib.errors import DtlibError as DtlibError
    from dtlib.measure.memory import memory as memory
    from dtlib.measure.trace import Timeline as Timeline
    from dtlib.measure.trace import phase as phase
    from dtlib.measure.trace import trace as trace
    from dtlib.training import initialize as initialize
    from dtlib.world import World as World
    from dtlib.world import init as init
    from dtlib.world import reset as reset

__version__ = "0.1.0"

_LAZY = {
    "init": "dtlib.world", "reset": "dtlib.world", "World": "dtlib.world", "Communicator": "dtlib.comm",
    "trace": "dtlib.measure.trace", "phase": "dtlib.measure.trace", "Timeline": "dtlib.measure.trace",
    "initialize": "dtlib.training", "memory": "dtlib.measure.memory", "DtlibError": "dtlib.errors",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dtlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
