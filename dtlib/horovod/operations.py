"""Horovod's operations: allreduce, allgather, broadcast and barrier. Counterpart: ``horovod.torch.mpi_ops``.

Names with ``_async`` return a handle at once; names that end with ``_`` write into their argument. All ranks must call
the operations in the same order. Backward passes follow Horovod: allreduce uses the op of its forward pass; allgather
and broadcast average the gradients over ranks.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor

from dtlib.comm.waiting import Operation
from dtlib.gradients.backward import with_gradient
from dtlib.horovod.basics import HorovodInternalError, communicator, rank, size
from dtlib.horovod.compression import Compression, NoneCompressor

Average, Sum = 0, 1  # the same numbers as in Horovod's library


class Handle:
    """A pending operation.

    ``finish`` is called after the wait, and returns the result. ``watched`` must not change while the operation is
    pending. The communicator's own writes are not counted as changes, because it writes into ``.data``.
    """

    def __init__(self, waited: Operation, watched: Tensor, finish: Callable[[], Tensor]):
        self._waited, self._watched, self._finish = waited, watched, finish
        self._version = version_of(watched)
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait, and return the result. Raises ``HorovodInternalError`` if the watched tensor has changed."""
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
    """Return the version counter of ``tensor``, which in-place operations increase; None in inference mode."""
    return None if tensor.is_inference() else tensor._version


def synchronize(handle: Handle) -> Tensor:
    """Wait for an asynchronous operation, and return its result.

    Raises:
        HorovodInternalError: if the tensor was changed while the operation was pending.
        WaitTimeout: if a rank did not call the operation within the time limit of the communicator.
    """
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r:.40} is not a handle: pass the result of an asynchronous operation.")
    return handle.wait()


def barrier() -> None:
    """Wait until all ranks have called ``barrier``."""
    communicator().barrier()


# Averages and sums


def allreduce_async(tensor: Tensor, *, name: str | None = None, op: int = Average) -> Handle:
    """Start ``allreduce`` of a copy of ``tensor``; return a handle. No gradients."""
    check_op(op, "allreduce")
    out = _start(tensor, "allreduce", name).clone()
    waited = communicator().all_reduce(out.data, async_op=True)

    def finish():
        # As in Horovod, averages of integers are truncated towards zero.
        if op == Average:
            out.div_(size(), rounding_mode=None if out.is_floating_point() else "trunc")
        return _written(out)

    return Handle(waited, out, finish)


def allreduce(tensor: Tensor, *, name: str | None = None, compression: type[NoneCompressor] = Compression.none,
              op: int = Average) -> Tensor:  # fmt: skip
    """Return the average over ranks of ``tensor``, or the sum, as ``op`` says. The operation is differentiable.

    Averages of integers are rounded towards zero.
    """

    def forward(tensor):
        short, ctx = compression.compress(tensor)
        return compression.decompress(allreduce_async(short, name=name, op=op).wait(), ctx)

    def backward(gradient):
        return allreduce(gradient.contiguous(), compression=compression, op=op)

    return _differentiable(tensor, forward, backward)


def _written(out: Tensor) -> Tensor:
    """Return ``out`` with its version counter increased: autograd has not seen MPI's writes."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def check_op(op: int, operation: str) -> None:
    """Raise ``ValueError`` unless ``op`` is ``Average`` or ``Sum``."""
    if op not in (Average, Sum):
        raise ValueError(f"{operation}(op={op!r}): choose hvd.Average or hvd.Sum.")


# Allgather and broadcast


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle:
    """Start ``allgather``; return a handle. No gradients."""
    own, comm = _start(tensor, "allgather", name), communicator()
    if not own.dim():
        raise ValueError("allgather needs a first dimension, but this tensor has none: pass tensor.reshape(1).")
    rows = comm.all_gather(torch.zeros(size(), dtype=torch.int64), torch.tensor([len(own)])).tolist()
    # The communicator's all_gather needs chunks of equal size, so each rank pads its rows to the longest tensor.
    everything = own.new_zeros(size(), max(rows), *own.shape[1:])
    padded = torch.zeros_like(everything[0])
    padded[: len(own)] = own
    waited = comm.all_gather(everything, padded, async_op=True)
    return Handle(waited, own, lambda: torch.cat([its[:count] for its, count in zip(everything, rows, strict=True)]))


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order.

    The first dimensions may differ between ranks, the others must be equal. The operation is differentiable.
    """

    def backward(gradient):
        rows = allgather(torch.tensor([len(tensor)])).tolist()
        return allreduce(gradient.contiguous()).split(rows)[rank()]

    return _differentiable(tensor, lambda tensor: allgather_async(tensor, name).wait(), backward)


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start ``broadcast`` of a copy of ``tensor``; return a handle. No gradients."""
    out, root = _start(tensor, "broadcast", name).clone(), operator.index(root_rank)
    if not 0 <= root < size():
        raise ValueError(f"broadcast(root_rank={root}): the ranks are 0 to {size() - 1}.")
    waited = communicator().broadcast(out.data, root, async_op=True)
    return Handle(waited, out, lambda: _written(out))


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Broadcast ``tensor`` from ``root_rank`` in place, and return it. No gradients."""
    tensor.detach().copy_(broadcast_async(tensor, root_rank, name).wait())
    return tensor


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return a copy of rank ``root_rank``'s ``tensor`` on all ranks. The operation is differentiable."""

    def backward(gradient):
        average = allreduce(gradient.contiguous())
        return average if rank() == root_rank else average.masked_fill(torch.tensor(True, device=average.device), 0)

    return _differentiable(tensor, lambda tensor: broadcast_async(tensor, root_rank, name).wait(), backward)


# Helpers: autograd, and checks of the arguments


def _differentiable(tensor, forward, backward):
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        return with_gradient(tensor, lambda tensor: forward(tensor.detach()), backward)
    return forward(tensor)


def _start(tensor, operation: str, name) -> Tensor:
    """Return ``tensor`` without its graph, after checking the call. In notebooks ranks compare operation and name."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{operation} needs a torch tensor, and got {type(tensor).__name__}: wrap it in torch.tensor()."
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
