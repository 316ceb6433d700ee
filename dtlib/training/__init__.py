"""Training from a config: ``dtlib.initialize`` and what belongs to it. Lazy: who only starts ranks needs no torch."""

from importlib import import_module

_LAZY = {"Engine": "dtlib.training.engine", "initialize": "dtlib.training.initialization"}


def __getattr__(name):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dtlib.training' has no attribute {name!r}")
