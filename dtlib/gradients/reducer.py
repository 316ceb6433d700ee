"""The reducer: gradients are averaged over ranks in buckets, while autograd still computes later ones.

Parameters are numbered i = 0, 1, ... in the order of the model. Buckets are numbered b = 0, 1, ... in the order of
their launch, which is the same on all ranks: from the last parameters to the first, as gradients become ready. Four
parameters in two buckets:

    time -->         forward | backward()                            | end of backward()
    autograd                 | i=3    i=2      i=1     i=0           |
    b=0 has 3, 2             |        launch ......................... collect, finish
    b=1 has 1, 0             |                         launch ........ collect, finish

A bucket is launched when all its gradients are ready and all earlier buckets have left. Buckets with parameters that
this rank has not used wait for the end, where those count as zeros.

What travels is the collective's choice. ``AllReduce`` gives every rank the average; all buckets are in flight at a
time. ``ReduceScatter`` gives every rank its shard of the average, and collects a bucket before it launches the next, so
that there is memory for one. Communication hooks and Horovod's compression have collectives of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from sys import getrefcount
from typing import TYPE_CHECKING

import torch

from dtlib.comm.waiting import Operation, move_on, progress_thread
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.same_model import PASSES, bits_of
from dtlib.gradients.shard_info import give_kind, hooks_of_others, info_of
from dtlib.gradients.tokens import refuse_weights

if TYPE_CHECKING:
    from torch import nn

    from dtlib.comm import Communicator


class Reducer:
    """Average the gradients of ``buckets`` in each backward pass, which calls ``gradient_is_ready``.

    Args:
        buckets: in the order of their launch.
        collective: ``launch(bucket, weight, flags)`` starts to send a bucket. ``collect(buckets, flags)`` waits for
            all; it returns for each bucket which parameters any rank has used, and for each of ``flags`` whether it
            was set on any rank, and on all. ``weight`` is what this rank's gradients are multiplied with, None where
            the collective takes the mean; ``weighs``, whether it takes others.
        owner: if its ``batch_size`` is not None, this rank's gradients are weighted by it; on all ranks, or on none.
            ``forwards``, if it counts forward passes, has to be odd on all ranks, or even.
        progress: who moves messages on: ``"inline"`` the hooks of the backward pass, or a ``"thread"``.
        names: of the parameters, for errors.
        by_call: the pass ends when ``end()`` is called, not with ``backward()``: several backward passes may be one.
        root_buffers: are to be broadcast again after each pass.
        values: parameters that have to be equal on all ranks; the first passes compare them.

    The number of all samples is known only at the end. So ranks weight by their samples over a guess, and what has
    arrived is multiplied by the guess over the true number. The guess is a power of two, which rounds nothing, near the
    most samples of a pass so far, which keeps numbers of 16 bits in their range.
    """

    def __init__(self, buckets: Sequence, collective: AllReduce | ReduceScatter, owner: object, progress: str,
                 names: dict, by_call: bool = False, root_buffers: RootBuffers | None = None,
                 values: Sequence[torch.Tensor] = ()):  # fmt: skip
        self.buckets, self.collective, self.owner, self.progress = buckets, collective, owner, progress
        self.names, self.by_call, self.root_buffers = names, by_call, root_buffers
        self.synchronising = True  # else gradients stay where they are
        self.passes = 0  # that have ended since the last forget()
        self._number = {parameter: b for b, bucket in enumerate(buckets) for parameter in bucket.parameters}
        self._missing: list[set] = []  # for each bucket the parameters whose gradient is not ready in this pass
        self._launched, self._under_way = 0, False
        self._guess = 64.0
        self._values, self._compared = values, 0
        self._background = ExitStack()  # the progress thread while buckets travel

    def check(self) -> None:
        """Before a new pass: forget one that raised, or refuse to continue where gradients had left already."""
        if self._launched:
            self._background.close()
            raise DtlibError(
                "An earlier backward pass was interrupted while gradients travelled: call dtlib.reset() on all ranks "
                "and wrap the model anew."
            )
        self._under_way = False

    def gradient_is_ready(self, parameter: torch.Tensor) -> None:
        """A hook: autograd has added this parameter's gradient, and adds nothing more in this pass."""
        if not self.synchronising:
            return
        if not self._under_way:
            self._begin()
            if not self.by_call:
                torch.autograd.Variable._execution_engine.queue_callback(self.end)
        b = self._number[parameter]
        if b < self._launched:
            raise DtlibError(
                f"{self.names[parameter]} got a second gradient in one backward pass, after the first was sent: with "
                "activation checkpointing use checkpoint(..., use_reentrant=False)."
            )
        self._missing[b].discard(parameter)
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            self._launch_next()
        if self.progress == "inline":
            move_on()

    def _begin(self) -> None:
        for parameter, name in self.names.items():
            hooks: dict = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            *_, last = [None, *hooks.values()]
            if last is not None and not getattr(last, "func", last).__module__.startswith("dtlib."):
                raise DtlibError(
                    f"{name} was given a hook after that which sends its gradient, and would change it too late: "
                    "register post-accumulate hooks before the model is wrapped."
                )
        self._under_way = True
        self._missing = [set(bucket.parameters) for bucket in self.buckets]
        self._samples, self._weight = getattr(self.owner, "batch_size", None), self.collective.weight
        if self._samples is not None:
            refuse_weights(self.names, self._samples)
            self._weight = self._samples / self._guess
        self._flags = [self._samples is not None, getattr(self.owner, "forwards", 0) % 2 == 1]
        if self._values and self._compared < PASSES:
            self._flags += bits_of(self._values)

    @torch.no_grad()  # backward(create_graph=True) records what hooks do
    def _launch_next(self) -> None:
        if self.progress == "thread" and not self._launched:
            self._background.enter_context(progress_thread())
        bucket = self.buckets[self._launched]
        bucket.complete()
        self.collective.launch(bucket, self._weight, self._flags)
        self._launched += 1

    @torch.no_grad()
    def end(self) -> None:
        """Launch the other buckets, wait for all, and give gradients their averages."""
        if not self._under_way:
            self._begin()
        while self._launched < len(self.buckets):
            self._launch_next()
        if self.root_buffers:
            self.root_buffers.stale = True  # on all ranks, whatever goes wrong from here on
        try:
            used, on_any, on_all = self.collective.collect(self.buckets, self._flags)
        finally:
            self._background.close()
        self._launched, self._under_way = 0, False  # everything has arrived, so all may continue after an error
        self._check_flags(on_any, on_all)
        factor = self._correction() if on_all[0] else None
        for bucket, its_used in zip(self.buckets, used, strict=True):
            bucket.finish(factor, its_used)
        self.passes += 1

    def _check_flags(self, on_any: list, on_all: list) -> None:
        """Refuse what differs between ranks; all ranks call it."""
        differs = [some != every for some, every in zip(on_any, on_all, strict=True)]
        if self.collective.comm.simulated:
            return  # ranks that do not exist send zeros
        if any(differs[2:]) and getattr(self.owner, "_join", None) is None:  # in join() some ranks no longer step
            raise DtlibError(
                "Values of the model's parameters differ between ranks, as after load_state_dict() or another "
                "optimizer's step on one rank alone: load them on all ranks, or before the model is wrapped, which "
                "gives all ranks those of rank 0, and make the same optimizer on all."
            )
        self._compared += 1
        if any(differs[1:2]):
            forwards, self.owner.forwards = self.owner.forwards, 0  # type: ignore[attr-defined]
            raise DtlibError(
                f"This backward pass is for forward pass {forwards} here, and for a different one on another rank: "
                "one rank skipped a forward pass, for example by `continue`, or ran one more. Skip a step on all "
                "ranks or on none, and call the model for other purposes in eval() and no_grad()."
            )
        if on_any[0] and not self.collective.weighs:
            raise DtlibError("batch_size weights gradients, but a communication hook does not: use only one of them.")
        if differs[0]:
            raise DtlibError(
                f"batch_size is {self._samples} here, and set on some ranks only: set it on all of them before the "
                "backward pass, or on none."
            )

    def _correction(self) -> float:
        """The factor by which sums of weighted gradients are off; all ranks call it."""
        samples = torch.tensor(float(self._samples or 0), dtype=torch.float64)
        total = self.collective.comm.all_reduce(samples).item() or 1.0  # 1 where no rank has a sample
        factor = self._guess / total
        self._guess = max(self._guess, 2.0 ** round(math.log2(total)))
        return factor

    def forget(self) -> None:
        """A new step begins."""
        self.passes = 0
        for bucket in self.buckets:
            bucket.forget()


