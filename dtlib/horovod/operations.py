"""The operations: averages and sums over ranks, rows gathered, one rank's tensor for all.

Each has a form that returns a handle at once (``allreduce_async``), and some write into their argument
(``allreduce_``). Tensors are matched between ranks by ``name``; without one, by the order in which each rank calls the
operation. In the backward pass gradients follow Horovod's convention: each rank's loss is a summand of the average.
Counterpart: ``horovod.torch.mpi_ops``.
"""

import operator
import warnings

import torch
from torch import Tensor

from dtlib.comm import types
from dtlib.gradients.backward import with_gradient
from dtlib.horovod.basics import NotOffered, negotiator, rank, size
from dtlib.horovod.compression import Compression, Compressor
from dtlib.horovod.negotiation import Operation
from dtlib.horovod.request import Request

# The values that Horovod's library gives them; 2 is Adasum.
Average, Sum, Min, Max, Product = 0, 1, 3, 4, 5
OPS = {Average: "average", Sum: "sum", Min: "min", Max: "max", Product: "product"}


def synchronize(handle: Operation) -> Tensor:
    """Wait until an asynchronous operation is done; returns its result.

    Raises:
        HorovodInternalError: where ranks submitted different tensors under this name, or can never agree, or where the
            tensor was changed meanwhile.
        WaitTimeout: where ranks did not submit it within the time limit of the communicator.
    """
    _check_handle(handle)
    output = handle.negotiator.wait(handle)
    return output if handle.argument is None else handle.argument


def poll(handle: Operation) -> bool:
    """True once ``synchronize`` would not wait. Does not wait itself."""
    _check_handle(handle)
    handle.negotiator.advance()
    return handle.done


def join(device: int = -1) -> int:
    """This rank has no more data: take part in the others' allreduce with zeros until all have joined.

    Returns the last rank to join. An average still divides by the number of all ranks.
    """
    return negotiator().join()


def barrier() -> None:
    """Wait until every rank has arrived here."""
    allgather(torch.empty(0), "barrier")


# Averages and sums


def allreduce_async(tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> Operation:  # fmt: skip
    return _reduce(tensor, name, _op_of(op, average), prescale_factor, postscale_factor)


def allreduce_async_(tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> Operation:  # fmt: skip
    return _reduce(tensor, name, _op_of(op, average), prescale_factor, postscale_factor, in_place=True)


def allreduce_(tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> Tensor:  # fmt: skip
    """``allreduce`` into its argument."""
    return synchronize(_reduce(tensor, name, _op_of(op, average), prescale_factor, postscale_factor, in_place=True))


def allreduce(tensor: Tensor, average: bool | None = None, name: str | None = None,
              compression: type[Compressor] = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0) -> Tensor:  # fmt: skip
    """The average (or ``op``) of every rank's ``tensor``, as a new tensor; ``prescale_factor`` and
    ``postscale_factor`` multiply before and after. ``average=`` is deprecated. Gradients flow through averages and
    sums. Averages of integers are rounded towards zero."""
    op = _op_of(op, average)
    scales = prescale_factor, postscale_factor

    def forward(tensor):
        short, ctx = compression.compress(tensor)
        return compression.decompress(synchronize(_reduce(short, name, op, *scales)), ctx)

    def backward(gradient):
        if op not in (Average, Sum):
            raise NotOffered(f"allreduce(op=hvd.{OPS[op].title()}) has no gradient here: pass tensor.detach().")
        return allreduce(gradient.contiguous(), None, None, compression, op, *scales)

    return _differentiable(tensor, forward, backward)


def _reduce(tensor, name, op, prescale_factor, postscale_factor, in_place=False) -> Operation:
    way = {"op": check_op(op, "allreduce"), "prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return _submit("allreduce", tensor, name, in_place, **way)


def _op_of(op, average):
    """``op``, or what the deprecated argument ``average`` says."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if not isinstance(average, bool):
        raise ValueError(f"average={average!r:.40} is neither True nor False: write op= or name= before it.")
    warnings.warn("Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def check_op(op: int, operation: str) -> str:
    """The name of a reduction."""
    if op not in OPS:
        raise ValueError(f"{operation}(op={op!r}): choose one of hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product.")
    return OPS[op]


# Rows, and one rank's tensor


def allgather_async(tensor: Tensor, name: str | None = None) -> Operation:
    return _submit("allgather", tensor, name)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Every rank's ``tensor`` one after the other, on all ranks: first dimensions may differ, the others must agree.
    Gradients flow through it."""

    def backward(gradient):
        rows = allgather(torch.tensor([len(tensor)])).tolist()
        return allreduce(gradient.contiguous()).split(rows)[rank()]

    return _differentiable(tensor, lambda tensor: synchronize(allgather_async(tensor, name)), backward)


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Operation:
    return _submit("broadcast", tensor, name, root=_root(root_rank))


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Operation:
    return _submit("broadcast", tensor, name, in_place=True, root=_root(root_rank))


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """``broadcast`` into its argument."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The ``tensor`` of rank ``root_rank``, as a new tensor on all ranks. Gradients flow through it."""

    def backward(gradient):
        average = allreduce(gradient.contiguous())
        return average if rank() == root_rank else average.masked_fill(torch.tensor(True, device=average.device), 0)

    return _differentiable(tensor, lambda tensor: synchronize(broadcast_async(tensor, root_rank, name)), backward)


def _root(root_rank) -> int:
    root = operator.index(root_rank)
    if not 0 <= root < size():
        raise ValueError(f"broadcast(root_rank={root}): the ranks are 0 to {size() - 1}.")
    return root


# From arguments to something that travels


def _differentiable(tensor, forward, backward):
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        return with_gradient(tensor, lambda tensor: forward(tensor.detach()), backward)
    return forward(tensor)


def _submit(kind, tensor, name, in_place=False, **way) -> Operation:
    _check_tensor(tensor, kind, way.get("op"))
    own, mine = tensor.detach(), negotiator()
    output = own if in_place else None if kind == "allgather" else torch.empty_like(own)
    name = f"noname.{mine.number(kind)}" if name is None else str(name)
    request = Request(kind, name, types.dtype_name(own.dtype), tuple(own.shape), **way)
    return mine.submit(Operation(request, mine, own, output, tensor if in_place else None))


def _check_tensor(tensor, operation: str, op) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{operation} carries a torch tensor and got {type(tensor).__name__}: wrap it in torch.tensor()."
        )
    if types.dtype_name(tensor.dtype) not in types.ALLOWED or tensor.layout != torch.strided:
        raise ValueError(
            f"Tensor type {tensor.type()} is not supported: {operation} carries {', '.join(types.ALLOWED)}."
        )
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous: pass tensor.contiguous().")
    if operation == "allgather" and not tensor.dim():
        raise ValueError("allgather needs a first dimension, and this tensor has none: pass tensor.reshape(1).")
    if tensor.dtype == torch.bool and op in ("average", "sum", "product"):
        raise ValueError(f"allreduce({op}) of a bool tensor: use op=hvd.Min or hvd.Max, or convert it with .int().")


def _check_handle(handle) -> None:
    if not isinstance(handle, Operation):
        raise ValueError(f"{handle!r:.40} is no handle: pass what an asynchronous operation has returned.")
