"""Exchanges between replicas, with gradients: collectives between processes, or marks in a captured graph.

    y = all_reduce(x)    the sum or the mean over replicas    gradient: all_reduce of the gradients

The loss of every replica may depend on every replica's x, so gradients are exchanged as well.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.backward import with_gradient

MAP_REDUCE_OPS = ("sum", "mean")
Exchange = Callable[[Tensor, str], Tensor]


def between_graph(comm: Communicator) -> Exchange:
    """Return the exchange for one replica per process: a collective of the communicator."""
    return lambda tensor, op: comm.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format), op=op)


def in_graph(tensor: Tensor, op: str) -> Tensor:
    """Exchange between replicas in one process: a mark that ``graph.rewire`` replaces by ``combine_all``."""
    return torch.ops.dtlib.exchange(tensor, op)


def combine_all(tensors: list[Tensor], op: str) -> list[Tensor]:
    """Exchange in a rewired graph: take a tensor per replica; return a result per replica, each in its own memory."""
    stacked = torch.stack(tensors)
    result = (stacked.mean(0) if op == "mean" else stacked.sum(0)).to(stacked.dtype)
    return [result.clone() for _ in tensors]


def exchanged(tensor: Tensor, op: str, exchange: Exchange) -> Tensor:
    """Return ``exchange(tensor, op)``, with gradients that flow back to every replica."""
    return with_gradient(
        tensor, lambda tensor: exchange(tensor, op), lambda gradient: exchanged(gradient, op, exchange)
    )


# The marks. They are tagged as random operators, so that tracing does not treat their results as constants.


def _mark(name: str, mutates=()):
    return torch.library.custom_op(f"dtlib::{name}", mutates_args=mutates, tags=(torch.Tag.nondeterministic_seeded,))


OUTSIDE = "Replicas exchange tensors inside step_fn: pass step_fn to replicator.run(step_fn, input_fn)."


@_mark("exchange")
def _exchange(tensor: Tensor, op: str) -> Tensor:
    raise DtlibError(OUTSIDE)


@_mark("apply_gradients", mutates=("parameters",))
def _apply_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor], used: Tensor, optimizer: int) -> None:
    raise DtlibError(OUTSIDE)


_exchange.register_fake(lambda tensor, op: tensor.new_empty(tensor.shape))
_apply_gradients.register_fake(lambda parameters, gradients, used, optimizer: None)
EXCHANGE, APPLY = torch.ops.dtlib.exchange.default, torch.ops.dtlib.apply_gradients.default