class RootBuffers:
    """Rank 0's buffers for all ranks, in the first forward pass of each step; all ranks call ``broadcast()``.

    Later forward passes of a step change no buffer: autograd may have saved it for the backward pass, which sets
    ``stale`` at its end. Counterpart: ``broadcast_buffers`` of torch's DDP, which does it in each forward pass.
    """

    def __init__(self, module: nn.Module, comm: Communicator):
        self._module, self._comm, self.stale = module, comm, True

    def broadcast(self, root: int = 0) -> None:
        if self.stale:
            for buffer in self._module.buffers():
                self._comm.broadcast(buffer, root)
        self.stale = False


# What travels


class Bucket:
    """Gradients of ``parameters`` that travel together, in ``dtype``; by default that of the parameters."""

    buffer: FlatBuffer  # from the launch to the end of the pass, as the handle
    handle: Operation

    def __init__(self, parameters: list, dtype: torch.dtype | None = None):
        self.parameters, self.dtype = parameters, dtype or parameters[0].dtype
        self.cut = [parameter for parameter in parameters if info_of(parameter).differs()]
        self.used = [False] * len(parameters)  # which have a gradient here

    def complete(self) -> None:
        """All gradients are ready, or will not be."""
        for parameter in self.parameters:
            check_dense(parameter.grad)
        self.used = [parameter.grad is not None for parameter in self.parameters]

    def fill(self, weight: float | None, extra: int, free: bool = True) -> FlatBuffer:
        """Copy gradients into flat memory, and free them one by one; ``extra`` elements are zeros at its end."""
        shapes = [parameter.shape for parameter in self.parameters]
        buffer = FlatBuffer(shapes, self.dtype, self.parameters[0].device, extra, zeroed=False)
        buffer.tail.zero_()
        for parameter, view in zip(self.parameters, buffer.views, strict=True):
            gradient = parameter.grad
            if free:
                parameter.grad = None
            if gradient is None:
                view.zero_()
            elif weight is None:
                view.copy_(gradient)
            else:
                torch.mul(gradient.detach().to(view.dtype), weight, out=view)
        return buffer

    def finish(self, factor: float | None, used: list) -> None:
        """The average has arrived: gradients are views of it, which live as long as one of them. A parameter that no
        rank has used has none."""
        if factor is not None:
            self.buffer.flat[: self.buffer.numel].mul_(factor)
        for parameter, view, is_used in zip(self.parameters, self.buffer.views, used, strict=True):
            parameter.grad = view if is_used else None
        for parameter in self.cut:
            give_kind(parameter)
        del self.buffer, self.handle


