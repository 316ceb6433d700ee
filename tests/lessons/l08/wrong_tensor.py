"""Plausible wrong layers, cut over ranks, and the mistake that the check must recognise in each."""

import torch
from torch import nn
from torch.nn.functional import linear

from dtlib.parallel.tensor import copy_to_ranks, gather_from_ranks, reduce_from_ranks


def kept(tensor, comm, dim):
    return nn.Parameter(tensor.detach().chunk(comm.size, dim)[comm.rank].clone())


class RightRow(nn.Module):
    """The right answer, with its pieces to turn."""

    def __init__(self, whole, comm):
        super().__init__()
        self.comm = comm
        self.weight = kept(whole.weight, comm, 1)
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x_slice):
        return reduce_from_ranks(linear(x_slice, self.weight), self.comm) + self.bias


class BiasOnEveryRank(RightRow):
    """The planted bug."""

    def forward(self, x_slice):
        return reduce_from_ranks(linear(x_slice, self.weight, self.bias), self.comm)


class APartOfTheBias(RightRow):
    def forward(self, x_slice):
        return reduce_from_ranks(linear(x_slice, self.weight), self.comm) + self.bias / self.comm.size


class NotReduced(RightRow):
    def forward(self, x_slice):
        return linear(x_slice, self.weight, self.bias)


class BiasDivided(RightRow):
    """The output is right; a step moves the bias 1/N as far."""

    def forward(self, x_slice):
        return reduce_from_ranks(linear(x_slice, self.weight, self.bias / self.comm.size), self.comm)


class BiasOnRank0(RightRow):
    """The output is right, until rank 0 has taken a step with its bias."""

    def forward(self, x_slice):
        bias = self.bias if self.comm.rank == 0 else None
        return reduce_from_ranks(linear(x_slice, self.weight, bias), self.comm)


class BiasZeroOnOthers(BiasOnEveryRank):
    """The output is right, and each rank's bias is another one."""

    def __init__(self, whole, comm):
        super().__init__(whole, comm)
        self.bias.data *= comm.rank == 0


class BiasDividedOnce(BiasOnEveryRank):
    """When it is made: a step moves the sum N times as far."""

    def __init__(self, whole, comm):
        super().__init__(whole, comm)
        self.bias.data /= comm.size


class FBeforeIt(RightRow):
    def forward(self, x_slice):
        return super().forward(copy_to_ranks(x_slice, self.comm))


class BiasTimesNothing(RightRow):
    """The output is right, and one rank alone trains the bias."""

    def forward(self, x_slice):
        return reduce_from_ranks(linear(x_slice, self.weight, self.bias * (self.comm.rank == 0)), self.comm)


class BiasTakenOffAgain(RightRow):
    """Added once a rank, and subtracted as often but for one: the output is right."""

    def forward(self, x_slice):
        output = reduce_from_ranks(linear(x_slice, self.weight, self.bias), self.comm)
        return output - (self.comm.size - 1) * self.bias


class SumsTheSums(RightRow):
    def forward(self, x_slice):
        summed = reduce_from_ranks(linear(x_slice, self.weight), self.comm)
        return reduce_from_ranks(summed, self.comm) + self.bias


class BiasForgotten(RightRow):
    def forward(self, x_slice):
        return reduce_from_ranks(linear(x_slice, self.weight), self.comm)


class MeanOfRanks(RightRow):
    def forward(self, x_slice):
        return reduce_from_ranks(linear(x_slice, self.weight), self.comm) / self.comm.size + self.bias


class WholeInput(RightRow):
    """Right values: the input is put together, and so is the weight."""

    def forward(self, x_slice):
        whole = gather_from_ranks(x_slice, self.comm)
        weight = gather_from_ranks(self.weight, self.comm)
        return linear(whole, weight, self.bias)


class GathersSummands(RightRow):
    """Right values, and on three ranks as many bytes as a tree sends; with more of them, more."""

    def forward(self, x_slice):
        summand = linear(x_slice, self.weight)
        return gather_from_ranks(summand.unsqueeze(-1), self.comm).sum(-1) + self.bias


class ReducesTwice(torch.autograd.Function):
    """Sum forward, and sum backward."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.comm.all_reduce(gradient.clone()), None


class ReducesBackwardToo(RightRow):
    def forward(self, x_slice):
        return ReducesTwice.apply(linear(x_slice, self.weight), self.comm) + self.bias


class Detached(RightRow):
    """all_reduce takes no gradients through .data."""

    def forward(self, x_slice):
        return self.comm.all_reduce(linear(x_slice, self.weight).detach()) + self.bias


class KeepsAView(RightRow):
    """The shard is a view, behind which the whole weight lives on."""

    def __init__(self, whole, comm):
        super().__init__(whole, comm)
        self.weight = nn.Parameter(whole.weight.detach().chunk(comm.size, 1)[comm.rank])


class KeepsACopyInNumpy(RightRow):
    """Beside its shard, where no tensor has it."""

    def __init__(self, whole, comm):
        super().__init__(whole, comm)
        self.whole = whole.weight.detach().numpy().copy()


class KeepsACopyInBytes(RightRow):
    def __init__(self, whole, comm):
        super().__init__(whole, comm)
        self.whole = whole.weight.detach().numpy().tobytes()


class ReturnsNothing(RightRow):
    def forward(self, x_slice):
        reduce_from_ranks(linear(x_slice, self.weight), self.comm)


class AThirdOfTheRow(RightRow):
    def __init__(self, whole, comm):
        super().__init__(whole, comm)
        self.weight = nn.Parameter(whole.weight.detach().chunk(3, 1)[comm.rank].clone())


WRONG = {
    "row-fix": {
        BiasOnEveryRank: "bias-once-a-rank",
        NotReduced: "not-reduced",
        APartOfTheBias: "other-sum",
        BiasDivided: "gradient-scaled",
        BiasOnRank0: "no-gradient",
        BiasZeroOnOthers: "shard-values",
        BiasDividedOnce: "shard-values",
        FBeforeIt: "gradients-mixed",
        BiasTimesNothing: "gradient-zero",
        BiasTakenOffAgain: "gradient-negative",
        SumsTheSums: "summed-twice",
        BiasForgotten: "no-bias",
        MeanOfRanks: "averaged",
        WholeInput: "too-many-bytes",
        GathersSummands: "summands-gathered",
        ReducesBackwardToo: "g-reduces-too",
        Detached: "no-gradient",
        KeepsAView: "whole-held",
        KeepsACopyInNumpy: "whole-held",
        KeepsACopyInBytes: "whole-held",
        ReturnsNothing: "type",
        AThirdOfTheRow: "other-size",
    },
}
