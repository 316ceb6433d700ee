"""What all ranks have submitted, on its way: many tensors in one buffer, each verb on those of the communicator.

    submitted   w2  b2  w1  b1             one all_reduce a buffer of at most HOROVOD_FUSION_THRESHOLD bytes
    buffer      [w2 w2 b2 w1 w1 w1 b1]     copied in when all ranks have agreed, and out when the sum has come

Lengths that differ between ranks (allgather, alltoall, reducescatter with a remainder) are padded to the longest: the
communicator's verbs move equal parts. That costs bytes where lengths differ much.
"""

import torch

from dtlib.flat import FlatBuffer, buckets_of

VERBS = {"sum": "sum", "average": "sum", "min": "min", "max": "max", "product": "prod"}


class Batch:
    """A verb of the communicator under way, and the operations of this rank that travel in it."""

    def __init__(self, handle, operations, bring_home):
        self.finished = False
        self.when_finished = None
        self._handle = handle
        self._operations = [operation for operation in operations if operation is not None]
        self._bring_home = bring_home
        for operation in self._operations:
            operation.batch = self

    def move(self) -> bool:
        """True once everything is done. Does not wait."""
        if not self.finished and self._handle.done():
            self.wait()
        return self.finished

    def wait(self) -> None:
        self._handle.wait()
        self._bring_home()
        self.finished = True
        for operation in self._operations:
            self.when_finished(operation)
        self._bring_home = self._handle = None  # and the buffers with them


def launch(comm, agreed: dict, mine: dict, cap: int) -> list[Batch]:
    """Start what has been agreed, in the same order on all ranks.

    ``agreed`` maps keys to {rank: request}, ``mine`` to this rank's operations; a rank that has joined has none and
    stands in with zeros.
    """
    batches, fused = [], {}
    for key, asked in agreed.items():
        request, operation = next(iter(asked.values())), mine.get(key)
        if request.kind in ("allreduce", "broadcast"):
            fused.setdefault(request.way, []).append((request, operation))
        elif request.kind != "barrier":
            batches.append(LENGTHWISE[request.kind](comm, asked, operation))
    for members in fused.values():
        stand_ins = [torch.empty(r.shape, dtype=getattr(torch, r.dtype), device="meta") for r, _ in members]
        for bucket in buckets_of(stand_ins, cap, cap):
            batches.append(_fused(comm, [members[i] for i in bucket]))
    return batches


def _fused(comm, members) -> Batch:
    request, operations = members[0][0], [operation for _, operation in members]
    only = operations[0] if len(operations) == 1 else None
    if only is not None and only.output.is_cpu and only.output.is_contiguous():
        flat = only.output.view(-1)  # one tensor needs no buffer
        views = [only.output]
    else:
        buffer = FlatBuffer([r.shape for r, _ in members], getattr(torch, request.dtype))
        flat, views = buffer.flat, buffer.views
    for view, operation in zip(views, operations, strict=True):
        if operation is not None and view.data_ptr() != operation.tensor.data_ptr():
            view.copy_(operation.tensor)
    if request.kind == "broadcast":
        handle = comm.broadcast(flat, request.root, async_op=True)
    else:
        scale(flat, request.prescale)
        handle = comm.all_reduce(flat, VERBS[request.op], async_op=True)

    def bring_home():
        if request.kind == "allreduce":
            finish_reduction(flat, request, comm.size)
        for view, operation in zip(views, operations, strict=True):
            if operation is not None and view is not operation.output:
                operation.output.copy_(view)

    return Batch(handle, operations, bring_home)


def scale(flat, factor: float) -> None:
    if factor != 1:
        flat.mul_(factor) if flat.is_floating_point() else flat.copy_(flat.double() * factor)


def finish_reduction(flat, request, size: int) -> None:
    """The second half of an average. Integers are rounded down, as in Horovod."""
    if request.op == "average" and flat.is_floating_point():
        # In one step: in 16 bits postscale * flat alone may overflow.
        flat.div_(size) if request.postscale == 1 else flat.mul_(request.postscale / size)
        return
    scale(flat, request.postscale)
    if request.op == "average":
        flat.div_(size, rounding_mode="floor")


def _allgather(comm, asked, operation) -> Batch:
    rows = [asked[rank].shape[0] for rank in range(comm.size)]
    tensor = operation.tensor
    padded = _zeros(tensor, max(rows))
    padded[: len(tensor)] = tensor
    everything = _zeros(tensor, comm.size, max(rows))
    handle = comm.all_gather(everything, padded, async_op=True)

    def bring_home():
        parts = [part[:length] for part, length in zip(everything, rows, strict=True)]
        operation.output = torch.cat(parts).to(tensor.device)

    return Batch(handle, [operation], bring_home)


def _alltoall(comm, asked, operation) -> Batch:
    tensor = operation.tensor
    longest = max(max(request.splits) for request in asked.values())
    outgoing, incoming = _zeros(tensor, comm.size, longest), _zeros(tensor, comm.size, longest)
    for part, piece in zip(outgoing, _pieces(tensor, operation.request.splits), strict=True):
        part[: len(piece)] = piece
    handle = comm.all_to_all(incoming, outgoing, async_op=True)
    received = [asked[rank].splits[comm.rank] for rank in range(comm.size)]

    def bring_home():
        parts = [part[:length] for part, length in zip(incoming, received, strict=True)]
        operation.output = torch.cat(parts).to(tensor.device), torch.tensor(received, dtype=torch.int32)

    return Batch(handle, [operation], bring_home)


def _reducescatter(comm, asked, operation) -> Batch:
    tensor, request = operation.tensor, operation.request
    rows = [len(tensor) // comm.size + (rank < len(tensor) % comm.size) for rank in range(comm.size)]
    whole, part = _zeros(tensor, comm.size, rows[0]), _zeros(tensor, rows[0])
    for place, piece in zip(whole, _pieces(tensor, rows), strict=True):
        place[: len(piece)] = piece
    scale(whole, request.prescale)
    handle = comm.reduce_scatter(part, whole, "sum", async_op=True)

    def bring_home():
        finish_reduction(part, request, comm.size)
        operation.output = part[: rows[comm.rank]].to(tensor.device)

    return Batch(handle, [operation], bring_home)


LENGTHWISE = {"allgather": _allgather, "alltoall": _alltoall, "reducescatter": _reducescatter}


def _zeros(tensor, *lengths: int) -> torch.Tensor:
    """Room on the CPU for rows like those of ``tensor``."""
    return torch.zeros(*lengths, *tensor.shape[1:], dtype=tensor.dtype)


def _pieces(tensor, lengths) -> list[torch.Tensor]:
    """The first rows of ``tensor`` in pieces of these lengths; rows beyond their sum belong to nobody."""
    return list(tensor[: sum(lengths)].split(list(lengths)))
