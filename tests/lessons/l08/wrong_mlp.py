"""Plausible wrong perceptrons in shards, and the mistake that the check must recognise in each."""

import torch
from torch import nn
from torch.nn.functional import gelu, linear

from dtlib.parallel.tensor import copy_to_ranks, gather_from_ranks, reduce_from_ranks
from tests.lessons.l08.wrong_tensor import ReducesTwice, kept

# build: MyMLP(linear1, linear2, comm)


class RightMLP(nn.Module):
    """The right answer, with its pieces to turn."""

    def __init__(self, linear1, linear2, comm):
        super().__init__()
        self.comm = comm
        self.weight1, self.bias1 = kept(linear1.weight, comm, 0), kept(linear1.bias, comm, 0)
        self.weight2 = kept(linear2.weight, comm, 1)
        self.bias2 = nn.Parameter(linear2.bias.detach().clone())

    def f(self, x):
        return copy_to_ranks(x, self.comm)

    def g(self, x):
        return reduce_from_ranks(x, self.comm)

    def forward(self, x):
        hidden = gelu(linear(self.f(x), self.weight1, self.bias1))
        return self.g(linear(hidden, self.weight2)) + self.bias2


class WithoutG(RightMLP):
    def g(self, x):
        return x


class WithRelu(RightMLP):
    def forward(self, x):
        return self.g(linear(linear(self.f(x), self.weight1, self.bias1).relu(), self.weight2)) + self.bias2


class WithoutActivation(RightMLP):
    def forward(self, x):
        return self.g(linear(linear(self.f(x), self.weight1, self.bias1), self.weight2)) + self.bias2


class WithoutF(RightMLP):
    def f(self, x):
        return x


class FTwice(RightMLP):
    def f(self, x):
        return super().f(super().f(x))


class FBeforeEachProduct(RightMLP):
    def forward(self, x):
        hidden = gelu(linear(self.f(x), self.weight1, self.bias1))
        return self.g(linear(self.f(hidden), self.weight2)) + self.bias2


class WithoutFirstBias(RightMLP):
    def forward(self, x):
        return self.g(linear(gelu(linear(self.f(x), self.weight1)), self.weight2)) + self.bias2


class GeluBehindTheSum(RightMLP):
    def forward(self, x):
        return gelu(self.g(linear(linear(self.f(x), self.weight1, self.bias1), self.weight2)) + self.bias2)


class GeluBetweenSumAndBias(RightMLP):
    def forward(self, x):
        return gelu(self.g(linear(linear(self.f(x), self.weight1, self.bias1), self.weight2))) + self.bias2


class FAndGTurnedRound(RightMLP):
    def f(self, x):
        return reduce_from_ranks(x, self.comm)

    def g(self, x):
        return copy_to_ranks(x, self.comm)


class GReducesToo(RightMLP):
    def g(self, x):
        return ReducesTwice.apply(x, self.comm)


class ReducesOnlyInTraining(RightMLP):
    """Under no_grad there is nothing to train, but still a sum."""

    def g(self, x):
        return reduce_from_ranks(x, self.comm) if x.requires_grad else x


class _AveragesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.comm.all_reduce(gradient.clone(), op="mean"), None


class FBehindGelu(RightMLP):
    def forward(self, x):
        hidden = copy_to_ranks(gelu(linear(x, self.weight1, self.bias1)), self.comm)
        return self.g(linear(hidden, self.weight2)) + self.bias2


class DealtLikeCards(RightMLP):
    """Every N-th hidden feature."""

    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        mine = slice(comm.rank, None, comm.size)
        self.weight1 = nn.Parameter(linear1.weight.detach()[mine].clone())
        self.bias1 = nn.Parameter(linear1.bias.detach()[mine].clone())
        self.weight2 = nn.Parameter(linear2.weight.detach()[:, mine].clone())


class FAverages(RightMLP):
    """As data parallelism does."""

    def f(self, x):
        return _AveragesBackward.apply(x, self.comm)


class BiasInEverySummand(RightMLP):
    def forward(self, x):
        hidden = gelu(linear(self.f(x), self.weight1, self.bias1))
        return self.g(linear(hidden, self.weight2, self.bias2))


class NobodyNeedsTheOthers(nn.Module):
    """Right values, no messages: every rank has all of it."""

    def __init__(self, linear1, linear2, comm):
        super().__init__()
        self.linear1, self.linear2 = linear1, linear2

    def forward(self, x):
        return self.linear2(gelu(self.linear1(x)))


