"""What ``dtlib.initialize`` gives: forward, backward and step of a model, as its config says."""

import weakref
from contextlib import nullcontext

import torch

from dtlib.errors import DtlibError
from dtlib.gradients.precision import LossScale, all_finite, clip_by_norm
from dtlib.measure.held import held
from dtlib.training.checkpoints import Checkpoints


class Engine(Checkpoints):
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
        self._trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._stepping = _guard(self.optimizer, self._masters)
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

    forward = __call__

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
        now = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        if unfrozen := now - self._trainable:
            raise DtlibError(
                f"{min(unfrozen)} was unfrozen after initialize(), and would not be trained: call initialize() on a "
                "new model with what is to be trained."
            )

    def train_batch(self, data_iter=None, loss_fn=None):
        """A whole step from ``gradient_accumulation_steps`` micro-batches; returns their mean loss over all ranks.

        ``data_iter`` yields pairs of inputs and targets, by default from ``training_data``; ``loss_fn(output, target)``
        is cross-entropy by default. If something raises, the micro-batches before it are forgotten.

        Raises:
            DtlibError: without data, or with fewer micro-batches than a step takes.
        """
        batches = data_iter if data_iter is not None else self._batches
        if not hasattr(batches, "__next__"):
            what = "no data" if batches is None else f"a {type(batches).__name__}, which is no iterator"
            raise DtlibError(
                f"train_batch() has {what}: pass data_iter, such as iter(loader), or give initialize() training_data."
            )
        steps, first = self.config.gradient_accumulation_steps, self.micro_steps
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
            self.micro_steps = first
            self.zero_grad()
            raise
        return self.comm.all_reduce(total, op="mean")

    def held(self) -> dict[str, list]:
        """Memory that strategy and optimizer keep on this rank, by what it is for (measure/held.py)."""
        return {**held(self._strategy.forward, self.optimizer), "masters": self._masters.masters}

    def gather(self, model) -> None:
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
        if (part := getattr(mine, "slice", None)) is not None:  # of our fully_shard
            flat = torch.zeros(like.numel(), dtype=mine.dtype, device=mine.device)
            flat[part.start : part.stop] = mine
            return self.comm.all_reduce(flat).view(like.shape)
        return mine.full_tensor() if hasattr(mine, "full_tensor") else mine

    def zero_grad(self) -> None:
        for parameter in [*self.module.parameters(), *self._masters.masters]:
            parameter.grad = None
        self.optimizer.zero_grad()

    def train(self, mode: bool = True):
        self._strategy.forward.train(mode)
        return self

    def eval(self):
        return self.train(False)


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
