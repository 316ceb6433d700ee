"""What ``dtlib.initialize`` gives: forward, backward and step of a model, as its config says; its checkpoints, and what
it tells about itself, under the names that scripts written for DeepSpeed call."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dtlib import checkpoint
from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.precision import LossScale, all_finite, clip_by_norm
from dtlib.gradients.shard_info import info_of
from dtlib.measure.held import held
from dtlib.training.config import Config
from dtlib.training.data import RankLoader
from dtlib.training.strategies import Replicated
from dtlib.world import init

COUNTS = ("global_steps", "skipped_steps")
LATEST = "latest"


class Engine:
    """A model, its optimizer and its schedule. ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``, for each
    micro-batch; every ``gradient_accumulation_steps``-th ``step()`` changes the model. Counterpart: DeepSpeedEngine."""

    module: nn.Module
    optimizer: Optimizer
    config: Config
    micro_steps: int
    _scale: LossScale
    _norm: float | None

    def __init__(
        self, module: nn.Module, strategy: Replicated, scheduler: LRScheduler | None, config: Config,
        comm: Communicator, loader: RankLoader | None,
    ):  # fmt: skip
        self.module = module
        self.optimizer, self.lr_scheduler = strategy.optimizer, scheduler
        self.config, self.comm = config, comm
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.before_step_hooks: list[Callable[[], object]] = []  # called between the last backward() and the step
        self._strategy, self._masters = strategy, strategy.masters
        self._loader = loader
        self._batches = loader.forever() if loader is not None else None
        self._norm = None
        self._trainable = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._backwards = 0  # since the last step()
        self._stepping = _guard(self.optimizer, self._masters)
        fp16 = config.fp16
        self._scale = LossScale()
        if fp16.enabled and fp16.loss_scale == 0:
            window = fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale
            self._scale = LossScale(2.0**fp16.initial_scale_power, True, *window)
        elif fp16.enabled:
            self._scale = LossScale(fp16.loss_scale)

    def forward(self, *args: object, **kwargs: object) -> object:
        with nullcontext() if self.is_gradient_accumulation_boundary() else self._strategy.no_sync():
            return self._strategy.forward(*args, **kwargs)

    __call__: Callable = forward  # of what the model returns, as nn.Module declares it

    def backward(self, loss: Tensor) -> Tensor:
        """Gradients of this micro-batch's mean loss; at the last one of a step they are averaged over all ranks."""
        self._refuse_lost()
        self._backwards += 1
        scaled = loss * (self._scale.scale / self.gradient_accumulation_steps())
        with nullcontext() if self.is_gradient_accumulation_boundary() else self._strategy.no_sync():
            scaled.backward()
        return loss

    def step(self) -> None:
        """After each ``backward``. At a boundary: unscale, clip, step the optimizer and the schedule."""
        if not self._backwards:
            raise DtlibError(
                "step() found no gradients of engine.backward(loss), which scales the loss: call it before each "
                "step(), instead of loss.backward()."
            )
        boundary, self._backwards = self.is_gradient_accumulation_boundary(), 0
        self.micro_steps += 1
        if not boundary:
            return
        self._update()

    def _refuse_lost(self) -> None:
        """Refuse to go on with a step whose first gradients are gone."""
        done = self.micro_steps % self.gradient_accumulation_steps()
        known = [p for group in self.optimizer.param_groups for p in group["params"]] + self._masters.parameters
        if done and all(parameter.grad is None for parameter in known):
            raise DtlibError(
                f"Gradients of {done} micro-batches of this step are missing, for example after zero_grad(): leave "
                "zero_grad() out, because the engine calls it after the last micro-batch of a step."
            )

    def _update(self) -> None:
        """What happens at a boundary."""
        self._refuse_unfrozen()
        for hook in self.before_step_hooks:
            hook()
        strategy = self._strategy
        gradients = strategy.reduce(self._scale.scale)
        # What is found here is the same on all ranks: averages are, and of shards the ranks tell each other.
        overflow = self.config.fp16.enabled and not all_finite(gradients, strategy.shards_on)
        if overflow and self._scale.dynamic and self._scale.scale <= self._scale.smallest:
            raise DtlibError(
                f"Gradients overflow at the smallest loss scale, {self._scale.scale:g}, so no step is made any more: "
                "use bf16, a lower rate, or a lower fp16.min_loss_scale."
            )
        self._scale.update(overflow)
        if overflow:
            self.skipped_steps += 1
            if not self._scale.dynamic and self.comm.rank == 0:
                warnings.warn(
                    f"Gradients overflow in float16, and the step is skipped: fp16.loss_scale is "
                    f"{self._scale.scale:g}, a fixed number. Give a lower one, or 0 for one that adapts.", stacklevel=3,
                )  # fmt: skip
        else:
            if self.config.gradient_clipping:
                self._norm = self._clip(gradients)
            self._stepping[:] = [True]
            try:
                strategy.step()
            finally:
                self._stepping[:] = [False]
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.zero_grad()
        self.global_steps += 1

    def _clip(self, gradients) -> float:
        return clip_by_norm(gradients, self.config.gradient_clipping, self._strategy.shards_on)

    def _refuse_unfrozen(self) -> None:
        for name, parameter in self.module.named_parameters():
            known = self._trainable.get(name)
            if parameter.requires_grad and known is not parameter and not hasattr(known, "full_tensor"):  # FSDP2's
                raise DtlibError(
                    f"{name} was unfrozen or replaced after initialize(), so it would not be trained: call "
                    "initialize() on a new model, with all parameters to train."
                )

    def train_batch(self, data_iter: Iterator | None = None, loss_fn: Callable | None = None) -> Tensor:
        """A whole step from ``gradient_accumulation_steps`` micro-batches; returns their mean loss over all ranks.

        ``data_iter`` yields pairs of inputs and targets, by default from ``training_data``; ``loss_fn(output, target)``
        is cross-entropy by default. If something raises, the micro-batches before it are forgotten.

        Raises:
            DtlibError: without data, or with fewer micro-batches than a step takes.
        """
        batches = data_iter if data_iter is not None else self._batches
        if batches is None or not hasattr(batches, "__next__"):
            what = "no data" if batches is None else f"a {type(batches).__name__}, which is not an iterator"
            raise DtlibError(
                f"train_batch() has {what}: pass data_iter, such as iter(loader), or training_data to initialize()."
            )
        steps, first = self.gradient_accumulation_steps(), self.micro_steps
        loss_fn = loss_fn or torch.nn.functional.cross_entropy
        total = torch.zeros((), dtype=torch.float64)
        try:
            for number in range(steps):
                if (batch := next(batches, None)) is None:
                    raise DtlibError(f"train_batch() takes {steps} micro-batches, and data_iter ended after {number}.")
                x, y = batch
                loss = self.backward(loss_fn(self(x), y))
                total += loss.detach().double().cpu() / steps
                self.step()
        except BaseException:
            self.micro_steps, self._backwards = first, 0
            self.zero_grad()
            raise
        return self.comm.all_reduce(total, op="mean")

    def held(self) -> dict[str, list]:
        """Memory that strategy and optimizer keep on this rank, by what it is for (measure/held.py)."""
        return {**held(self._strategy.forward, self.optimizer), "masters": self._masters.masters}

    def gather(self, model: nn.Module) -> None:
        """Write the values that are trained here into ``model``, which is whole; all ranks call it."""
        tied: dict = {"remove_duplicate": False}  # by each of its names: they may be tensors of their own in the other
        mine = {**dict(self.module.named_parameters(**tied)), **dict(self.module.named_buffers(**tied))}
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                tensor.copy_(self._whole(mine.get(name), tensor))
            for buffer in model.buffers():  # which ranks may have different ones of
                self.comm.broadcast(buffer)

    def _whole(self, mine, like):
        """The whole of a tensor of which this rank has ``mine``."""
        if (part := info_of(mine).slice) is not None:  # of our fully_shard
            flat = torch.zeros(like.numel(), dtype=mine.dtype, device=mine.device)
            flat[part.start : part.stop] = mine
            return self.comm.all_reduce(flat).view(like.shape)
        return mine.full_tensor() if hasattr(mine, "full_tensor") else mine

    def zero_grad(self) -> None:
        for parameter in [*self.module.parameters(), *self._masters.masters]:
            parameter.grad = None
        self.optimizer.zero_grad()

    def train(self, mode: bool = True) -> Self:
        self._strategy.forward.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # What it saves beside the model and its optimizer, and how it goes on from there

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | int | None = None, client_state: dict | None = None,
        save_latest: bool = True,
    ) -> None:  # fmt: skip
        """Save all that training needs to go on, on any number of ranks and at any stage (dtlib.checkpoint).

        All ranks call it, after a step.

        Args:
            save_dir: the checkpoint is a folder in it, called ``tag``, by default ``global_step`` and its number.
            client_state: a dictionary that JSON can hold, which ``load_checkpoint`` returns.
            save_latest: note in the file ``latest`` that this is the one to go on from.

        Raises:
            CheckpointError: on all ranks; and DtlibError in the middle of a step, or for a tag that is no name or
                differs between ranks.
        """
        saved = self._saved()
        if self.micro_steps % self.gradient_accumulation_steps():
            raise DtlibError("Checkpoints can be saved only between steps: call step() for all micro-batches first.")
        tag = _name_of(f"global_step{self.global_steps}" if tag is None else tag, self._everyone)
        client_state = {} if client_state is None else client_state
        if not isinstance(client_state, dict):
            raise DtlibError(f"client_state is {client_state!r:.60}: give a dictionary.")
        others = {"scheduler": self.lr_scheduler, "loader": self._loader, "loss_scale": self._scale}
        extra = {name: other.state_dict() for name, other in others.items() if other is not None}
        extra["kinds"] = {"scheduler": _kind(self.lr_scheduler), "dynamic": self._scale.dynamic}
        counts = {name: getattr(self, name) for name in COUNTS}
        extra = {"client_state": client_state, "counts": counts, **extra}
        checkpoint.save(self._place(save_dir, tag), extra=extra, **saved)
        if save_latest:
            self._everyone.barrier()  # where stages save by themselves
            checkpoint.point_to(Path(save_dir) / LATEST, tag, self._everyone)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | int | None = None, load_lr_scheduler_states: bool = True
    ) -> tuple[str, dict] | tuple[None, None]:
        """Go on from what ``save_checkpoint`` saved; returns the checkpoint's folder and its ``client_state``.

        All ranks call it. ``tag`` is by default that in the file ``latest``; where there is no such file it warns,
        changes nothing and returns ``None, None``. Gradients of a step that was begun are forgotten. Without
        ``load_lr_scheduler_states`` the scheduler stays as it is, and may be another one.

        Raises:
            CheckpointError, DtlibError: on all ranks.
        """
        saved = self._saved()
        if tag is None and (tag := checkpoint.pointed_to(Path(load_dir) / LATEST, self._everyone)) is None:
            if self.comm.rank == 0:
                warnings.warn(f"{load_dir} has no file {LATEST!r}: nothing was loaded; pass tag=.", stacklevel=2)
            return None, None
        tag = _name_of(tag, self._everyone)
        folder = self._place(load_dir, tag)
        stages = sorted({path.name.partition("of")[2] for path in Path(load_dir, tag).glob("stage*of*")})
        if stages and not (folder / "index.json").exists():
            raise DtlibError(
                f"{Path(load_dir, tag)} was saved by a pipeline of {' or '.join(stages)} stages, which each have a "
                "separate checkpoint: continue with the same number of stages."
            )
        extra = checkpoint.load(folder, check=partial(self._check_extra, folder, load_lr_scheduler_states), **saved)
        assert isinstance(extra, dict)
        self.zero_grad()
        self._backwards = 0
        if load_lr_scheduler_states and self.lr_scheduler is not None and "scheduler" in extra:
            self.lr_scheduler.load_state_dict(extra["scheduler"])
        if self._scale.dynamic and extra["kinds"]["dynamic"]:
            self._scale.load_state_dict(extra["loss_scale"])
        if self._loader is not None and "loader" in extra:
            self._loader.load_state_dict(extra["loader"])
        for name in COUNTS:
            setattr(self, name, extra["counts"][name])
        # The number of micro-batches a step may be another one now.
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        self._batches = self._loader.forever() if self._loader is not None else None
        return str(folder), extra["client_state"]

    def _place(self, folder, tag: str) -> Path:
        """Where the checkpoint of that name is."""
        return Path(folder) / tag

    @property
    def _everyone(self):
        """The ranks that save together."""
        return self.comm

    def _check_extra(self, folder, with_scheduler: bool, extra) -> None:
        if not isinstance(extra, dict) or "counts" not in extra:
            raise DtlibError(f"{folder} was not saved by an engine, so it has no counters: use dtlib.checkpoint.load.")
        there, here = extra["kinds"]["scheduler"], _kind(self.lr_scheduler)
        if with_scheduler and there != here:
            raise DtlibError(
                f"{folder} was saved with {there or 'no scheduler'}, but the engine has {here or 'none'}: create the "
                "same, or pass load_lr_scheduler_states=False."
            )

    def _saved(self) -> dict:
        for module in self.module.modules():
            reshard = getattr(module, "reshard", None)  # of FSDP2, which leaves parameters whole behind a forward pass
            if callable(reshard):
                reshard()
        masters = None if hasattr(self.optimizer, "shard_of") else self._masters
        return {"model": self.module, "optimizer": self.optimizer, "comm": self.comm, "masters": masters}

    # What it tells about itself: the accessors of DeepSpeedEngine

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

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

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


