"""Distributed deep learning that you can read: see CONTRIBUTING.md for the map of the house.

``import dtlib`` is lazy: it loads neither torch nor MPI, so that ``dtlib doctor`` runs where one of
them is broken.
"""

from importlib import import_module

__version__ = "0.1.0"

_LAZY = {
    "init": "dtlib.world",
    "reset": "dtlib.world",
    "World": "dtlib.world",
    "Communicator": "dtlib.comm",
    "trace": "dtlib.measure.trace",
    "phase": "dtlib.measure.trace",
    "Timeline": "dtlib.measure.trace",
    "initialize": "dtlib.training",
    "add_config_arguments": "dtlib.training.scripts",
    "init_distributed": "dtlib.training.scripts",
    "get_accelerator": "dtlib.accelerator",
    "PipelineModule": "dtlib.pipe",
    "log_dist": "dtlib.utils",
    "memory": "dtlib.measure.memory",
    "DtlibError": "dtlib.errors",
}


def __getattr__(name):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dtlib' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_LAZY])
