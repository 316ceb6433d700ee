"""Horovod's optimizer, which averages gradients over ranks before its step.

Counterpart: ``horovod.torch.optimizer``. Four parameters in two buckets:

backward()       grad of w4   w3   w2   w1
buckets          [w4 w3 --- launch 0]  [w2 w1 --- launch 1]
step()           launch the rest, with zeros for missing gradients; wait; write averages into .grad; step
"""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from dtlib.errors import number
from dtlib.gradients.buckets import FIRST_BUCKET, LARGEST_BUCKET, buckets_of
from dtlib.gradients.reducer import AllReduce, Bucket, Reducer
from dtlib.gradients.same_model import check_same_model
from dtlib.gradients.shard_info import replace_hook
from dtlib.horovod.basics import HorovodInternalError, communicator, size
from dtlib.horovod.compression import Compression, NoneCompressor
from dtlib.horovod.operations import Average, check_op, version_of


class _Bucket(Bucket):
    """A bucket that sends a copy of its gradients. They stay in ``.grad``, so that changes by the user are detected."""

    def finish(self, used: list) -> None:
        """Write the reduced gradients into ``.grad``, except of parameters that have been frozen since the launch."""
        for parameter, view in zip(self.parameters, self.buffer.views, strict=True):
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad.copy_(view)
        del self.buffer, self.handle


class _Compressed(AllReduce):
    """An all-reduce of buckets in the compressed dtype; unused parameters count as zeros.

    For an average, each rank divides its gradients before the sum, because a sum in 16 bits could overflow.
    """

    def __init__(self, compression: type[NoneCompressor], op: int):
        super().__init__(communicator())
        self.compression = compression
        self.weight = 1 / size() if op == Average else 1.0
        self._contexts: dict[Bucket, object] = {}  # bucket -> context for decompress

    def launch(self, bucket: Bucket, flags: list[bool]) -> None:
        bucket.buffer = bucket.fill(0, self.weight, free=False)
        short, self._contexts[bucket] = self.compression.compress(bucket.buffer.flat)
        bucket.handle = communicator().all_reduce(short, async_op=True)

    def collect(self, buckets: Sequence[Bucket], flags: list[bool]) -> tuple[list, list]:
        for bucket in buckets:
            short = bucket.handle.wait()
            bucket.buffer.flat.copy_(self.compression.decompress(short, self._contexts[bucket]))
        # Flags from the second on are a checksum of the parameters, which the reducer compares in some passes.
        everyones = zip(*communicator().all_gather_object(flags) if len(flags) > 1 else [flags], strict=True)
        return [bucket.used for bucket in buckets], [len(set(flag)) > 1 for flag in everyones]


