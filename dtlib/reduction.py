"""Gradients that are averaged during the backward pass, of which each rank keeps its part: ZeRO stages 2 and 3.

bucket's gradients have all come    copied into staging memory, and freed
reduce_scatter, in place            this rank's part of the staging memory is the average
two launches later, or at the end   the part is added to what this rank keeps, and the memory is used again
"""

import torch

from dtlib.backward import BackwardPass
from dtlib.errors import DtlibError
from dtlib.flat import FlatBuffer, Shards


class GradientShard:
    """A bucket: ``parameters`` whose gradients travel together, and this rank's part of their ``average``."""

    def __init__(self, parameters, shards: Shards):
        self.parameters, self.shards = parameters, shards
        first = parameters[0]
        self.kind = first.dtype, first.device
        self.average = torch.zeros(shards.length, dtype=first.dtype, device=first.device)
        self.used = torch.zeros(len(parameters), dtype=torch.int8)  # which got a gradient that has been sent
        self.collected = False  # an average is there, to which others are added
        self._handle = self._travelling = None

    def launch(self, comm, memory: torch.Tensor, weight: float | None) -> None:
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
        op = "mean" if weight is None else "sum"
        self._handle = comm.reduce_scatter(self._travelling, buffer.flat, op, async_op=True)

    def collect(self) -> None:
        """Keep this rank's part of what has come back."""
        self._handle.wait()
        if self.collected:
            self.average.add_(self._travelling)
        else:
            self.average.copy_(self._travelling)
        self._handle = self._travelling = None
        self.collected = True

    def forget(self) -> None:
        """The next average is a new one."""
        self.used.zero_()
        self.collected = False


class Reducer:
    """Averages the gradients of ``shards``, a list of GradientShard, over ``comm`` in each backward pass.

    Args:
        weight: a function that gives this rank's share in the average; None where all count alike.
        finished: called after each backward pass.
        launched: called with a shard whose gradients have left.
        progress, names: as for ``BackwardPass``.
    """

    def __init__(self, shards, comm, weight, progress: str, names: dict, finished=None, launched=None):
        self.shards, self.comm = shards, comm
        self.passes = 0  # since the last forget()
        self._weight_of_this_rank, self._finished, self._launched = weight, finished, launched
        self._staging = {}  # by dtype and device: two pieces of memory, which buckets use in turn
        self._travelling = []
        self._pass = BackwardPass(shards, self._begin, self._launch, self._finish, progress, names)
        self.gradient_has_come = self._pass.gradient_has_come
        self.run_empty, self.check = self._pass.run_empty, self._pass.forget

    def _begin(self) -> None:
        self._weight = self._weight_of_this_rank()

    def _launch(self, shard: GradientShard) -> None:
        for parameter in shard.parameters:
            check_dense(parameter.grad)
        if len(self._travelling) == 2:
            self._travelling.pop(0).collect()
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
            self._travelling.pop(0).collect()
        self.passes += 1
        if self._finished:
            self._finished()

    def used_anywhere(self):
        """For each parameter of each shard in turn: whether any rank has sent a gradient of it."""
        return exchange_used(self.comm, [shard.used for shard in self.shards])

    def forget(self) -> None:
        """A new step begins."""
        self.passes = 0
        for shard in self.shards:
            shard.forget()

    def staging(self) -> list[torch.Tensor]:
        return [memory for pair in self._staging.values() for memory in pair]


def check_dense(gradient) -> None:
    """Flat memory has room for every element."""
    if gradient is not None and gradient.is_sparse:
        raise DtlibError("A gradient is sparse, and only dense ones are averaged: build embeddings with sparse=False.")


def exchange_used(comm, used: list[torch.Tensor]):
    """Flags of this rank, as an iterator over those that are set on any rank."""
    return iter(comm.all_reduce(torch.cat(used), op="max").tolist())


def share_by_samples(comm, batch_size: int | None) -> float | None:
    """This rank's share in an average over samples; None where every rank counts alike. All ranks call it."""
    if batch_size is None:
        return None
    samples = comm.all_reduce(torch.tensor(float(batch_size), dtype=torch.float64))
    return batch_size / max(1.0, samples.item())
