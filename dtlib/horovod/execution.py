"""What all ranks have submitted, on its way: many tensors in one buffer, each collective on those of the communicator.

    submitted   w2  b2  w1  b1             one all_reduce a buffer of at most HOROVOD_FUSION_THRESHOLD bytes
    buffer      [w2 w2 b2 w1 w1 w1 b1]     copied in when all ranks have agreed, and out when the sum has arrived

What is gathered may have different lengths, which are padded to the longest: the collective moves equal chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dtlib.comm import Communicator
from dtlib.comm.waiting import Handle
from dtlib.gradients.buckets import FlatBuffer, buckets_of

COMM_OPS = {"sum": "sum", "average": "sum", "min": "min", "max": "max", "product": "prod"}


@dataclass
class Batch:
    """A collective of the communicator under way, and the operations of this rank that travel in it."""

    handle: Handle
    operations: list
    bring_home: Callable[[], None]  # puts the results into the operations

    def finish(self) -> None:
        """Wait for it."""
        self.handle.wait()
        self.bring_home()


def launch(comm: Communicator, agreed: dict, mine: dict, cap: int) -> list[Batch]:
    """Start what has been agreed, in the same order on all ranks.

    ``agreed`` maps keys to {rank: request}, ``mine`` to this rank's operations; a rank that has joined has none and
    stands in with zeros.
    """
    batches = []
    fused: dict = {}
    for key, asked in agreed.items():
        request, operation = next(iter(asked.values())), mine.get(key)
        if operation is not None:
            operation.check_unchanged()
        if request.kind == "allgather":
            batches.append(_gathered(comm, [asked[rank].shape[0] for rank in range(comm.size)], operation))
        else:
            fused.setdefault(request.way, []).append((request, operation))
    for members in fused.values():
        stand_ins = [torch.empty(r.shape, dtype=getattr(torch, r.dtype), device="meta") for r, _ in members]
        for bucket in buckets_of(stand_ins, cap, cap):
            batches.append(_fused(comm, *zip(*(members[i] for i in bucket), strict=True)))
    return batches


def _fused(comm, requests, operations) -> Batch:
    request, mine = requests[0], [operation for operation in operations if operation is not None]
    if len(requests) == len(mine) == 1 and mine[0].output.is_cpu:
        views = [mine[0].output]  # one tensor needs no buffer
        flat = views[0].data.view(-1)  # what we write there is not counted as a change by others
    else:
        buffer = FlatBuffer([r.shape for r in requests], getattr(torch, request.dtype))
        flat, views = buffer.flat, buffer.views
    pairs = [(view, operation) for view, operation in zip(views, operations, strict=True) if operation is not None]
    for view, operation in pairs:
        if view is not operation.tensor:
            view.copy_(operation.tensor)
    if request.kind == "broadcast":
        handle = comm.broadcast(flat, request.root, async_op=True)
    else:
        _scale(flat, request.prescale)
        handle = comm.all_reduce(flat, COMM_OPS[request.op], async_op=True)
    for operation in mine:
        if operation.error is None:
            operation.watch(operation.watched)  # its memory may have been written to just here

    def bring_home():
        for operation in mine:
            if operation.output is operation.tensor:
                operation.check_unchanged()
        if request.kind == "allreduce":
            _finish_reduction(flat, request, comm.size)
        for view, operation in pairs:
            if view is not operation.output:
                operation.output.copy_(view)
            elif not view.is_inference():
                torch.autograd.graph.increment_version(view)  # autograd has to know

    return Batch(handle, mine, bring_home)


def _scale(flat, factor: float) -> None:
    """Integers are scaled in float64 and cut off, as in Horovod."""
    if factor != 1:
        flat.mul_(factor) if flat.is_floating_point() else flat.copy_(flat.double() * factor)


def _finish_reduction(flat, request, size: int) -> None:
    """The second half of an average. That of integers is cut off towards zero, as in Horovod; sums wrap around."""
    if request.op != "average":
        _scale(flat, request.postscale)
    elif request.postscale != 1:
        # In one step: in 16 bits postscale * flat alone may overflow.
        _scale(flat, request.postscale / size)
    else:
        flat.div_(size) if flat.is_floating_point() else flat.div_(size, rounding_mode="trunc")


def _gathered(comm, rows: list[int], operation) -> Batch:
    tensor = operation.tensor
    everything = torch.zeros(comm.size, max(rows), *tensor.shape[1:], dtype=tensor.dtype)
    padded = torch.zeros_like(everything[0])
    padded[: len(tensor)] = tensor
    handle = comm.all_gather(everything, padded, async_op=True)

    def bring_home():
        rows_of = [its[:length] for its, length in zip(everything, rows, strict=True)]
        operation.output = torch.cat(rows_of).to(tensor.device)

    return Batch(handle, [operation], bring_home)
