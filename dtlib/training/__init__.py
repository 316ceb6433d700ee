"""Train from a config with ``dtlib.initialize``. Names are imported lazily, so that importing this loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtlib.training.engine import Engine as Engine
    from dtlib.training.initialization import initialize as initialize

_LAZY = {"Engine": "dtlib.training.engine", "initialize": "dtlib.training.initialization"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dtlib.training' has no attribute {name!r}")