class GradientShard(Bucket):
    """A bucket, and this rank's shard of its ``average``: None until one has arrived, then added up over passes.

    Gradients travel in ``dtype``, and shards are kept in ``kept_in``.
    """

    average: torch.Tensor | None
    _unscaled: torch.Tensor | None

    def __init__(self, parameters: list, shards: Shards, dtype: torch.dtype | None = None,
                 kept_in: torch.dtype | None = None):  # fmt: skip
        self.shards, self.kept_in = shards, kept_in or parameters[0].dtype
        super().__init__(parameters, dtype)
        self.forget()

    def complete(self) -> None:
        """Passes add up until ``forget``."""
        before = self.used
        super().complete()
        self.used = [now or then for now, then in zip(self.used, before, strict=True)]

    def flat_gradients(self, weight: float | None) -> torch.Tensor:
        """The gradients in one flat memory, and nowhere else: its own for a single one that nobody else sees."""
        first = self.parameters[0]
        if len(self.parameters) > 1 or self.shards.padding or not _is_alone(first, self.dtype):
            return self.fill(weight, self.shards.padding).flat
        whole, first.grad = first.grad.detach().view(-1), None
        return whole if weight is None else whole.mul_(weight)

    def take(self, shard: torch.Tensor, weighted: bool) -> None:
        """Add what has arrived to the average; apart from it where weights are not known before ``finish``."""
        shard = shard.to(self.kept_in)
        if self.average is None:
            self.average = shard
        elif weighted:
            self._unscaled = shard
        else:
            self.average.add_(shard)

    def finish(self, factor: float | None, used: list) -> None:
        assert self.average is not None
        self.used_anywhere = used
        if self._unscaled is not None:
            self.average.add_(self._unscaled, alpha=factor or 1.0)
        elif factor is not None:
            self.average.mul_(factor)
        self._unscaled = None

    def forget(self) -> None:
        """The next average is a new one."""
        self.used = self.used_anywhere = [False] * len(self.parameters)
        self.average = self._unscaled = None


