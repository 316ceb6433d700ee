"""Gradients that are averaged during the backward pass, of which each rank keeps its shard: ZeRO stages 2 and 3.

bucket's gradients have all arrived    copied into one flat memory, and freed; a large one travels from its own
reduce_scatter                      over that memory, into new memory of a shard
at the next launch, or the end      the flat memory is freed, and the shard is this rank's average, or is added to it

So beside gradients that autograd computes and shards, a rank holds one bucket at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, NoReturn

import torch

from dtlib.comm.waiting import Handle
from dtlib.errors import DtlibError
from dtlib.gradients.backward import BackwardPass, RanksDisagree
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.local_gradient import is_gone
from dtlib.gradients.tokens import refuse_weights

if TYPE_CHECKING:
    from dtlib.comm import Communicator


class GradientShard:
    """A bucket: ``parameters`` whose gradients travel together, and this rank's shard of their ``average``.

    They travel and are added up in ``dtype``, and are kept in ``kept_in``; both are by default that of the parameters.
    The average is None until one has arrived.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], shards: Shards, dtype: torch.dtype | None = None,
        kept_in: torch.dtype | None = None,
    ):  # fmt: skip
        self.parameters, self.shards = parameters, shards
        first = parameters[0]
        self.dtype, self.kept_in = dtype or first.dtype, kept_in or first.dtype
        self.average: torch.Tensor | None = None
        self.used = torch.zeros(len(parameters), dtype=torch.int8)  # which got a gradient that has been sent
        self._handle: Handle | None = None
        self._unscaled: torch.Tensor | None = None

    def launch(self, comm: Communicator, weight: float | None) -> None:
        """Send the gradients, whose memory is gone from here once they have been received."""
        whole = self._whole()
        if weight is not None:
            whole.mul_(weight)
        own = whole.new_empty(self.shards.length)
        self._handle = comm.reduce_scatter(own, whole, "mean", async_op=True, overwrite=True)

    def _whole(self) -> torch.Tensor:
        """The gradients in one flat memory, and nowhere else: its own for a single one that nobody else sees."""
        self.used |= torch.tensor([not is_gone(parameter.grad) for parameter in self.parameters], dtype=torch.int8)
        first = self.parameters[0]
        if len(self.parameters) == 1 and not self.shards.padding and _is_alone(first, self.dtype):
            assert first.grad is not None
            whole, first.grad = first.grad.detach().view(-1), None
            return whole
        buffer = FlatBuffer(self.shards.shapes, self.dtype, first.device, self.shards.padding, zeroed=False)
        buffer.tail.zero_()
        for parameter, view in zip(self.parameters, buffer.views, strict=True):
            gradient, parameter.grad = parameter.grad, None
            view.zero_() if gradient is None or is_gone(gradient) else view.copy_(gradient)
        return buffer.flat

    def collect(self, weighted: bool = False) -> None:
        """Keep this rank's shard of what has come back; where it was weighted, apart from the averages of others until
        ``scale``."""
        assert self._handle is not None
        arrived = self._handle.wait().to(self.kept_in)
        if self.average is None:
            self.average = arrived
        elif weighted:
            self._unscaled = arrived
        else:
            self.average.add_(arrived)
        self._handle = None

    def zeros(self) -> torch.Tensor:
        """Begin with an average of zeros, to which those of a pass are added."""
        self.average = torch.zeros(self.shards.length, dtype=self.kept_in, device=self.parameters[0].device)
        return self.average

    def scale(self, factor: float) -> None:
        """Multiply what the last pass has brought, whose weights did not add up to one."""
        assert self.average is not None
        if self._unscaled is None:
            self.average.mul_(factor)
        else:
            self.average.add_(self._unscaled, alpha=factor)
        self._unscaled = None

    def forget(self) -> None:
        """The next average is a new one."""
        self.used.zero_()
        self.average = self._unscaled = None


