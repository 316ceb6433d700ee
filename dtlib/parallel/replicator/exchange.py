"""Exchanges between replicas, with gradients: collectives between processes, or marks in a captured graph.

    y = all_reduce(x)          the sum (mean, ...) over replicas       gradient: all_reduce of the gradients
    y = all_gather(x)          all replicas' x, concatenated           gradient: reduce_scatter
    y = reduce_scatter(x)      chunk r of the sum                      gradient: all_gather

The loss of every replica may depend on every replica's x, so gradients are exchanged as well. The kind of an exchange
is a string: ``all_reduce mean``, ``all_gather``, ``reduce_scatter``.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.backward import with_gradient

MAP_REDUCE_OPS = ("sum", "mean")
GRADIENT = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}  # an all-reduce is its own gradient
Exchange = Callable[[Tensor, str], Tensor]


def between_graph(comm: Communicator) -> Exchange:
    """Return the exchange for one replica per process: a collective of the communicator."""

    def exchange(tensor: Tensor, kind: str) -> Tensor:
        name, _, op = kind.partition(" ")
        if name == "all_reduce":
            return comm.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format), op=op)
        result = tensor.new_empty(_shape_after(tensor, kind, comm.size))
        return getattr(comm, name)(result, tensor.detach().contiguous())

    return exchange


def in_graph(replicas: int) -> Exchange:
    """Return the exchange for all replicas in one process: a mark that ``graph.rewire`` replaces by ``combine_all``."""
    return lambda tensor, kind: torch.ops.dtlib.exchange(tensor, kind, replicas)


def combine_all(tensors: list[Tensor], kind: str) -> list[Tensor]:
    """Exchange in a rewired graph: take a tensor per replica; return a result per replica, each in its own memory."""
    name, _, op = kind.partition(" ")
    stacked = torch.stack(tensors)
    if name == "reduce_scatter":
        return [chunk.clone() for chunk in stacked.sum(0).chunk(len(tensors))]
    if name == "all_reduce":
        result = (stacked.mean(0) if op == "mean" else stacked.sum(0)).to(stacked.dtype)
    else:
        result = stacked.flatten(0, 1) if stacked.dim() > 1 else stacked
    return [result.clone() for _ in tensors]


def exchanged(tensor: Tensor, kind: str, exchange: Exchange) -> Tensor:
    """Return ``exchange(tensor, kind)``, with gradients that flow back to every replica."""
    shape = tensor.shape

    def backward(gradient):
        return exchanged(gradient, GRADIENT.get(kind, kind), exchange).reshape(shape)

    return with_gradient(tensor, lambda tensor: exchange(tensor, kind), backward)


def _shape_after(tensor, kind: str, replicas: int) -> tuple:
    """Return the shape of an exchange's result: numbers are gathered into a vector, tensors along the first axis."""
    if kind == "all_gather":
        return (replicas * len(tensor), *tensor.shape[1:]) if tensor.dim() else (replicas,)
    return (len(tensor) // replicas, *tensor.shape[1:]) if kind == "reduce_scatter" else tuple(tensor.shape)


# The marks. They are tagged as random operators, so that tracing does not treat their results as constants.


def _mark(name: str, mutates=()):
    return torch.library.custom_op(f"dtlib::{name}", mutates_args=mutates, tags=(torch.Tag.nondeterministic_seeded,))


OUTSIDE = "Replicas exchange tensors inside step_fn: pass step_fn to replicator.run(step_fn, input_fn)."


@_mark("exchange")
def _exchange(tensor: Tensor, kind: str, replicas: int) -> Tensor:
    raise DtlibError(OUTSIDE)


@_mark("apply_gradients", mutates=("parameters",))
def _apply_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor], used: Tensor, optimizer: int) -> None:
    raise DtlibError(OUTSIDE)


_exchange.register_fake(lambda tensor, kind, replicas: tensor.new_empty(_shape_after(tensor, kind, replicas)))
_apply_gradients.register_fake(lambda parameters, gradients, used, optimizer: None)
EXCHANGE, APPLY = torch.ops.dtlib.exchange.default, torch.ops.dtlib.apply_gradients.default
