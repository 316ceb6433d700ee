"""From the arguments of a verb to something that travels: what all verbs share.

Tensors are matched between ranks by ``name``; without one, by the order in which each rank calls the verb.
"""

from itertools import count

import torch

from dtlib.comm import types
from dtlib.horovod.basics import check_process_set, negotiator
from dtlib.horovod.request import Operation, Request


class Handle:
    """What the asynchronous forms return, for ``synchronize`` and ``poll``."""

    def __init__(self, operations, result=lambda outputs: outputs[0]):
        self.operations = operations
        self.result = result
        self.negotiator = negotiator()


def synchronize(handle):
    """Wait until an asynchronous operation is done; returns its result.

    Raises:
        HorovodInternalError: where ranks submitted different tensors under this name, or can never agree.
        WaitTimeout: where ranks did not submit it within the time limit of the communicator.
    """
    _check_handle(handle, "synchronize")
    return handle.result([handle.negotiator.wait(operation) for operation in handle.operations])


def poll(handle) -> bool:
    """True once ``synchronize`` would not wait. Does not wait itself."""
    _check_handle(handle, "poll")
    return all([handle.negotiator.done(operation) for operation in handle.operations])


def barrier(process_set=None) -> None:
    """Wait until every rank has come here."""
    check_process_set(process_set, "barrier")
    synchronize(submit("barrier"))


def join(device: int = -1) -> int:
    """This rank has no more data: take part in the others' allreduce with zeros until all have joined.

    Returns the last rank to join. An average still divides by the number of all ranks.
    """
    return negotiator().join()


# From arguments to an operation


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, forward, backward):
        ctx.rule = backward
        return forward(tensor.detach())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.rule(gradient), None, None


def differentiable(tensor, forward, backward):
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Differentiable.apply(tensor, forward, backward)
    return forward(tensor)


def submit(kind, name=None, tensor=None, output=None, result=None, **way) -> Handle:
    name = f"noname.{next(unnamed_of(kind))}" if name is None else str(name)
    if tensor is not None:
        way |= {"dtype": types.type_name(tensor), "shape": tuple(tensor.shape)}
    operation = Operation(Request(kind, name, **way), tensor, output)
    negotiator().submit(operation)
    return Handle([operation], *([result] if result else []))


def unnamed_of(kind):
    """Names by order: a counter for each kind, which begins anew with each ``init``."""
    return negotiator().unnamed.setdefault(kind, count())


def checked(tensor, verb: str) -> torch.Tensor:
    """The tensor without its history, if it can travel."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{verb} carries a torch tensor and got {type(tensor).__name__}: wrap it in torch.tensor(...)."
        )
    if types.type_name(tensor) not in types.ALLOWED or tensor.layout != torch.strided:
        raise ValueError(f"Tensor type {tensor.type()} is not supported: {verb} carries {', '.join(types.ALLOWED)}.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous: pass tensor.contiguous().")
    return tensor.detach()


def with_rows(tensor, verb: str) -> torch.Tensor:
    own = checked(tensor, verb)
    if not own.dim():
        raise ValueError(f"{verb} needs a first dimension, and this tensor has none: pass tensor.reshape(1).")
    return own


def _check_handle(handle, verb: str) -> None:
    if not isinstance(handle, Handle):
        raise ValueError(f"{verb}({handle!r:.40}): pass what an asynchronous operation has returned.")