class GathersWeights(RightMLP):
    """Right values: weights are shared out, and put together to be used."""

    def forward(self, x):
        weight1 = gather_from_ranks(self.weight1.T, self.comm).T
        bias1 = gather_from_ranks(self.bias1, self.comm)
        return linear(gelu(linear(x, weight1, bias1)), gather_from_ranks(self.weight2, self.comm), self.bias2)


class GathersOnce(GathersWeights):
    """The whole weight is put together when it is first used, and kept."""

    def forward(self, x):
        if not hasattr(self, "whole"):
            self.whole = gather_from_ranks(self.weight1.T, self.comm).T, gather_from_ranks(self.bias1, self.comm)
        hidden = gelu(linear(self.f(x), *self.whole).chunk(self.comm.size, -1)[self.comm.rank])
        return self.g(linear(hidden, self.weight2)) + self.bias2


class KeepsWholeWeights(RightMLP):
    """Shards are used, and the whole stays beside them."""

    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        self.whole = [linear1.weight.detach(), linear2.weight.detach()]


class KeepsWholeWeightsInNumpy(RightMLP):
    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        self.whole = [linear.weight.detach().numpy().copy() for linear in (linear1, linear2)]


class CutTheWrongWay(RightMLP):
    """Hidden features of the next rank in the second weight."""

    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        self.weight2 = nn.Parameter(linear2.weight.detach().chunk(comm.size, 1)[comm.rank - 1].clone())


class FeaturesOfTheNextRank(RightMLP):
    """All values are right, but rank r has not shard r."""

    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        there = (comm.rank + 1) % comm.size
        self.weight1, self.bias1, self.weight2 = (
            nn.Parameter(whole.detach().chunk(comm.size, dim)[there].clone())
            for whole, dim in ((linear1.weight, 0), (linear1.bias, 0), (linear2.weight, 1))
        )


class AddsUpWeightGradients(RightMLP):
    """As data parallelism does."""

    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: comm.all_reduce(gradient.clone()))


class RandomParts(RightMLP):
    """Layers of its own, that nobody has asked for."""

    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        torch.manual_seed(comm.rank)
        self.weight1 = nn.Parameter(torch.randn_like(self.weight1))


class BiasOfTheWholeLayer(RightMLP):
    """The second bias is not cut, so that it needs no clone, does it?"""

    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        self.bias2 = nn.Parameter(linear2.bias.detach())


class AThirdOfTheFeatures(RightMLP):
    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        for name, whole, dim in (
            ("weight1", linear1.weight, 0),
            ("bias1", linear1.bias, 0),
            ("weight2", linear2.weight, 1),
        ):
            setattr(self, name, nn.Parameter(whole.detach().chunk(3, dim)[comm.rank].clone()))


class GeluTwice(RightMLP):
    def forward(self, x):
        return self.g(linear(gelu(gelu(linear(self.f(x), self.weight1, self.bias1))), self.weight2)) + self.bias2


class FloatInside(RightMLP):
    def forward(self, x):
        hidden = gelu(linear(self.f(x), self.weight1, self.bias1)).float()
        return self.g(linear(hidden, self.weight2.float())).double() + self.bias2


WRONG = {
    "mlp-build": {
        WithoutG: "not-reduced",
        WithRelu: "other-activation",
        WithoutActivation: "other-activation",
        WithoutF: "f-missing",
        FTwice: "f-twice",
        FBeforeEachProduct: "f-twice",
        WithoutFirstBias: "other-activation",
        GeluBehindTheSum: "other-activation",
        GeluBetweenSumAndBias: "other-activation",
        FAndGTurnedRound: "other-values",
        GReducesToo: "g-reduces-too",
        ReducesOnlyInTraining: "no-grad",
        FBehindGelu: "f-late",
        DealtLikeCards: "shard-values",
        FAverages: "gradient-averaged",
        BiasInEverySummand: "bias-once-a-rank",
        NobodyNeedsTheOthers: "no-shard",
        GathersWeights: "too-many-bytes",
        GathersOnce: "too-many-bytes",
        KeepsWholeWeights: "whole-held",
        KeepsWholeWeightsInNumpy: "whole-held",
        CutTheWrongWay: "other-values",
        FeaturesOfTheNextRank: "other-shard",
        AddsUpWeightGradients: "shards-reduced",
        RandomParts: "other-values",
        BiasOfTheWholeLayer: "shared-memory",
        AThirdOfTheFeatures: "other-size",
        GeluTwice: "other-activation",
        FloatInside: "rounded",
    },
}