class Reducer:
    """Averages the gradients of ``shards``, a list of GradientShard, over ``comm`` in each backward pass.

    Args:
        batch_size: a function that gives the number by which this rank's gradients count; None where all count alike.
        finished: called after each backward pass.
        complete: called with a shard whose gradients have all arrived.
        progress, names: as for ``BackwardPass``.
    """

    def __init__(
        self, shards: Sequence[GradientShard], comm: Communicator, batch_size: Callable[[], float | None],
        progress: str, names: dict, finished: Callable[[], None] | None = None,
        complete: Callable[[GradientShard], None] | None = None,
    ):  # fmt: skip
        self.shards, self.comm = shards, comm
        self.passes = 0  # since the last forget()
        self._ask_batch_size, self._finished, self._complete = batch_size, finished, complete
        self._samples = Samples(comm)
        self._names = names
        self._used: list[int] = []
        self._travelling: list[GradientShard] = []
        self._pass = BackwardPass(shards, self._begin, self._launch, self._finish, progress, names)
        self.gradient_is_ready = self._pass.gradient_is_ready
        self.run_empty, self.check = self._pass.run_empty, self._pass.forget

    def _begin(self) -> None:
        self._batch_size = self._ask_batch_size()
        self._weight = None
        if self._batch_size is not None:
            refuse_weights(self._names, self._batch_size)
            self._weight = self._samples.weight(self._batch_size) * self.comm.size  # reduce_scatter divides by it

    def _launch(self, shard: GradientShard) -> None:
        for parameter in shard.parameters:
            check_dense(parameter.grad)
        if self._complete:
            self._complete(shard)
        self._collect()
        shard.launch(self.comm, self._weight)
        self._travelling.append(shard)

    def _collect(self) -> None:
        while self._travelling:
            self._travelling.pop().collect(self._weight is not None)

    def _finish(self) -> None:
        self._collect()
        self._used = exchange_used(self.comm, [shard.used for shard in self.shards], self._batch_size)
        if self._batch_size is not None:
            factor = self._samples.correction(self._batch_size)
            for shard in self.shards:
                shard.scale(factor)
        self.passes += 1
        if self._finished:
            self._finished()

    def used_anywhere(self) -> Iterator[int]:
        """For each parameter of each shard in turn: whether any rank has sent a gradient of it."""
        return iter(self._used)

    def forget(self) -> None:
        """A new step begins."""
        self.passes = 0
        for shard in self.shards:
            shard.forget()


def _is_alone(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether memory of its gradient can be written over: autograd may give the same to another parameter, and to
    whoever called ``backward(cotangent)``, and hooks may keep it."""
    if parameter.grad is None or is_gone(parameter.grad):  # no name for it here, which would be a reference
        return False
    if parameter.grad.dtype != dtype or not parameter.grad.is_contiguous():
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
    if gradient is not None and gradient.is_sparse and not is_gone(gradient):
        raise DtlibError("A gradient is sparse, and only dense ones are averaged: build embeddings with sparse=False.")


def exchange_used(comm: Communicator, used: list[torch.Tensor], batch_size: float | None) -> list[int]:
    """Flags of this rank, int8; returned are those that are set on any rank.

    Raises:
        DtlibError: on every rank, where some have a ``batch_size`` and others have not.
    """
    sized = torch.tensor([batch_size is None, batch_size is not None], dtype=torch.int8)
    *anywhere, without, with_size = comm.all_reduce(torch.cat([*used, sized]), op="max").tolist()
    if without and with_size:
        refuse_mixed(batch_size)
    return anywhere


def refuse_mixed(batch_size: float | None) -> NoReturn:
    raise RanksDisagree(
        f"batch_size is {batch_size} here, and set on some ranks only: set it on all of them before the backward pass, "
        "or on none."
    )


class Samples:
    """An average over samples in which the number of all samples is known only after the gradients have travelled.

    Ranks weight by their samples over a guess, and what has arrived is multiplied by the guess over all samples. The
    guess keeps numbers of 16 bits in their range: a power of two, so that it rounds nothing, near the most samples of a
    pass so far.
    """

    def __init__(self, comm: Communicator):
        self._comm, self._guess = comm, 64.0

    def weight(self, batch_size: float) -> float:
        return batch_size / self._guess

    def correction(self, batch_size: float) -> float:
        """What to multiply sums of weighted gradients with. All ranks call it."""
        total = samples_of_all(self._comm, batch_size)
        factor = self._guess / total
        self._guess = max(self._guess, 2.0 ** round(math.log2(total)))
        return factor


def samples_of_all(comm: Communicator, batch_size: float) -> float:
    """The sum over ranks; 1 where nobody has a sample, so that it can be divided by."""
    return comm.all_reduce(torch.tensor(float(batch_size), dtype=torch.float64)).item() or 1.0
