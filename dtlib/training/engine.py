"""What ``dtlib.initialize`` gives: forward, backward and step of a model, as its config says."""

from contextlib import nullcontext

import torch

from dtlib import checkpoint
from dtlib.errors import DtlibError
from dtlib.precision import LossScale, all_finite, clip_by_norm

COUNTS = ("global_steps", "skipped_steps")


class Engine:
    """A model, its optimizer and its schedule. ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``, for each
    micro-batch; every ``gradient_accumulation_steps``-th ``step()`` changes the model. Counterpart: DeepSpeedEngine."""

    def __init__(self, module, strategy, scheduler, config, comm, loader):
        self.module = module
        self.optimizer, self.lr_scheduler = strategy.optimizer, scheduler
        self.config, self.comm = config, comm
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.before_step_hooks = []  # functions without arguments, called between the last backward() and the step
        self._strategy, self._masters = strategy, strategy.masters
        self._loader = loader
        self._batches = loader.forever() if loader is not None else None
        self._norm = None
        self._loss_of_batch = None
        fp16 = config.fp16
        self._scale = LossScale()
        if fp16.enabled and fp16.loss_scale == 0:
            window = fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale
            self._scale = LossScale(2.0**fp16.initial_scale_power, True, *window)
        elif fp16.enabled:
            self._scale = LossScale(fp16.loss_scale)

    def __call__(self, *args, **kwargs):
        with nullcontext() if self.is_gradient_accumulation_boundary() else self._strategy.no_sync():
            return self._strategy.forward(*args, **kwargs)

    def backward(self, loss):
        """Gradients of this micro-batch's mean loss; at the last one of a step they are averaged over all ranks."""
        scaled = loss * (self._scale.scale / self.config.gradient_accumulation_steps)
        with nullcontext() if self.is_gradient_accumulation_boundary() else self._strategy.no_sync():
            scaled.backward()
        return loss

    def step(self) -> None:
        """After each ``backward``. At a boundary: unscale, clip, step the optimizer and the schedule."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        self._update()

    def _update(self) -> None:
        """What happens at a boundary."""
        for hook in self.before_step_hooks:
            hook()
        strategy = self._strategy
        gradients = strategy.reduce(self._scale.scale)
        # What is found here is the same on all ranks: averages are, and of shards the ranks tell each other.
        overflow = self.config.fp16.enabled and not all_finite(gradients, strategy.shards_on)
        self._scale.update(overflow)
        if overflow:
            self.skipped_steps += 1
        else:
            if self.config.gradient_clipping:
                self._norm = self._clip(gradients)
            strategy.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.zero_grad()
        self.global_steps += 1

    def _clip(self, gradients) -> float:
        return clip_by_norm(gradients, self.config.gradient_clipping, self._strategy.shards_on)

    def train_batch(self, data_iter=None, loss_fn=None):
        """A whole step from ``gradient_accumulation_steps`` micro-batches; returns their mean loss over all ranks.

        ``data_iter`` yields pairs of inputs and targets, by default from ``training_data``; ``loss_fn(output, target)``
        is cross-entropy by default.
        """
        batches = data_iter if data_iter is not None else self._batches
        if batches is None:
            raise DtlibError("train_batch() has no data: pass data_iter, or give initialize() training_data.")
        loss_fn = loss_fn or torch.nn.functional.cross_entropy
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(self.config.gradient_accumulation_steps):
            x, y = next(batches)
            loss = self.backward(loss_fn(self(x), y))
            total += loss.detach().double().cpu() / self.config.gradient_accumulation_steps
            self.step()
        return self.comm.all_reduce(total, op="mean")

    def save_checkpoint(self, folder, client_state=None) -> None:
        """Save all that training needs to go on, on any number of ranks and at any stage (dtlib.checkpoint).

        ``client_state`` is what JSON can hold, and what ``load_checkpoint`` returns. All ranks call it, after a step.

        Raises:
            CheckpointError: on all ranks; and DtlibError in the middle of a step, or on torch's classes.
        """
        parts = {"scheduler": self.lr_scheduler, "loader": self._loader, "loss_scale": self._scale}
        extra = {name: part.state_dict() for name, part in parts.items() if hasattr(part, "state_dict")}
        counts = {name: getattr(self, name) for name in COUNTS}
        checkpoint.save(folder, extra={"client_state": client_state, "counts": counts, **extra}, **self._saved())

    def load_checkpoint(self, folder):
        """Go on from what ``save_checkpoint`` saved; returns its ``client_state``. All ranks call it."""
        extra = checkpoint.load(folder, **self._saved())
        if not isinstance(extra, dict) or "counts" not in extra:
            raise DtlibError(f"{folder} was not saved by an engine, so it has no counters: use dtlib.checkpoint.load.")
        parts = {"scheduler": self.lr_scheduler, "loader": self._loader, "loss_scale": self._scale}
        for name, part in parts.items():
            if hasattr(part, "load_state_dict") and name in extra:
                part.load_state_dict(extra[name])
        for name in COUNTS:
            setattr(self, name, extra["counts"][name])
        # The number of micro-batches a step may be another one now.
        self.micro_steps = self.global_steps * self.config.gradient_accumulation_steps
        self._batches = self._loader.forever() if self._loader is not None else None
        return extra["client_state"]

    def _saved(self) -> dict:
        if self.micro_steps % self.config.gradient_accumulation_steps:
            raise DtlibError("Checkpoints are saved and loaded between steps: call step() for all micro-batches first.")
        if not self._strategy.portable:
            raise DtlibError(
                "torch has sharded this engine: save with torch.distributed.checkpoint, or use runtime='dtlib'."
            )
        masters = None if hasattr(self.optimizer, "part_of") else self._masters
        return {"model": self.module, "optimizer": self.optimizer, "comm": self.comm, "masters": masters}

    def zero_grad(self) -> None:
        for parameter in [*self.module.parameters(), *self._masters.masters]:
            parameter.grad = None
        self.optimizer.zero_grad()

    def train(self, mode: bool = True):
        self._strategy.forward.train(mode)
        return self

    def eval(self):
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next ``step()`` changes the model."""
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before they were clipped; None where nothing is clipped."""
        return self._norm

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        return self._scale.scale

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps
