"""The operations: averages and sums over ranks, rows gathered, one rank's tensor for all.

Some return a handle at once (``allreduce_async``), and some write into their argument (``allreduce_``). All ranks call
them in the same order. In the backward pass gradients follow Horovod's convention: each rank's loss is a summand of the
average. Counterpart: ``horovod.torch.mpi_ops``.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor

from dtlib.comm.waiting import Operation
from dtlib.gradients.backward import with_gradient
from dtlib.horovod.basics import HorovodInternalError, NotOffered, communicator, rank, size
from dtlib.horovod.compression import Compression, NoneCompressor

# The values that Horovod's library gives them; 2 is Adasum.
Average, Sum, Min, Max, Product = 0, 1, 3, 4, 5
OPS = {Average: "average", Sum: "sum", Min: "min", Max: "max", Product: "product"}
COMM_OPS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "prod"}


class Handle:
    """An operation that has begun; ``finish`` returns its result once it is done.

    Communicators write into ``.data``, which torch does not count as a change of ``watched``.
    """

    def __init__(self, waited: Operation, watched: Tensor, finish: Callable[[], Tensor]):
        self._waited, self._watched, self._finish = waited, watched, finish
        self._version = version_of(watched)
        self._result: Tensor | None = None

    def done(self) -> bool:
        return self._result is not None or self._waited.done()

    def wait(self) -> Tensor:
        if self._result is None:
            self._waited.wait()
            if version_of(self._watched) != self._version:
                raise HorovodInternalError(
                    "A tensor was changed between the start of an operation and synchronize(), so ranks have "
                    "different values. Call synchronize() first."
                )
            self._result = self._finish()
        return self._result


def version_of(tensor: Tensor) -> int | None:
    """Return how often torch has written into this memory; tensors of inference mode do not count it."""
    return None if tensor.is_inference() else tensor._version


def synchronize(handle: Handle) -> Tensor:
    """Wait until an asynchronous operation is done; return its result.

    Raises:
        HorovodInternalError: if the tensor was changed meanwhile.
        WaitTimeout: if a rank did not call the operation within the time limit of the communicator.
    """
    return _checked(handle).wait()


def poll(handle: Handle) -> bool:
    """Return whether ``synchronize`` would not wait."""
    return _checked(handle).done()


def _checked(handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r:.40} is not a handle: pass the result of an asynchronous operation.")
    return handle


def barrier() -> None:
    """Wait until every rank has arrived here."""
    communicator().barrier()


# Averages and sums


def allreduce_async(tensor: Tensor, average: None = None, name: str | None = None, op: int = Average) -> Handle:
    return _reduce(tensor, average, name, op, in_place=False)


def allreduce_async_(tensor: Tensor, average: None = None, name: str | None = None, op: int = Average) -> Handle:
    return _reduce(tensor, average, name, op, in_place=True)


def allreduce_(tensor: Tensor, average: None = None, name: str | None = None, op: int = Average) -> Tensor:
    """``allreduce`` into its argument."""
    return _reduce(tensor, average, name, op, in_place=True).wait()


def allreduce(tensor: Tensor, average: None = None, name: str | None = None,
              compression: type[NoneCompressor] = Compression.none, op: int = Average) -> Tensor:  # fmt: skip
    """Return the average (or ``op``) of every rank's ``tensor``. Gradients flow through averages and sums. Averages of
    integers are rounded towards zero. ``average`` is Horovod's deprecated argument, and is refused."""

    def forward(tensor):
        short, ctx = compression.compress(tensor)
        return compression.decompress(_reduce(short, average, name, op, in_place=False).wait(), ctx)

    def backward(gradient):
        if op not in (Average, Sum):
            raise NotOffered(f"allreduce(op=hvd.{OPS[op].title()}) has no gradient here: pass tensor.detach().")
        return allreduce(gradient.contiguous(), None, None, compression, op)

    return _differentiable(tensor, forward, backward)


def _reduce(tensor, average, name, op: int, in_place: bool) -> Handle:
    if average is not None:
        raise ValueError(f"average={average!r:.40} is deprecated in Horovod: write op=hvd.Average or op=hvd.Sum.")
    check_op(op, "allreduce")
    own = _start(tensor, "allreduce", name)
    out = own if in_place else own.clone()
    waited = communicator().all_reduce(out.data, COMM_OPS[op], async_op=True)

    def finish():
        if op == Average:  # that of integers is cut off towards zero, as in Horovod
            out.div_(size(), rounding_mode=None if out.is_floating_point() else "trunc")
        return _written(out, tensor if in_place else out)

    return Handle(waited, out, finish)


def _written(out: Tensor, result: Tensor) -> Tensor:
    """Tell autograd that MPI has written into ``out``; return ``result``."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return result


def check_op(op: int, operation: str) -> None:
    if op not in OPS:
        raise ValueError(f"{operation}(op={op!r}): choose one of hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product.")


# Rows, and one rank's tensor


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle:
    own, comm = _start(tensor, "allgather", name), communicator()
    if not own.dim():
        raise ValueError("allgather needs a first dimension, but this tensor has none: pass tensor.reshape(1).")
    rows = comm.all_gather(torch.zeros(size(), dtype=torch.int64), torch.tensor([len(own)])).tolist()
    # Collectives move equal chunks, so shorter ones are padded to the longest.
    everything = own.new_zeros(size(), max(rows), *own.shape[1:])
    padded = torch.zeros_like(everything[0])
    padded[: len(own)] = own
    waited = comm.all_gather(everything, padded, async_op=True)
    return Handle(waited, own, lambda: torch.cat([its[:count] for its, count in zip(everything, rows, strict=True)]))


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Return every rank's ``tensor`` one after the other: first dimensions may differ, the others must agree.
    Gradients flow through it."""

    def backward(gradient):
        rows = allgather(torch.tensor([len(tensor)])).tolist()
        return allreduce(gradient.contiguous()).split(rows)[rank()]

    return _differentiable(tensor, lambda tensor: allgather_async(tensor, name).wait(), backward)


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    return _broadcast(tensor, root_rank, name, in_place=False)


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    return _broadcast(tensor, root_rank, name, in_place=True)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """``broadcast`` into its argument."""
    return _broadcast(tensor, root_rank, name, in_place=True).wait()


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return the ``tensor`` of rank ``root_rank`` on all ranks. Gradients flow through it."""

    def backward(gradient):
        average = allreduce(gradient.contiguous())
        return average if rank() == root_rank else average.masked_fill(torch.tensor(True, device=average.device), 0)

    return _differentiable(tensor, lambda tensor: broadcast_async(tensor, root_rank, name).wait(), backward)


def _broadcast(tensor, root_rank, name, in_place: bool) -> Handle:
    own, root = _start(tensor, "broadcast", name), operator.index(root_rank)
    if not 0 <= root < size():
        raise ValueError(f"broadcast(root_rank={root}): the ranks are 0 to {size() - 1}.")
    out = own if in_place else own.clone()
    waited = communicator().broadcast(out.data, root, async_op=True)
    return Handle(waited, out, lambda: _written(out, tensor if in_place else out))


# From arguments to a message


def _differentiable(tensor, forward, backward):
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        return with_gradient(tensor, lambda tensor: forward(tensor.detach()), backward)
    return forward(tensor)


def _start(tensor, operation: str, name) -> Tensor:
    """Check the arguments of an operation; in a notebook also that all ranks gave the same name."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{operation} carries a torch tensor and got {type(tensor).__name__}: wrap it in torch.tensor()."
        )
    comm = communicator()
    if comm.verify:
        names = comm.all_gather_object((operation, name))
        if len(set(names)) > 1:
            said = "; ".join(f"rank {r}: {each} {its!r}" for r, (each, its) in enumerate(names))
            raise HorovodInternalError(
                f"Ranks call different operations ({said}): all ranks must call the same ones, in the same order."
            )
    return tensor.detach()