def _guard(optimizer, masters) -> list[bool]:
    """Have the optimizer refuse steps that are not the engine's, which sets the flag that is returned, and forget the
    gradients of parameters with those of their masters. Nothing here refers back to the engine."""
    stepping, parameters, itself = [False], masters.parameters, weakref.ref(optimizer)

    def refuse(*_) -> None:
        if not stepping[0]:
            raise DtlibError("The engine unscales and clips gradients and steps the schedule: call engine.step().")

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in parameters:
            parameter.grad = None
        if (alive := itself()) is not None:
            type(alive).zero_grad(alive, set_to_none)

    optimizer.register_step_pre_hook(refuse)
    if any(parameter is not master for parameter, master in zip(parameters, masters.masters, strict=True)):
        optimizer.zero_grad = zero_grad
    return stepping


def _kind(scheduler) -> str | None:
    return None if scheduler is None else type(scheduler).__name__


def _name_of(tag, comm) -> str:
    """A tag as the name of a folder, the same on all ranks."""
    name = str(tag) if isinstance(tag, (str, int)) else ""
    names = comm.all_gather_object(name)
    if len(set(names)) > 1:
        raise DtlibError(f"tag differs between ranks: rank 0 has {names[0]!r}; give the same on all.")
    if name in ("", ".", "..", LATEST) or Path(name).name != name:
        raise DtlibError(f"tag is {tag!r:.60}: give the name of a folder, such as 'global_step100'.")
    return name
