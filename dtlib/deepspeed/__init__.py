"""DeepSpeed's names, for scripts and listings of its tutorials: ``import dtlib.deepspeed as deepspeed``."""

from typing import NoReturn

from dtlib.deepspeed import pipe as pipe
from dtlib.deepspeed import utils as utils
from dtlib.deepspeed.pipe import PipelineModule as PipelineModule
from dtlib.deepspeed.scripts import add_config_arguments as add_config_arguments
from dtlib.deepspeed.scripts import init_distributed as init_distributed
from dtlib.errors import MissingName
from dtlib.training import initialize as initialize

# Names that are not here, and the way round.
_LEFT_OUT = {
    "zero": "stage 3 shards a model that has been built; `zero_optimization` in the config is all it needs",
    "checkpointing": "set pipeline.activation_checkpoint_interval, or use torch.utils.checkpoint in the model",
    "moe": "build the model from dtlib.parallel.expert.MixtureOfExperts",
    "init_inference": "call the model under torch.no_grad()",
    "tp_model_init": "build the model from the layers of dtlib.parallel.tensor",
    "get_accelerator": "take the engine's device, or dtlib.init().device",
    "accelerator": "take the engine's device, or dtlib.init().device",
    "log_dist": "log where dtlib.init().rank is 0",
    "runtime": "learning rates are in dtlib.training.rates; call torch.manual_seed for a seed",
}


def __getattr__(name: str) -> NoReturn:
    if name in _LEFT_OUT:
        raise MissingName(f"dtlib.deepspeed.{name} is not offered: {_LEFT_OUT[name]}.")
    raise AttributeError(f"module 'dtlib.deepspeed' has no attribute {name!r}")