class _Distributed(Optimizer):
    """A mixin that comes before the torch optimizer's class, so that ``super()`` calls the torch optimizer."""

    def _distribute(self, named_parameters, compression: type[NoneCompressor], passes: int, op: int):
        self.backward_passes_per_step = passes
        self._parameter_names = self._checked_names(named_parameters)
        # Reversed, because the backward pass computes the gradients of the last layer first.
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad][::-1]
        named = {self._parameter_names[parameter]: parameter for parameter in trained}
        check_same_model(named, communicator(), "DistributedOptimizer")
        buckets = buckets_of(trained, LARGEST_BUCKET, FIRST_BUCKET) if size() > 1 else []
        self._buckets = [_Bucket([trained[i] for i in bucket]) for bucket in buckets]
        names = {parameter: name for name, parameter in named.items()} if buckets else {}
        self._reducer = Reducer(self._buckets, _Compressed(compression, op), None, "inline", names, by_call=True,
                                values=trained)  # fmt: skip
        # Parameter -> number of backward passes until its gradient is sent.
        self._delay = dict.fromkeys(names, passes)
        # Parameter -> (gradient, version counter) when it was sent: synchronize() detects later changes with it.
        self._ready: dict[torch.Tensor, tuple] = {}
        self._synchronized, self._should_synchronize = False, True
        for parameter in names:
            replace_hook(parameter, self._gradient_is_ready)

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _checked_names(self, named_parameters) -> dict:
        if named_parameters is None:
            return {parameter: f"allreduce.noname.{i}" for i, parameter in enumerate(self._parameters())}
        named_parameters = list(named_parameters)
        names = [name for name, _ in named_parameters]
        if len(set(names)) < len(names):
            raise ValueError(f"named_parameters has names twice: {sorted(names)}. Pass model.named_parameters().")
        known = {parameter: name for name, parameter in named_parameters}
        if unnamed := [tuple(parameter.shape) for parameter in self._parameters() if parameter not in known]:
            raise ValueError(
                "named_parameters was specified, but one or more model parameters were not named: those of shape "
                f"{', '.join(map(str, unnamed))}. Pass model.named_parameters() of the whole model."
            )
        return known

    # Gradients

    def _gradient_is_ready(self, parameter) -> None:
        if self._delay[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._delay[parameter] -= 1
        if not self._delay[parameter]:
            self._ready[parameter] = parameter.grad, version_of(parameter.grad)
            self._reducer.gradient_is_ready(parameter)

    def synchronize(self) -> None:
        """Reduce all gradients, and wait for them.

        A parameter without a gradient counts as zeros, because it may have one on other ranks.
        """
        for parameter in self._parameters() if size() > 1 else []:
            if parameter.requires_grad and parameter not in self._delay:
                raise ValueError(
                    f"A parameter of shape {tuple(parameter.shape)} was frozen or missing when this "
                    "DistributedOptimizer was created: create it again."
                )
        self._delay = dict.fromkeys(self._delay, self.backward_passes_per_step)
        ready, self._ready = self._ready, {}
        changed = [p for p, then in ready.items() if p.grad is not then[0] or version_of(p.grad) != then[1]]
        self._reducer.end()
        if changed:
            raise HorovodInternalError(
                f"The gradient of {self._parameter_names[changed[0]]!r} was changed or replaced between backward() and "
                "step(), perhaps after it was sent: call optimizer.synchronize() first, then `with "
                "optimizer.skip_synchronize(): optimizer.step()`."
            )
        self._synchronized = True

    # Public methods

    @contextmanager
    def skip_synchronize(self):
        """Return a context in which ``step()`` does not reduce, for use after ``synchronize()`` and clipping."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure=None):
        """Reduce the gradients, then step. With a ``closure``, which computes the gradients, reduce after it."""
        loss = None if closure is None else closure()
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice.",
                    stacklevel=2,
                )
            self.synchronize()
        super().step()
        self._synchronized = False
        return loss

    def zero_grad(self, *args, **kwargs):
        if any(delay != self.backward_passes_per_step for delay in self._delay.values()):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        return super().zero_grad(*args, **kwargs)


def DistributedOptimizer(optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
                         compression: type[NoneCompressor] = Compression.none, backward_passes_per_step: int = 1,
                         op: int = Average) -> _Distributed:  # fmt: skip
    """Return an optimizer of the same class that averages gradients over ranks before each step.

    Args:
        optimizer: a torch optimizer. State and parameter groups are shared with it: use only the new one.
        named_parameters: ``model.named_parameters()``; names are compared between ranks.
        compression: ``Compression.fp16`` sends gradients in 16 bits.
        backward_passes_per_step: the number of backward passes whose gradients are added before they are reduced.
        op: ``Average`` or ``Sum``. Gradients must not be sparse.

    ``step()`` waits for all gradients. To change gradients before the step, as clipping and a GradScaler do::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Raises:
        ValueError: if names are missing or repeated, and for LBFGS.
        AssertionError: from ``backward()`` after more than ``backward_passes_per_step`` passes; from ``zero_grad()``
            between ``backward()`` and ``step()``.
        HorovodInternalError: from ``step()`` if gradients were changed after they had been sent.
    """
    check_op(op, "DistributedOptimizer")
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is wrapped already; wrap the torch optimizer once.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("DistributedOptimizer: LBFGS computes more gradients on some ranks: use SGD or Adam.")
    number("backward_passes_per_step", backward_passes_per_step, error=ValueError)
    # As in Horovod, the result is an instance of a new class that has the name and the methods of the old class.
    kind = type(optimizer.__class__.__name__, (_Distributed, optimizer.__class__), {})
    distributed: _Distributed = object.__new__(kind)
    # Both optimizers share all attributes, so a scheduler that was made before sets the learning rates of both. "step"
    # is where such a scheduler has stored its wrapper of the old step.
    distributed.__dict__ = optimizer.__dict__
    distributed.__dict__.pop("step", None)
    distributed._distribute(named_parameters, compression, backward_passes_per_step, op)
    return distributed
