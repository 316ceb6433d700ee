"""Plausible wrong answers about stage 3, and the mistake that the check must recognise in each."""

import torch
from torch.nn.functional import linear

from tests.lessons.l06.wrong_zero2 import shard_of

# build: OnDemand(comm, layer), which is called with x


class RightLayer:
    """The right answer, in pieces that the wrong ones replace."""

    def __init__(self, comm, layer):
        self.comm, self.shape, self.count = comm, layer.weight.shape, layer.weight.numel()
        flat = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
        self.total = len(flat)
        self.length = -(-len(flat) // comm.size)
        padded = torch.zeros(self.length * comm.size, dtype=flat.dtype)
        self.pad(padded, flat)
        self.own = self.cut(padded)

    def pad(self, padded, flat):
        padded[: len(flat)] = flat

    def cut(self, padded):
        return shard_of(padded, self.comm.rank, self.length).clone()

    def gather(self):
        whole = torch.empty(self.length * self.comm.size, dtype=self.own.dtype)
        return self.comm.all_gather(whole, self.own)

    def bias(self, whole):
        return whole[self.count : self.count + self.shape[0]]

    def __call__(self, x):
        whole = self.gather()
        return linear(x, whole[: self.count].view(self.shape), self.bias(whole))


class KeptInSinglePrecision(RightLayer):
    """Half the memory, and the layer gives other numbers."""

    def cut(self, padded):
        return super().cut(padded).float()

    def gather(self):
        return super().gather().double()


class BiasTwice(RightLayer):
    def __call__(self, x):
        return super().__call__(x) + self.bias(self.gather())


class BiasFromTheFront(RightLayer):
    def bias(self, whole):
        return whole[: self.shape[0]]

    def __call__(self, x):
        whole = self.gather()
        return linear(x, whole[self.shape[0] : self.total].view(self.shape), self.bias(whole))


class WeightTurnedRound(RightLayer):
    def __call__(self, x):
        whole = self.gather()
        return x @ whole[: self.count].view(self.shape[1], self.shape[0]) + self.bias(whole)


class NotFreed(RightLayer):
    def gather(self):
        self.whole = super().gather()
        return self.whole


class KeptOnTheClass(RightLayer):
    """Gathered once for all calls, out of sight."""

    whole = None

    def __init__(self, comm, layer):
        super().__init__(comm, layer)
        KeptOnTheClass.whole = None

    def gather(self):
        if KeptOnTheClass.whole is None:
            KeptOnTheClass.whole = super().gather()
        return KeptOnTheClass.whole


class ViewsKept(RightLayer):
    """The weight and the bias are put back, as modules do, and stay."""

    def __call__(self, x):
        out = super().__call__(x)
        self.last_bias = self.bias(self.gather())
        return out


class ShardIsAView(RightLayer):
    def cut(self, padded):
        return shard_of(padded, self.comm.rank, self.length)


class GraphKept(RightLayer):
    """A clone, whose graph goes back to the layer."""

    def __init__(self, comm, layer):
        super().__init__(comm, layer)
        flat = torch.cat([layer.weight.flatten(), layer.bias])
        padded = torch.nn.functional.pad(flat, (0, self.length * comm.size - len(flat)))
        self.own = shard_of(padded, comm.rank, self.length).clone()

    def gather(self):
        whole = torch.empty(self.length * self.comm.size, dtype=self.own.dtype)
        return self.comm.all_gather(whole, self.own.detach())


class LayerKept(RightLayer):
    def __init__(self, comm, layer):
        super().__init__(comm, layer)
        self.layer = layer


class NeverShared(RightLayer):
    """Every rank simply keeps the layer."""

    def __init__(self, comm, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class NeverSharedAsList(NeverShared):
    """The same, hidden where no tensor is."""

    def __init__(self, comm, layer):
        self.values = layer.weight.tolist(), layer.bias.tolist()

    def __call__(self, x):
        return linear(x, *(torch.tensor(values, dtype=x.dtype) for values in self.values))


class NothingGathered(RightLayer):
    """Made anew from the seed in each call: nothing is held, and nothing asked for."""

    def __call__(self, x):
        rng = torch.get_rng_state()
        torch.manual_seed(1)
        layer = torch.nn.Linear(x.shape[1], self.shape[0], dtype=x.dtype)
        torch.set_rng_state(rng)
        return layer(x)


class GatheredByAllReduce(RightLayer):
    def gather(self):
        whole = torch.zeros(self.length * self.comm.size, dtype=self.own.dtype)
        shard_of(whole, self.comm.rank, self.length).copy_(self.own)
        return self.comm.all_reduce(whole, algorithm="ring")


class GatheredTwice(RightLayer):
    """Once for the weight, once for the bias."""

    def bias(self, whole):
        return super().bias(self.gather())


class LayerOnlyDivides(RightLayer):
    def __init__(self, comm, layer):
        flat = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
        self.comm, self.shape, self.count = comm, layer.weight.shape, layer.weight.numel()
        self.own = flat.view(comm.size, -1)[comm.rank].clone()
        self.length = len(self.own)


class LayerPaddingInFront(RightLayer):
    def pad(self, padded, flat):
        padded[len(padded) - len(flat) :] = flat


class BiasFromTheEnd(RightLayer):
    """The last elements are the bias, unless there is padding."""

    def bias(self, whole):
        return whole[-self.shape[0] :]


class ShardsAdded(RightLayer):
    """Shards are one on top of the other: the weight is garbage."""

    def gather(self):
        return super().gather().flip(0)


class BiasForgotten(RightLayer):
    def bias(self, whole):
        return None


class FreesItsPart(RightLayer):
    """It frees too much."""

    def __call__(self, x):
        out = super().__call__(x)
        self.own = torch.zeros_like(self.own)
        return out


class RestAsArray(RightLayer):
    """The weight stays, where no tensor is."""

    def __init__(self, comm, layer):
        super().__init__(comm, layer)
        self.spare = layer.weight.detach().numpy().copy()


class BiasKept(RightLayer):
    """The weight alone is shared out in earnest: the bias stays whole, beside its shard."""

    def __init__(self, comm, layer):
        super().__init__(comm, layer)
        self.whole_bias = layer.bias.detach().clone()

    def bias(self, whole):
        return self.whole_bias


class WeightAloneIsShared(RightLayer):
    """The bias is no part of the flat tensor, and whole on every rank."""

    def __init__(self, comm, layer):
        weight = layer.weight.detach().flatten()
        weight = torch.nn.functional.pad(weight, (0, -len(weight) % comm.size))
        self.comm, self.shape, self.count = comm, layer.weight.shape, layer.weight.numel()
        self.own, self.whole_bias = weight.chunk(comm.size)[comm.rank].clone(), layer.bias.detach().clone()
        self.length = len(self.own)

    def bias(self, whole):
        return self.whole_bias


class RestAsBytes(RightLayer):
    def __init__(self, comm, layer):
        super().__init__(comm, layer)
        self.spare = [row.numpy().tobytes() for row in layer.weight.detach()]


class RestAsList(RightLayer):
    def __init__(self, comm, layer):
        super().__init__(comm, layer)
        self.spare = layer.weight.tolist()


class GatheredAsArray(RightLayer):
    """What was gathered is remembered as an array."""

    def gather(self):
        whole = super().gather()
        self.last = whole.numpy().copy()
        return whole


# fit-it: fit = {"stage": ..., "ranks": ..., "gigabytes": ...}


class AThirdOfTheLayer(RightLayer):
    def cut(self, padded):
        third = len(padded) // 3
        return padded[self.comm.rank * third : (self.comm.rank + 1) * third].clone()

    def gather(self):
        whole = torch.empty(len(self.own) * self.comm.size, dtype=self.own.dtype)
        return self.comm.all_gather(whole, self.own)


NAMED = {
    "fit-it": {
        "as it was": ({"stage": None, "ranks": None, "gigabytes": None}, "type"),
        "a word": ("stage 3", "type"),
        "half a rank": ({"stage": 3, "ranks": 7.5, "gigabytes": 16}, "type"),
        "stage 4": ({"stage": 4, "ranks": 8, "gigabytes": 15}, "type"),
        "data parallelism": ({"stage": 0, "ranks": 8, "gigabytes": 15}, "nothing-sharded"),
        "stage 1, all divided": ({"stage": 1, "ranks": 8, "gigabytes": 15}, "parameters-whole"),
        "stage 2, all divided": ({"stage": 2, "ranks": 8, "gigabytes": 15}, "parameters-whole"),
        "stage 1, states alone": ({"stage": 1, "ranks": 6, "gigabytes": 15}, "stage-1"),
        "stage 2, one too few": ({"stage": 2, "ranks": 104, "gigabytes": 16.01}, "too-few"),
        "stage 2": ({"stage": 2, "ranks": 105, "gigabytes": 16}, "stage-2"),
        "GiB": ({"stage": 3, "ranks": 7, "gigabytes": 15.97}, "gibibytes"),
        "rounded down": ({"stage": 3, "ranks": 6, "gigabytes": 20}, "too-few"),
        "one too many": ({"stage": 3, "ranks": 9, "gigabytes": 13.33}, "too-many"),
        "bytes in GiB": ({"stage": 3, "ranks": 8, "gigabytes": 13.97}, "gibibytes"),
        "bytes": ({"stage": 3, "ranks": 8, "gigabytes": 15_000_000_000}, "bytes"),
        "18 bytes a parameter": ({"stage": 3, "ranks": 8, "gigabytes": 16.875}, "eighteen-bytes"),
        "all ranks together": ({"stage": 3, "ranks": 8, "gigabytes": 120}, "not-divided"),
        "states alone": ({"stage": 3, "ranks": 8, "gigabytes": 11.25}, "gigabytes"),
    },
}

WRONG = {
    "gather-on-demand": {
        NotFreed: "not-freed",
        KeptOnTheClass: "not-freed",
        ViewsKept: "not-freed",
        ShardIsAView: "whole-at-rest",
        GraphKept: "whole-at-rest",
        LayerKept: "whole-at-rest",
        NeverShared: "whole-at-rest",
        NeverSharedAsList: "whole-at-rest",
        NothingGathered: "nothing-gathered",
        RestAsArray: "whole-at-rest",
        RestAsBytes: "whole-at-rest",
        RestAsList: "whole-at-rest",
        WeightAloneIsShared: "whole-at-rest",
        BiasKept: "whole-at-rest",
        GatheredAsArray: "not-freed",
        GatheredByAllReduce: "too-many-bytes",
        GatheredTwice: "too-many-bytes",
        LayerOnlyDivides: "only-divides",
        LayerPaddingInFront: "padding",
        BiasFromTheEnd: "padding",
        ShardsAdded: "other-values",
        BiasForgotten: "no-bias",
        BiasTwice: "other-sum",
        BiasFromTheFront: "cut-otherwise",
        WeightTurnedRound: "cut-otherwise",
        FreesItsPart: "second-call",
        KeptInSinglePrecision: "rounded",
        AThirdOfTheLayer: "other-size",
    },
}
