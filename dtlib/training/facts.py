"""What an engine tells about itself, under the names that scripts written for DeepSpeed call."""

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.errors import MissingName
from dtlib.gradients.precision import LossScale
from dtlib.training.config import Config
from dtlib.world import init

# Methods of DeepSpeed's engine that are not here, and the way round.
LEFT_OUT = {
    "set_train_batch_size": "call initialize() again, with another train_batch_size",
    "set_gradient_accumulation_boundary": "gradient_accumulation_steps of the config says when a step is made",
    "no_sync": "gradient_accumulation_steps of the config has the same effect",
    "deepspeed_io": "pass training_data to initialize(), or use a DataLoader with a DistributedSampler",
    "save_16bit_model": "use dtlib.checkpoint.export(folder, out)",
    "destroy": "there is nothing to clear away",
    "compile": "give initialize() the model as torch.compile(model) makes it",
    "offload_states": "set zero_optimization.offload_optimizer in the config",
    "reload_states": "set zero_optimization.offload_optimizer in the config",
}


class Facts:
    """Numbers and settings of an engine. Counterpart: the accessors of ``DeepSpeedEngine``."""

    left_out = LEFT_OUT
    module: nn.Module
    optimizer: Optimizer
    config: Config
    micro_steps: int
    _scale: LossScale
    _norm: float | None

    def __getattr__(self, name):
        if name in LEFT_OUT:
            raise MissingName(f"engine.{name}() is not offered here: {LEFT_OUT[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next ``step()`` changes the model."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before they were clipped; None where nothing is clipped."""
        return self._norm

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        return self._scale.scale

    def train_batch_size(self) -> int:
        assert self.config.train_batch_size is not None  # worked out, like those below
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        assert self.config.train_micro_batch_size_per_gpu is not None
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        assert self.config.gradient_accumulation_steps is not None
        return self.config.gradient_accumulation_steps

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    @property
    def local_rank(self) -> int:
        """This rank among those of its machine."""
        return init().local_rank

    @property
    def global_rank(self) -> int:
        return init().rank

    @property
    def world_size(self) -> int:
        """All ranks; with a pipeline, also those of its other stages."""
        return init().size

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    @property
    def training(self) -> bool:
        return self.module.training

    def parameters(self):
        return self.module.parameters()

    def named_parameters(self):
        return self.module.named_parameters()
