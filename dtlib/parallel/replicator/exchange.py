"""What replicas exchange, with its gradients, in two forms: operations between processes, or marks in a captured graph.

    y = all_reduce(x)          the sum (mean, ...) over replicas       gradient: all_reduce of the gradients
    y = all_gather(x)          everyone's x, one after the other       gradient: reduce_scatter
    y = reduce_scatter(x)      chunk r of the sum                      gradient: all_gather

The loss of every replica may depend on every replica's x, so each gradient is exchanged as well.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from dtlib.errors import DtlibError

MAP_REDUCE_OPS = ("sum", "mean", "max", "min")


class BetweenGraph:
    """One replica a process: an exchange is an operation of the communicator."""

    def __init__(self, comm):
        self.comm = comm

    def all_reduce(self, tensor, op):
        return self.comm.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format), op=op)

    def all_gather(self, tensor):
        return self.comm.all_gather(tensor.new_empty(_gathered(tensor, self.comm.size)), tensor.detach())

    def reduce_scatter(self, tensor, replicas):
        shape = len(tensor) // replicas, *tensor.shape[1:]
        return self.comm.reduce_scatter(tensor.new_empty(shape), tensor.detach().contiguous())

    def apply(self, optimizer, gradients, used):
        optimizer.apply(gradients, used)


class InGraph:
    """All replicas in one process: an exchange is a mark, in whose place rewiring.py puts the real exchange."""

    def __init__(self, replicas: int):
        self.replicas = replicas

    def all_reduce(self, tensor, op):
        return torch.ops.dtlib.all_reduce(tensor, op)

    def all_gather(self, tensor):
        return torch.ops.dtlib.all_gather(tensor, self.replicas)

    def reduce_scatter(self, tensor, replicas):
        return torch.ops.dtlib.reduce_scatter(tensor, replicas)

    def apply(self, optimizer, gradients, used):
        with torch.no_grad():
            torch.ops.dtlib.apply_gradients(optimizer.parameters, gradients, used, optimizer.number)


# The marks. They are tagged like random operators, so that tracing never takes their results for constants.


def _mark(name: str, mutates=()):
    tags = (torch.Tag.nondeterministic_seeded,)
    return torch.library.custom_op(f"dtlib::{name}", mutates_args=mutates, tags=tags)


def _only_inside() -> NoReturn:
    raise DtlibError("Replicas exchange tensors inside step_fn: hand it to replicator.run(step_fn, input_fn).")


@_mark("all_reduce")
def _all_reduce(tensor: Tensor, op: str) -> Tensor:
    _only_inside()


@_mark("all_gather")
def _all_gather(tensor: Tensor, replicas: int) -> Tensor:
    _only_inside()


@_mark("reduce_scatter")
def _reduce_scatter(tensor: Tensor, replicas: int) -> Tensor:
    _only_inside()


@_mark("apply_gradients", mutates=("parameters",))
def _apply_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor], used: Tensor, optimizer: int) -> None:
    _only_inside()


# The shapes that they give, for tracing.
_all_reduce.register_fake(lambda tensor, op: tensor.new_empty(tensor.shape))
_all_gather.register_fake(lambda tensor, replicas: tensor.new_empty(_gathered(tensor, replicas)))
_reduce_scatter.register_fake(lambda tensor, replicas: tensor.new_empty(len(tensor) // replicas, *tensor.shape[1:]))
_apply_gradients.register_fake(lambda parameters, gradients, used, optimizer: None)


def _gathered(tensor, replicas):
    """Numbers are gathered into a vector, everything else along its first axis."""
    return (replicas * len(tensor), *tensor.shape[1:]) if tensor.dim() else (replicas,)


# The real exchanges of a rewired graph: tensors of all replicas in, one result a replica out. Each replica gets memory
# of its own, as in a process of its own.


def exchange_all_reduce(tensors, op):
    stacked = torch.stack(tensors)
    reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[op]
    return _for_each(reduce(stacked, 0).to(stacked.dtype), len(tensors))


def exchange_all_gather(tensors, replicas):
    return _for_each(torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors), replicas)


def exchange_reduce_scatter(tensors, replicas):
    return [chunk.clone() for chunk in torch.stack(tensors).sum(0).chunk(replicas)]


def _for_each(result, replicas):
    return [result, *(result.clone() for _ in range(replicas - 1))]


EXCHANGES = {
    torch.ops.dtlib.all_reduce.default: exchange_all_reduce,
    torch.ops.dtlib.all_gather.default: exchange_all_gather,
    torch.ops.dtlib.reduce_scatter.default: exchange_reduce_scatter,
}
APPLY = torch.ops.dtlib.apply_gradients.default


# Gradients, the same in both forms.


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, op, exchange):
        result = exchange.all_reduce(tensor, op)
        ctx.op, ctx.exchange = op, exchange
        ctx.save_for_backward(*((tensor, result) if op in ("max", "min") else ()))
        return result

    @staticmethod
    def backward(ctx, gradient):
        if ctx.op in ("sum", "mean"):
            return AllReduce.apply(gradient, ctx.op, ctx.exchange), None, None
        # The gradient goes to whoever has the largest (smallest) value, in equal shares.
        tensor, result = ctx.saved_tensors
        holds = (tensor == result).to(gradient.dtype)
        holders = AllReduce.apply(holds, "sum", ctx.exchange)
        return holds / holders * AllReduce.apply(gradient, "sum", ctx.exchange), None, None


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, replicas, exchange):
        ctx.shape, ctx.replicas, ctx.exchange = tensor.shape, replicas, exchange
        return exchange.all_gather(tensor)

    @staticmethod
    def backward(ctx, gradient):
        mine = ReduceScatter.apply(gradient, ctx.replicas, ctx.exchange)
        return mine.reshape(ctx.shape), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, replicas, exchange):
        ctx.replicas, ctx.exchange = replicas, exchange
        return exchange.reduce_scatter(tensor, replicas)

    @staticmethod
    def backward(ctx, gradient):
        return AllGather.apply(gradient, ctx.replicas, ctx.exchange), None, None
