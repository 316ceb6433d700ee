"""What replicas exchange, with its gradients, in two forms: operations between processes, or marks in a captured graph.

    y = all_reduce(x)          the sum (mean, ...) over replicas       gradient: all_reduce of the gradients
    y = all_gather(x)          everyone's x, one after the other       gradient: reduce_scatter
    y = reduce_scatter(x)      chunk r of the sum                      gradient: all_gather

The loss of every replica may depend on every replica's x, so each gradient is exchanged as well.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.backward import with_gradient

MAP_REDUCE_OPS = ("sum", "mean", "max", "min")


class BetweenGraph:
    """One replica a process: an exchange is an operation of the communicator."""

    def __init__(self, comm: Communicator):
        self.comm = comm

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        return self.comm.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format), op=op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.comm.all_gather(tensor.new_empty(_gathered(tensor, self.comm.size)), tensor.detach())

    def reduce_scatter(self, tensor: Tensor, replicas: int) -> Tensor:
        shape = len(tensor) // replicas, *tensor.shape[1:]
        return self.comm.reduce_scatter(tensor.new_empty(shape), tensor.detach().contiguous())


class InGraph:
    """All replicas in one process: an exchange is a mark, in whose place rewiring.py puts the real exchange."""

    def __init__(self, replicas: int):
        self.replicas = replicas

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        return torch.ops.dtlib.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.ops.dtlib.all_gather(tensor, self.replicas)

    def reduce_scatter(self, tensor: Tensor, replicas: int) -> Tensor:
        return torch.ops.dtlib.reduce_scatter(tensor, replicas)


Exchange = BetweenGraph | InGraph

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


def exchange_all_reduce(tensors: list[Tensor], op: str) -> list[Tensor]:
    stacked = torch.stack(tensors)
    reduced: Tensor = getattr(torch, {"max": "amax", "min": "amin"}.get(op, op))(stacked, 0)
    return _for_each(reduced.to(stacked.dtype), len(tensors))


def exchange_all_gather(tensors: list[Tensor], replicas: int) -> list[Tensor]:
    return _for_each(torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors), replicas)


def exchange_reduce_scatter(tensors: list[Tensor], replicas: int) -> list[Tensor]:
    return [chunk.clone() for chunk in torch.stack(tensors).sum(0).chunk(replicas)]


def _for_each(result, replicas):
    return [result, *(result.clone() for _ in range(replicas - 1))]


EXCHANGES: dict[object, Callable] = {
    torch.ops.dtlib.all_reduce.default: exchange_all_reduce,
    torch.ops.dtlib.all_gather.default: exchange_all_gather,
    torch.ops.dtlib.reduce_scatter.default: exchange_reduce_scatter,
}
APPLY = torch.ops.dtlib.apply_gradients.default


# Gradients, the same in both forms.


def all_reduce(tensor: Tensor, op: str, exchange: Exchange) -> Tensor:
    saved: list[Tensor] = []

    def forward(tensor):
        result = exchange.all_reduce(tensor, op)
        if op in ("max", "min"):
            saved.append(tensor == result)
        return result

    def backward(gradient):
        if op in ("sum", "mean"):
            return all_reduce(gradient, op, exchange)
        # The gradient goes to whoever has the largest (smallest) value, in equal shares.
        holds = saved[0].to(gradient.dtype)
        return holds / all_reduce(holds, "sum", exchange) * all_reduce(gradient, "sum", exchange)

    return with_gradient(tensor, forward, backward)


def all_gather(tensor: Tensor, replicas: int, exchange: Exchange) -> Tensor:
    shape, back = tensor.shape, partial(reduce_scatter, replicas=replicas, exchange=exchange)
    return with_gradient(tensor, exchange.all_gather, lambda gradient: back(gradient).reshape(shape))


def reduce_scatter(tensor: Tensor, replicas: int, exchange: Exchange) -> Tensor:
    back = partial(all_gather, replicas=replicas, exchange=exchange)
    return with_gradient(tensor, partial(exchange.reduce_scatter, replicas=replicas), back)
