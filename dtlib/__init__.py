"""Distributed deep learning that you can read: CONTRIBUTING.md has the layers.

``import dtlib`` is lazy: it loads neither torch nor MPI, so that ``dtlib doctor`` runs where one of
them is broken.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # under these names a type checker finds them, too
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
