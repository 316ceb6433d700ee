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

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup


class CopyToRanks(torch.autograd.Function):
    """Megatron-LM's f. Each rank used the same X with other weights: X's gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        dist.all_reduce(gradient := gradient.contiguous().clone(), group=ctx.group)
        return gradient, None


class ReduceFromRanks(torch.autograd.Function):
    """Megatron-LM's g, the reverse. The sum is the same on all ranks: each summand has the gradient of the sum."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        return gradient, None


def slice_of(parameter: Tensor, dim: int, group: ProcessGroup) -> nn.Parameter:
    """This rank's slice, along ``dim``, of rank 0's values."""
    dist.broadcast(whole := parameter.detach().clone(), group_src=0, group=group)
    return nn.Parameter(whole.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format))


class ColumnParallelLinear(nn.Module):
    """``nn.Linear`` of which each rank computes some output features, from an input that is equal on all ranks.

    Contract: ``out_features`` is a multiple of the ranks. A softmax of the output would see this rank's features alone.
    """

    def __init__(self, in_features: int, out_features: int, group: ProcessGroup | None = None):
        super().__init__()
        self.group = group or dist.group.WORLD
        whole = nn.Linear(in_features, out_features)
        self.weight, self.bias = slice_of(whole.weight, 0, self.group), slice_of(whole.bias, 0, self.group)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """``nn.Linear`` of which each rank takes some input features, as ``ColumnParallelLinear`` gives them.

    It computes a summand of the output. Contract: ``in_features`` is a multiple of the ranks.
    """

    def __init__(self, in_features: int, out_features: int, group: ProcessGroup | None = None):
        super().__init__()
        self.group = group or dist.group.WORLD
        whole = nn.Linear(in_features, out_features)
        self.weight, self.bias = slice_of(whole.weight, 1, self.group), whole.bias
        dist.broadcast(self.bias.detach(), group_src=0, group=self.group)

    def forward(self, x: Tensor) -> Tensor:
        return ReduceFromRanks.apply(nn.functional.linear(x, self.weight), self.group) + self.bias  # after the sum


class ParallelMLP(nn.Module):
    """Both, around an activation that works element by element: one all_reduce forward, one backward."""

    def __init__(self, width: int, hidden: int, group: ProcessGroup | None = None,
                 activation: Callable = nn.functional.gelu):  # fmt: skip
        super().__init__()
        self.activation = activation
        self.linear1 = ColumnParallelLinear(width, hidden, group)
        self.linear2 = RowParallelLinear(hidden, width, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.activation(self.linear1(x)))


# The full layers (layers.py, functions.py) add slices that differ in length, whole outputs and inputs, layers without
# bias, layers that are there already (from_linear), and second derivatives. Beside them: attention (blocks.py),
# vocabularies (layers.py, cross_entropy.py), norms of gradients and whole state dicts (whole.py).
# contract.py refuses what lies outside of the contracts above, where dtlib is installed: this file needs torch alone.