class AllReduce:
    """Every rank gets the average. Behind the gradients of a bucket travels a number for each parameter, whether this
    rank has used it, and one for each flag."""

    weighs = True

    def __init__(self, comm: Communicator, algorithm: str | None = None):
        self.comm, self.algorithm = comm, algorithm
        self.weight: float | None = 1 / comm.size

    def launch(self, bucket: Bucket, weight: float | None, flags: list[bool]) -> None:
        tail = torch.tensor([*bucket.used, *flags])
        bucket.buffer = bucket.fill(weight, len(tail))
        bucket.buffer.tail.copy_(tail)
        bucket.handle = self.comm.all_reduce(bucket.buffer.flat, async_op=True, algorithm=self.algorithm)

    def collect(self, buckets: Sequence[Bucket], flags: list[bool]) -> tuple[list, list, list]:
        for bucket in buckets:
            bucket.handle.wait()
        tails = [bucket.buffer.tail.tolist() for bucket in buckets]
        counts = tails[0][-len(flags) :]
        used = [tail[: -len(flags)] for tail in tails]
        return used, [count > 0 for count in counts], [count == self.comm.size for count in counts]


class ReduceScatter:
    """Every rank gets its shard of the average. Which parameters ranks have used they tell each other at the end."""

    weight, weighs = None, True

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._travels: tuple | None = None  # a bucket, and whether it is weighted

    def launch(self, bucket: GradientShard, weight: float | None, flags: list[bool]) -> None:
        self._collect_last()
        whole = bucket.flat_gradients(weight)
        own = whole.new_empty(bucket.shards.length)
        op = "mean" if weight is None else "sum"
        bucket.handle = self.comm.reduce_scatter(own, whole, op, async_op=True, overwrite=True)
        self._travels = bucket, flags[0]

    def _collect_last(self) -> None:
        if self._travels:
            bucket, sized = self._travels
            bucket.take(bucket.handle.wait(), sized)
            self._travels = None
            del bucket.handle

    def collect(self, buckets: Sequence[GradientShard], flags: list[bool]) -> tuple[list, list, list]:
        self._collect_last()
        mine = [*flags, *(not flag for flag in flags), *(used for bucket in buckets for used in bucket.used)]
        rest = iter(self.comm.all_reduce(torch.tensor(mine, dtype=torch.int8), op="max").tolist())
        on_any, on_all = [next(rest) > 0 for _ in flags], [next(rest) == 0 for _ in flags]
        return [[next(rest) for _ in bucket.parameters] for bucket in buckets], on_any, on_all


def _is_alone(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether memory of its gradient can be written over: autograd may give the same to another parameter, and to
    whoever called ``backward(cotangent)``, and hooks may keep it."""
    # No name for the gradient here, which would be a reference.
    if parameter.grad is None or parameter.grad.dtype != dtype or not parameter.grad.is_contiguous():
        return False
    new = torch.zeros(1, requires_grad=True)
    new.grad = torch.zeros(1)
    return _references(parameter) == _references(new)


def _references(parameter) -> tuple[int, int]:
    """To a gradient, and to its memory."""
    gradient = parameter.grad
    return getrefcount(gradient), torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)


def check_dense(gradient: torch.Tensor | None) -> None:
    """Flat memory has room for every element."""
    if gradient is not None and gradient.is_sparse:
        raise DtlibError("A gradient is sparse, and only dense ones are averaged: build embeddings with sparse=False.")


def refuse_averaged(named: dict) -> None:
    """Refuse parameters, by name, whose gradients another reducer takes during the backward pass."""
    for name, parameter in named.items():
        if any(isinstance(getattr(hook, "__self__", None), Reducer) for hook in hooks_of_others(parameter)):
            raise DtlibError(
                f"Gradients of {name} are averaged already, by a DataParallel, or by a ZeroOptimizer at stage 2: build "
                "the model from scratch, and wrap it once."
            )


def progress_for(comm: Communicator, tensors: Iterable[torch.Tensor], wanted: str | None, who: str) -> str:
    """``inline`` where computing keeps the cores busy, ``thread`` where it leaves them idle: an accelerator, or an
    emulated network; ``wanted`` overrides it."""
    if wanted not in (None, "inline", "thread"):
        raise DtlibError(f"{who}(progress={wanted!r}): choose 'inline' or 'thread'.")
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return wanted or ("inline" if on_cpu and getattr(comm, "wire", None) is None else "thread")
