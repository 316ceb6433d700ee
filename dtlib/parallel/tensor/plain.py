"""Tensor parallelism, to be read from top to bottom: f and g, a column-parallel and a row-parallel layer, and an MLP.

Every rank has a slice of each layer's weights, and all ranks work on the same batch. Two layers Z = act(X A) B are
sharded along the features between them, A by columns and B by rows. Between A and B no communication is needed, because
the activation works element by element:

                  A = [A0 | A1]                B = [B0]
                                                   [B1]
              .--> rank 0: act(X A0) = Y0 ---> Y0 B0 --.
    X --> f --|                                        |--> g --> Z = Y0 B0 + Y1 B1, + bias
              '--> rank 1: act(X A1) = Y1 ---> Y1 B1 --'

torch stores the transposed weight, (out_features, in_features), so the columns of A are its rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup


class CopyToRanks(torch.autograd.Function):
    """Megatron-LM's f. Ranks multiply the same X by different weights, so X's gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        dist.all_reduce(gradient := gradient.contiguous().clone(), group=ctx.group)
        return gradient, None


class ReduceFromRanks(torch.autograd.Function):
    """Megatron-LM's g, the reverse of f. The sum is equal on all ranks, and each summand has its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        return gradient, None


def slice_of(parameter: Tensor, dim: int, group: ProcessGroup) -> nn.Parameter:
    """Return this rank's slice, along ``dim``, of rank 0's values."""
    dist.broadcast(whole := parameter.detach().clone(), group_src=0, group=group)
    return nn.Parameter(whole.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format))


class ColumnParallelLinear(nn.Module):
    """``nn.Linear`` with sharded output features. The input is equal on all ranks.

    Contract: ``out_features`` is a multiple of the ranks. A softmax of the output would see only this rank's features.
    """

    def __init__(self, in_features: int, out_features: int, group: ProcessGroup | None = None):
        super().__init__()
        self.group = group or dist.group.WORLD
        whole = nn.Linear(in_features, out_features)
        self.weight, self.bias = slice_of(whole.weight, 0, self.group), slice_of(whole.bias, 0, self.group)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """``nn.Linear`` with sharded input features, as ``ColumnParallelLinear`` returns them.

    Each rank computes a summand of the output. Contract: ``in_features`` is a multiple of the ranks.
    """

    def __init__(self, in_features: int, out_features: int, group: ProcessGroup | None = None):
        super().__init__()
        self.group = group or dist.group.WORLD
        whole = nn.Linear(in_features, out_features)
        self.weight, self.bias = slice_of(whole.weight, 1, self.group), whole.bias
        dist.broadcast(self.bias.detach(), group_src=0, group=self.group)

    def forward(self, x: Tensor) -> Tensor:
        # Add the bias after the sum, otherwise every rank would add it.
        return ReduceFromRanks.apply(nn.functional.linear(x, self.weight), self.group) + self.bias


class ParallelMLP(nn.Module):
    """Both layers, around an element-wise activation: one all_reduce forward and one backward."""

    def __init__(self, width: int, hidden: int, group: ProcessGroup | None = None,
                 activation: Callable = nn.functional.gelu):  # fmt: skip
        super().__init__()
        self.activation = activation
        self.linear1 = ColumnParallelLinear(width, hidden, group)
        self.linear2 = RowParallelLinear(hidden, width, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.activation(self.linear1(x)))


# The full layers (layers.py, functions.py) add: slices of different lengths, whole outputs and inputs, layers without
# bias, existing layers (from_linear), and second derivatives. Other files add attention (blocks.py), vocabularies
# (layers.py, cross_entropy.py), gradient norms and whole state dicts (unsharded.py). Where dtlib is installed,
# checks.py checks the contracts above. This file imports only torch.
