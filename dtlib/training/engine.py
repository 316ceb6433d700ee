"""The object that ``dtlib.initialize`` returns: forward, backward, step and checkpoints, as the config says.

Methods have the names that scripts written for DeepSpeed call.
"""

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
from dtlib.measure.buffers import tensors_by_kind
from dtlib.training.config import Config
from dtlib.training.data import RankLoader
from dtlib.training.strategies import Replicated
from dtlib.world import init

COUNTS = ("global_steps", "skipped_steps")
LATEST = "latest"


class Engine:
    """A model with its optimizer and its learning rate schedule.

    For each micro-batch call ``engine(x)``, ``engine.backward(loss)`` and ``engine.step()``. Only every
    ``gradient_accumulation_steps``-th ``step()`` changes the model. Counterpart: DeepSpeedEngine.
    """

    module: nn.Module
    optimizer: Optimizer
    config: Config
    micro_steps: int
    _scale: LossScale
    _norm: float | None

    def __init__(self, module: nn.Module, strategy: Replicated, scheduler: LRScheduler | None, config: Config,
                 comm: Communicator, loader: RankLoader | None):  # fmt: skip
        self.module = module
        self.optimizer, self.lr_scheduler = strategy.optimizer, scheduler
        self.config, self.comm = config, comm
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.before_step_hooks: list[Callable[[], object]] = []  # called after a step's last backward()
        self._strategy, self._masters = strategy, strategy.masters
        self._loader = loader
        self._batches = loader.forever() if loader is not None else None
        self._norm = None
        self._trainable = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._backwards = 0  # number of backward() calls since the last step()
        self._stepping = _guard(self.optimizer, self._masters)
        fp16 = config.fp16
        self._scale = LossScale()
        if fp16.enabled and fp16.loss_scale == 0:
            window = fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale
            self._scale = LossScale(2.0**fp16.initial_scale_power, True, *window)
        elif fp16.enabled:
            self._scale = LossScale(fp16.loss_scale)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the model's output for one micro-batch."""
        with nullcontext() if self.is_gradient_accumulation_boundary() else self._strategy.no_sync():
            return self._strategy.forward(*args, **kwargs)

    __call__: Callable = forward  # returns any type, as in nn.Module

    def backward(self, loss: Tensor) -> Tensor:
        """Add the gradients of this micro-batch's mean loss. At ZeRO stage 0 a step's last call averages over ranks.

        The loss is divided by ``gradient_accumulation_steps`` here, so do not divide it yourself.
        """
        self._check_gradients_present()
        if self._backwards and self.gradient_accumulation_steps() > 1:
            raise DtlibError(
                "backward() was called twice without step(): call step() after each backward(), because it counts the "
                "micro-batches of gradient_accumulation_steps; add several losses of one micro-batch before backward()."
            )
        self._backwards += 1
        scaled = loss * (self._scale.scale / self.gradient_accumulation_steps())
        with nullcontext() if self.is_gradient_accumulation_boundary() else self._strategy.no_sync():
            scaled.backward()
        return loss

    def step(self) -> None:
        """End a micro-batch. At a boundary: unscale, clip, step the optimizer and the schedule.

        Raises:
            DtlibError: without a ``backward`` since the last ``step``.
        """
        if not self._backwards:
            raise DtlibError(
                "step() without engine.backward(loss): call engine.backward(loss), which scales the loss, before each "
                "step(), not loss.backward()."
            )
        boundary, self._backwards = self.is_gradient_accumulation_boundary(), 0
        self.micro_steps += 1
        if not boundary:
            return
        self._update()

    def _check_gradients_present(self) -> None:
        """Raise if the gradients of earlier micro-batches of this step have been cleared."""
        done = self.micro_steps % self.gradient_accumulation_steps()
        known = [p for group in self.optimizer.param_groups for p in group["params"]] + self._masters.parameters
        if done and all(parameter.grad is None for parameter in known):
            raise DtlibError(
                f"Gradients of {done} micro-batches of this step are missing, for example after zero_grad(): leave "
                "zero_grad() out, because the engine calls it after the last micro-batch of a step."
            )

    def _update(self) -> None:
        """Update the model at a boundary, or skip the step if float16 gradients overflowed."""
        self._refuse_unfrozen()
        for hook in self.before_step_hooks:
            hook()
        strategy = self._strategy
        gradients = strategy.reduce(self._scale.scale)
        # All ranks must decide alike. Averaged gradients are equal on all ranks; for shards, all_finite reduces over
        # the ranks.
        overflow = self.config.fp16.enabled and not all_finite(gradients, strategy.shards_on)
        if overflow and self._scale.dynamic and self._scale.scale <= self._scale.smallest:
            raise DtlibError(
                f"Gradients overflow at the smallest loss scale, {self._scale.scale:g}, so training stops: use bf16, a "
                "lower rate, or a lower fp16.min_loss_scale."
            )
        self._scale.update(overflow)
        if overflow:
            self.skipped_steps += 1
            if not self._scale.dynamic and self.comm.rank == 0:
                warnings.warn(
                    "Gradients overflow in float16, so this step is skipped: fp16.loss_scale is fixed at "
                    f"{self._scale.scale:g}. Set a lower one, or 0 for a scale that adapts.", stacklevel=3,
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
            # FSDP2 swaps sharded and unsharded parameters, so an identity check fails for its DTensors, which have
            # full_tensor.
            if parameter.requires_grad and known is not parameter and not hasattr(known, "full_tensor"):
                raise DtlibError(
                    f"{name} was unfrozen or replaced after initialize(), so it would not be trained: call "
                    "initialize() on a new model, with all parameters to train."
                )

    def train_batch(self, data_iter: Iterator | None = None, loss_fn: Callable | None = None) -> Tensor:
        """Run a complete step of ``gradient_accumulation_steps`` micro-batches; return their mean loss over all ranks.

        ``data_iter`` yields pairs of inputs and targets, by default from ``training_data``. ``loss_fn(output, target)``
        is cross-entropy by default. If a micro-batch raises, the gradients of the micro-batches before it are cleared.

        Raises:
            DtlibError: without data, or if ``data_iter`` ends before the step does.
        """
        steps, first = self.gradient_accumulation_steps(), self.micro_steps
        loss_fn = loss_fn or torch.nn.functional.cross_entropy
        total = torch.zeros((), dtype=torch.float64)
        try:
            for x, y in self._micro_batches(data_iter):
                loss = self.backward(loss_fn(self(x), y))
                total += loss.detach().double().cpu() / steps
                self.step()
        except BaseException:
            self.micro_steps, self._backwards = first, 0
            self.zero_grad()
            raise
        return self.comm.all_reduce(total, op="mean")

    def _micro_batches(self, data_iter: Iterator | None) -> Iterator:
        """Yield the micro-batches of one step."""
        batches = data_iter if data_iter is not None else self._batches
        if batches is None or not hasattr(batches, "__next__"):
            what = "no data" if batches is None else f"a {type(batches).__name__}, which is not an iterator"
            raise DtlibError(
                f"train_batch() has {what}: pass data_iter, such as iter(loader), or training_data to initialize()."
            )
        for number in range(steps := self.gradient_accumulation_steps()):
            if (batch := next(batches, None)) is None:
                raise DtlibError(f"train_batch() needs {steps} micro-batches, but data_iter ended after {number}.")
            yield batch

    def tensors_by_kind(self) -> dict[str, list]:
        """Return the tensors that strategy and optimizer store on this rank, by purpose (measure/buffers.py)."""
        return {**tensors_by_kind(self._strategy.forward, self.optimizer), "masters": self._masters.masters}

    def gather(self, model: nn.Module) -> None:
        """Write the trained values into ``model``, which is not sharded; all ranks call this."""
        # Tied parameters are one tensor here, but `model` may have one tensor for each name. So list all names.
        tied: dict = {"remove_duplicate": False}
        mine = {**dict(self.module.named_parameters(**tied)), **dict(self.module.named_buffers(**tied))}
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                tensor.copy_(self._whole(mine.get(name), tensor))
            # Buffers, such as running statistics, may differ between ranks: rank 0's values win.
            for buffer in model.buffers():
                self.comm.broadcast(buffer)

    def _whole(self, mine, like):
        """Return the full tensor for ``mine``, which this rank may have as a shard."""
        # Our fully_shard: each rank fills its own slice, and the sum over ranks is the full tensor.
        if (part := info_of(mine).slice) is not None:
            flat = torch.zeros(like.numel(), dtype=mine.dtype, device=mine.device)
            flat[part.start : part.stop] = mine
            return self.comm.all_reduce(flat).view(like.shape)
        return mine.full_tensor() if hasattr(mine, "full_tensor") else mine

    def zero_grad(self) -> None:
        """Clear the gradients of parameters and master weights."""
        for parameter in [*self.module.parameters(), *self._masters.masters]:
            parameter.grad = None
        self.optimizer.zero_grad()

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as ``nn.Module.train`` does; return the engine."""
        self._strategy.forward.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode; return the engine."""
        return self.train(False)

    # Checkpoints

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | int | None = None, client_state: dict | None = None
    ) -> None:
        """Save the complete state of training; any number of ranks and any ZeRO stage can load it.

        All ranks call this, after a step. A pipeline needs the same number of stages to load it. ``tag`` is written to
        the file ``latest``, from which ``load_checkpoint`` reads its default. See dtlib.checkpoint.

        Args:
            save_dir: the checkpoint is the folder ``tag`` in it, by default ``global_step`` and the number of steps.
            client_state: a dictionary that JSON can store; ``load_checkpoint`` returns it.

        Raises:
            CheckpointError: on all ranks, if the checkpoint cannot be written.
            DtlibError: in the middle of a step, or for a tag that is no file name or differs between ranks.
        """
        saved = self._saved()
        if self.micro_steps % self.gradient_accumulation_steps():
            raise DtlibError("Checkpoints can be saved only between steps: call step() for all micro-batches first.")
        tag = _name_of(f"global_step{self.global_steps}" if tag is None else tag, self._everyone)
        client_state = {} if client_state is None else client_state
        if not isinstance(client_state, dict):
            raise DtlibError(f"client_state is {client_state!r:.60}: pass a dictionary.")
        # load_checkpoint() uses "kinds" to refuse the state of another scheduler.
        others = {"scheduler": self.lr_scheduler, "loader": self._loader, "loss_scale": self._scale}
        extra = {name: other.state_dict() for name, other in others.items() if other is not None}
        extra["kinds"] = {"scheduler": _kind(self.lr_scheduler), "dynamic": self._scale.dynamic}
        counts = {name: getattr(self, name) for name in COUNTS}
        extra = {"client_state": client_state, "counts": counts, **extra}
        checkpoint.save(self._place(save_dir, tag), extra=extra, **saved)
        # Each pipeline stage saves its own checkpoint. Wait for all of them before `latest` names this one.
        self._everyone.barrier()
        checkpoint.write_latest(Path(save_dir) / LATEST, tag, self._everyone)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | int | None = None, load_lr_scheduler_states: bool = True
    ) -> tuple[str, dict] | tuple[None, None]:
        """Continue from a checkpoint of ``save_checkpoint``; return its folder and its ``client_state``.

        All ranks call this. ``tag`` is by default read from the file ``latest``. If that file is missing, rank 0 warns,
        nothing changes, and the method returns ``None, None``. Gradients of a started step are cleared. Without
        ``load_lr_scheduler_states`` the scheduler keeps its state and may be of another type.

        Raises:
            CheckpointError, DtlibError: on all ranks.
        """
        saved = self._saved()
        if tag is None and (tag := checkpoint.read_latest(Path(load_dir) / LATEST, self._everyone)) is None:
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
        if load_lr_scheduler_states and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(extra["scheduler"])
        if self._scale.dynamic and extra["kinds"]["dynamic"]:
            self._scale.load_state_dict(extra["loss_scale"])
        if self._loader is not None and "loader" in extra:
            self._loader.load_state_dict(extra["loader"])
        for name in COUNTS:
            setattr(self, name, extra["counts"][name])
        # The number of micro-batches per step may differ from that of the saved run.
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        self._batches = self._loader.forever() if self._loader is not None else None
        return str(folder), extra["client_state"]

    def _place(self, folder, tag: str) -> Path:
        """Return the folder of the checkpoint ``tag``."""
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
            # After a forward pass FSDP2's root module keeps its parameters unsharded: shard them again before saving.
            reshard = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()
        # ZeroOptimizer saves its own master weights.
        masters = None if hasattr(self.optimizer, "shard_of") else self._masters
        return {"model": self.module, "optimizer": self.optimizer, "comm": self.comm, "masters": masters}

    # Accessors with the names of DeepSpeedEngine

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the next ``step()`` changes the model."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping, or None without clipping."""
        return self._norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        """Return the current loss scale; 1 without float16."""
        return self._scale.scale

    def train_batch_size(self) -> int:
        """Return the number of samples per step, over all ranks."""
        assert self.config.train_batch_size is not None  # filled in by config.read(), like the two below
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples per micro-batch on one rank."""
        assert self.config.train_micro_batch_size_per_gpu is not None
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches per step on one rank."""
        assert self.config.gradient_accumulation_steps is not None
        return self.config.gradient_accumulation_steps

    def fp16_enabled(self) -> bool:
        """Return whether the model is in float16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Return whether the model is in bfloat16."""
        return self.config.bf16.enabled

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return self.config.zero_optimization.stage

    @property
    def global_rank(self) -> int:
        """This rank's world rank."""
        return init().rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the world, including all stages of a pipeline."""
        return init().size

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))


def _guard(optimizer, masters) -> list[bool]:
    """Make the optimizer refuse a ``step()`` that does not come from the engine; return a flag that allows it.

    The engine sets the flag during its own step. With master weights, ``optimizer.zero_grad()`` also clears the
    gradients of the 16-bit parameters. Nothing here refers to the engine, so that it can be freed.
    """
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
    """Return a tag as a folder name; raise if it differs between ranks or is no folder name."""
    name = str(tag) if isinstance(tag, (str, int)) else ""
    names = comm.all_gather_object(name)
    if len(set(names)) > 1:
        raise DtlibError(f"tag differs between ranks: rank 0 has {names[0]!r}; pass the same on all.")
    if name in ("", ".", "..", LATEST) or Path(name).name != name:
        raise DtlibError(f"tag is {tag!r:.60}: pass the name of a folder, such as 'global_step100'.")
    return name
