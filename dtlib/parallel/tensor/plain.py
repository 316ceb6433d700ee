"""Tensor parallelism, to be read from top to bottom: f and g, a linear layer cut by columns, one by rows, and both.

Every rank has a slice of each layer's weights, and all ranks work on the same batch. Two layers Z = act(X A) B are cut
along the features between them, A by columns, B by rows. What lies between needs nothing of other ranks, as the
activation works element by element:

                  A = [A0 | A1]                B = [B0]
                                                   [B1]
              .--> rank 0: act(X A0) = Y0 ---> Y0 B0 --.
    X --> f --|                                        |--> g --> Z = Y0 B0 + Y1 B1, + bias
              '--> rank 1: act(X A1) = Y1 ---> Y1 B1 --'

torch keeps the transposed weight, (out_features, in_features): A's columns are its rows.
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dtlib.comm import Communicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.contract import check_input
from dtlib.gradients.shard_info import note


class CopyToRanks(torch.autograd.Function):
    """Megatron-LM's f. Each rank used the same X with other weights: X's gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        return ctx.comm.all_reduce(gradient.clone()), None


class ReduceFromRanks(torch.autograd.Function):
    """Megatron-LM's g, the reverse. The sum is the same on all ranks: each summand has the gradient of the sum."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, comm: Communicator) -> Tensor:
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        return gradient, None


def slice_of(parameter: Tensor, dim: int, comm: Communicator) -> nn.Parameter:
    """This rank's slice, along ``dim``, of rank 0's values."""
    whole = comm.broadcast(parameter.detach().clone())
    mine = nn.Parameter(whole.chunk(comm.size, dim)[comm.rank].clone(memory_format=torch.contiguous_format))
    note(mine, tensor=comm.members)  # norms of its gradients need the other ranks
    return mine


class ColumnParallelLinear(nn.Module):
    """``nn.Linear`` of which each rank computes some output features, from an input that is equal on all ranks.

    Contract: ``out_features`` is a multiple of the ranks. A softmax of the output would see this rank's features alone.
    """

    def __init__(self, in_features: int, out_features: int, comm: Communicator):
        super().__init__()
        self.comm = as_communicator(comm)
        check_features(self.comm, out_features, in_features)
        whole = nn.Linear(in_features, out_features)
        self.weight, self.bias = slice_of(whole.weight, 0, self.comm), slice_of(whole.bias, 0, self.comm)

    def forward(self, x: Tensor) -> Tensor:
        check_same_input(self.comm, x)
        check_input(x, self.weight, "ColumnParallelLinear")
        return nn.functional.linear(CopyToRanks.apply(x, self.comm), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """``nn.Linear`` of which each rank takes some input features, as ``ColumnParallelLinear`` gives them.

    It computes a summand of the output. Contract: ``in_features`` is a multiple of the ranks.
    """

    def __init__(self, in_features: int, out_features: int, comm: Communicator):
        super().__init__()
        self.comm = as_communicator(comm)
        check_features(self.comm, in_features, out_features)
        whole = nn.Linear(in_features, out_features)
        self.weight = slice_of(whole.weight, 1, self.comm)
        self.bias = nn.Parameter(self.comm.broadcast(whole.bias.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.weight, "RowParallelLinear")
        return ReduceFromRanks.apply(nn.functional.linear(x, self.weight), self.comm) + self.bias  # once, after the sum


class ParallelMLP(nn.Module):
    """Both, around an activation that works element by element: one all_reduce forward, one backward."""

    def __init__(self, width: int, hidden: int, comm: Communicator, activation: Callable = nn.functional.gelu):
        super().__init__()
        self.activation = activation
        self.linear1 = ColumnParallelLinear(width, hidden, comm)
        self.linear2 = RowParallelLinear(hidden, width, comm)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.activation(self.linear1(x)))


def check_features(comm: Communicator, cut: int, whole: int) -> None:
    """Refuse, on every rank, a layer whose features cannot be cut into equal slices."""
    if len(sizes := set(comm.all_gather_object((cut, whole)))) > 1:
        raise DtlibError(f"Ranks make layers of sizes {sizes}: make the same on all ranks.")
    if cut % comm.size:
        raise DtlibError(f"{cut} features make no {comm.size} equal slices: see layers.py for others.")


def check_same_input(comm: Communicator, x: Tensor) -> None:
    """Refuse, on every rank, batches that differ: their sums over ranks would mean nothing."""
    mine = torch.tensor([x.numel(), zlib.crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy())])
    if (comm.all_gather(mine.new_empty(comm.size, 2), mine) != mine).any():
        raise DtlibError("Ranks have different inputs: give all ranks of this communicator the same batch.")


# The full layers (layers.py, functions.py) add slices that differ in length, whole outputs and inputs, layers without
# bias, layers that are there already (from_linear), and second derivatives. Beside them: attention (blocks.py),
# vocabularies (layers.py, cross_entropy.py), norms of gradients and whole state dicts (whole.py).
