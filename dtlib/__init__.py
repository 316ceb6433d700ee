"""Distributed deep learning that you can read: see CONTRIBUTING.md for the map of the house.

``import dtlib`` is lazy: it loads neither torch nor MPI, so that ``dtlib doctor`` runs where one of
them is broken.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # under these names a type checker finds them, too
    from dtlib import accelerator as accelerator
    from dtlib import pipe as pipe
    from dtlib import runtime as runtime
    from dtlib import utils as utils
    from dtlib.accelerator import get_accelerator as get_accelerator
    from dtlib.comm import Communicator as Communicator
    from dtlib.errors import DtlibError as DtlibError
    from dtlib.measure.memory import memory as memory
    from dtlib.measure.trace import Timeline as Timeline
    from dtlib.measure.trace import phase as phase
    from dtlib.measure.trace import trace as trace
    from dtlib.pipe import PipelineModule as PipelineModule
    from dtlib.training import initialize as initialize
    from dtlib.training.scripts import add_config_arguments as add_config_arguments
    from dtlib.training.scripts import init_distributed as init_distributed
    from dtlib.utils import log_dist as log_dist
    from dtlib.world import World as World
    from dtlib.world import init as init
    from dtlib.world import reset as reset

__version__ = "0.1.0"

_LAZY = {
    "init": "dtlib.world", "reset": "dtlib.world", "World": "dtlib.world", "Communicator": "dtlib.comm",
    "trace": "dtlib.measure.trace", "phase": "dtlib.measure.trace", "Timeline": "dtlib.measure.trace",
    "initialize": "dtlib.training", "add_config_arguments": "dtlib.training.scripts",
    "init_distributed": "dtlib.training.scripts", "get_accelerator": "dtlib.accelerator",
    "PipelineModule": "dtlib.pipe", "log_dist": "dtlib.utils", "memory": "dtlib.measure.memory",
    "DtlibError": "dtlib.errors",
}  # fmt: skip


# Modules with DeepSpeed's names, which a program that says `import dtlib as deepspeed` finds without importing them.
_MODULES = ("accelerator", "pipe", "runtime", "utils")

# Names of DeepSpeed that are not here, for scripts that say `import dtlib as deepspeed`, and the way round.
_LEFT_OUT = {
    "zero": "stage 3 shards a model that has been built; `zero_optimization` in the config is all it needs",
    "checkpointing": "set pipeline.activation_checkpoint_interval, or use torch.utils.checkpoint in the model",
    "moe": "build the model from dtlib.parallel.expert.MixtureOfExperts",
    "init_inference": "call the model under torch.no_grad()",
    "tp_model_init": "build the model from the layers of dtlib.parallel.tensor",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _MODULES:
        return import_module(f"dtlib.{name}")
    if name in _LEFT_OUT:
        from dtlib.errors import MissingName

        raise MissingName(f"dtlib.{name} is not offered: {_LEFT_OUT[name]}.")
    raise AttributeError(f"module 'dtlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
