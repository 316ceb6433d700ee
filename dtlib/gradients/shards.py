"""Gradients that are averaged during the backward pass, of which each rank keeps its shard: ZeRO stages 2 and 3.

bucket's gradients have all arrived    copied into staging memory, and freed
reduce_scatter, in place            this rank's shard of the staging memory is the average
two launches later, or at the end   the shard is added to what this rank keeps, and the memory is used again
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from dtlib.comm.waiting import Handle
from dtlib.errors import DtlibError
from dtlib.gradients.backward import BackwardPass, RanksDisagree
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.tokens import refuse_weights

if TYPE_CHECKING:
    from dtlib.comm import Communicator


class GradientShard:
    """A bucket: ``parameters`` whose gradients travel together, and this rank's shard of their ``average``.

    They travel and are added up in ``dtype``, and are kept in ``kept_in``; both are by default that of the parameters.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], shards: Shards, dtype: torch.dtype | None = None,
        kept_in: torch.dtype | None = None,
    ):  # fmt: skip
        self.parameters, self.shards = parameters, shards
        first = parameters[0]
        self.kind = dtype or first.dtype, first.device
        self.average = torch.zeros(shards.length, dtype=kept_in or first.dtype, device=first.device)
        self.used = torch.zeros(len(parameters), dtype=torch.int8)  # which got a gradient that has been sent
        self.collected = False  # an average is there, to which others are added
        self._handle: Handle | None = None
        self._travelling: torch.Tensor | None = None
        self._unscaled: torch.Tensor | None = None

    def launch(self, comm: Communicator, memory: torch.Tensor, weight: float | None) -> None:
        """Move the gradients into ``memory`` and send them from there."""
        buffer = FlatBuffer(self.shards.shapes, *self.kind, extra=self.shards.padding, memory=memory)
        buffer.tail.zero_()
        for i, (parameter, view) in enumerate(zip(self.parameters, buffer.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad = None
                self.used[i] = 1
        if weight is not None:
            buffer.flat.mul_(weight)
        self._travelling = self.shards.own(buffer.flat)
        self._handle = comm.reduce_scatter(self._travelling, buffer.flat, "mean", async_op=True)

    def collect(self, weighted: bool = False) -> None:
        """Keep this rank's shard of what has come back; where it was weighted, apart from the averages of others until
        ``scale``."""
        assert self._handle is not None and self._travelling is not None
        self._handle.wait()
        if not self.collected:
            self.average.copy_(self._travelling)
        elif weighted:
            self._unscaled = self._travelling.clone()
        else:
            self.average.add_(self._travelling)
        self._handle = self._travelling = None
        self.collected = True

    def scale(self, factor: float) -> None:
        """Multiply what the last pass has brought, whose weights did not add up to one."""
        if self._unscaled is None:
            self.average.mul_(factor)
        else:
            self.average.add_(self._unscaled, alpha=factor)
        self._unscaled = None

    def forget(self) -> None:
        """The next average is a new one."""
        self.used.zero_()
        self.collected, self._unscaled = False, None


class Reducer:
    """Averages the gradients of ``shards``, a list of GradientShard, over ``comm`` in each backward pass.

    Args:
        batch_size: a function that gives the number by which this rank's gradients count; None where all count alike.
        finished: called after each backward pass.
        launched: called with a shard whose gradients have left.
        progress, names: as for ``BackwardPass``.
    """

    def __init__(
        self, shards: Sequence[GradientShard], comm: Communicator, batch_size: Callable[[], float | None],
        progress: str, names: dict, finished: Callable[[], None] | None = None,
        launched: Callable[[GradientShard], None] | None = None,
    ):  # fmt: skip
        self.shards, self.comm = shards, comm
        self.passes = 0  # since the last forget()
        self._ask_batch_size, self._finished, self._launched = batch_size, finished, launched
        self._samples = Samples(comm)
        self._names = names
        self._used: list[int] = []
        # By dtype and device: two pieces of memory, which buckets use in turn.
        self._staging: dict[tuple, list[torch.Tensor]] = {}
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
        if len(self._travelling) == 2:
            self._travelling.pop(0).collect(self._weight is not None)
        shard.launch(self.comm, self._memory_for(shard), self._weight)
        self._travelling.append(shard)
        if self._launched:
            self._launched(shard)

    def _memory_for(self, shard: GradientShard) -> torch.Tensor:
        memory = self._staging.setdefault(shard.kind, [])
        if len(memory) < 2:
            dtype, device = shard.kind
            largest = max(one.shards.length * one.shards.ranks for one in self.shards if one.kind == shard.kind)
            memory.append(torch.zeros(largest, dtype=dtype, device=device))
        else:
            memory.reverse()  # the other one: what left from it has been collected
        return memory[-1]

    def _finish(self) -> None:
        while self._travelling:
            self._travelling.pop(0).collect(self._weight is not None)
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

    def staging(self) -> list[torch.Tensor]:
        return [memory for pair in self._staging.values() for memory in pair]


def check_dense(gradient: torch.Tensor | None) -> None:
    """Flat memory has room for every element."""
    if gradient is not None and gradient.is_sparse:
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
