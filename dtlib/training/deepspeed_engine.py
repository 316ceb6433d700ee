"""Offer our engine's methods on DeepSpeed's engine, so that loop, data and measurements stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from dtlib.checkpoint import read_latest
from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.training import deepspeed_runtime as production
from dtlib.training.config import Config
from dtlib.training.data import RankLoader
from dtlib.training.engine import LATEST, Engine
from dtlib.world import init

if TYPE_CHECKING:
    import deepspeed


class DeepSpeedEngine(Engine):
    """Our engine's interface around DeepSpeed's engine ``theirs``."""

    def __init__(
        self, theirs: deepspeed.DeepSpeedEngine, scheduler: LRScheduler | None, config: Config, comm: Communicator,
        loader: RankLoader | None,
    ):  # fmt: skip
        self.theirs, self.module, self.optimizer, self.lr_scheduler = theirs, theirs.module, theirs.optimizer, scheduler
        self.config, self.comm = config, comm
        self.micro_steps = 0
        self._count()
        self.before_step_hooks = []
        self._loader, self._batches = loader, loader.forever() if loader is not None else None

    def _count(self) -> None:
        self.global_steps, self.skipped_steps = self.theirs.global_steps, self.theirs.skipped_steps

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the model's output for one micro-batch."""
        return self.theirs(*args, **kwargs)

    __call__ = forward

    def backward(self, loss: Tensor) -> Tensor:
        self.theirs.backward(loss)
        return loss

    def step(self) -> None:
        """End a micro-batch: DeepSpeed unscales, clips and steps at a boundary."""
        self.micro_steps += 1
        if self.theirs.is_gradient_accumulation_boundary():
            for hook in self.before_step_hooks:
                hook()
        self.theirs.step()
        self._count()

    def zero_grad(self) -> None:
        self.theirs.zero_grad()

    def train(self, mode: bool = True) -> Self:
        self.theirs.train(mode)
        return self

    def get_lr(self) -> list[float]:
        return self.theirs.get_lr()

    def get_global_grad_norm(self) -> float | None:
        return self.theirs.get_global_grad_norm()

    def loss_scale(self) -> float:
        return self.theirs.loss_scale

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.theirs.is_gradient_accumulation_boundary()

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | int | None = None, client_state: dict | None = None
    ) -> None:
        """Save DeepSpeed's own checkpoint, with the position in the data; only the same number of ranks can load it."""
        loader = self._loader.state_dict() if self._loader is not None else None
        state = {"client_state": client_state or {}, "loader": loader, "ranks": self.world_size}
        self.theirs.save_checkpoint(str(save_dir), tag=tag, client_state=state)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | int | None = None, load_lr_scheduler_states: bool = True
    ) -> tuple[str, dict] | tuple[None, None]:
        """Load DeepSpeed's checkpoint and the position in the data; return its folder and its ``client_state``.

        Raises:
            DtlibError: for a checkpoint that another number of ranks saved.
        """
        if tag is None and read_latest(Path(load_dir) / LATEST, self.comm) is None:
            return None, None
        folder, state = self.theirs.load_checkpoint(
            str(load_dir), tag=tag, load_lr_scheduler_states=load_lr_scheduler_states
        )
        if state["ranks"] != self.world_size:
            raise DtlibError(f"{folder} was saved on {state['ranks']} ranks, but DeepSpeed loads it only on as many.")
        self._count()
        if self._loader is not None and state["loader"]:
            self._loader.load_state_dict(state["loader"])
            self._batches = self._loader.forever()
        return folder, state["client_state"]

    def tensors_by_kind(self) -> dict[str, list]:
        """Return the gradients, master weights and parameter shards that DeepSpeed's ZeRO optimizers store."""
        theirs = self.optimizer
        gradients = [*getattr(theirs, "averaged_gradients", {}).values()]
        gradients.append(getattr(theirs, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}))
        masters = [*getattr(theirs, "single_partition_of_fp32_groups", [])]
        masters += [*getattr(theirs, "fp32_partitioned_groups_flat", [])]
        shards = [p.ds_tensor for p in self.module.parameters() if hasattr(p, "ds_tensor")]
        return {"gradients": _tensors(gradients), "masters": _tensors(masters), "parameters": shards}

    def _whole(self, mine, like):
        return production.whole(mine)


def check_deepspeed(model: nn.Module, comm: Communicator) -> None:
    """Refuse pipelines, and a communicator that is not the world's.

    Raises:
        DtlibError: on every rank.
    """
    if hasattr(model, "num_stages"):  # our PipelineModule, or DeepSpeed's
        raise DtlibError("runtime='deepspeed' trains no pipelines: use runtime='dtlib' or 'torch'.")
    if comm is not init().comm:
        raise DtlibError("DeepSpeed trains on all ranks of the world: leave comm out, or use runtime='dtlib'.")


def deepspeed_engine(
    model: nn.Module, settings: Config, config: dict, groups: dict[str, dict], make_optimizer: Callable,
    scheduler: LRScheduler | Callable | None, loader: RankLoader | None, comm: Communicator,
) -> tuple[Engine, Optimizer, RankLoader | None, LRScheduler | None]:  # fmt: skip
    """Return ``engine, optimizer, dataloader, scheduler`` like ``initialize``, with DeepSpeed inside."""
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        raise DtlibError("DeepSpeed does not average float64: train in float32 (run.float64 of a config is false).")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name in groups]
    trained = [parameter for name, parameter in model.named_parameters() if name in names]
    make = partial(make_optimizer, [groups[name] for name in names])
    theirs, made = production.engine(model, config, make, trained, scheduler)
    engine = DeepSpeedEngine(theirs, made, settings, comm, loader)
    return engine, engine.optimizer, loader, made


def _tensors(things) -> list[torch.Tensor]:
    return [obj for obj in tree_leaves(things) if isinstance(obj, torch.Tensor)]
