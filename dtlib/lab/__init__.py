"""The JupyterLab side: engines, pictures and checks. ``lab.engines(4)`` is the first cell of every notebook."""

from importlib import import_module

_LAZY = {
    "engines": "dtlib.lab.engines",
    "check": "dtlib.lab.check",
    "predict": "dtlib.lab.check",
    "pictures": None,
}


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module 'dtlib.lab' has no attribute {name!r}")
    value = import_module(f"dtlib.lab.{name}") if _LAZY[name] is None else getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # importing dtlib.lab.engines has put the module under the function's name
    return value


def __dir__():
    return sorted([*globals(), *_LAZY])
