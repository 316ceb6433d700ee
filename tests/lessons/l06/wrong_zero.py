"""Plausible wrong ways to shard Adam, and the mistake that the check must recognise in each."""

import torch
from torch import nn

# build: ShardedAdam(comm, parameters, **settings) with step()


class Right:
    """The right answer, in pieces that the wrong ones replace."""

    def __init__(self, comm, parameters, **settings):
        self.comm, self.parameters, self.settings = comm, list(parameters), settings
        self.count = sum(parameter.numel() for parameter in self.parameters)
        self.length = self.length_of_a_shard()
        self.flat = self.filled(parameter.detach() for parameter in self.parameters)
        self.use(self.flat)
        self.prepare()

    def length_of_a_shard(self):
        return -(-self.count // self.comm.size)

    def filled(self, tensors):
        flat = torch.zeros(self.length * self.comm.size, dtype=self.parameters[0].dtype)
        values = torch.cat([tensor.flatten() for tensor in tensors])
        room = min(len(flat), len(values))
        flat[:room] = values[:room]
        return flat

    def views(self, flat):
        return flat[: self.count].split([parameter.numel() for parameter in self.parameters])

    def use(self, flat):
        """The model's parameters become views of the flat memory."""
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.data = view.view_as(parameter)

    def shard(self, flat, rank=None):
        rank = self.comm.rank if rank is None else rank
        return flat[rank * self.length : (rank + 1) * self.length]

    def prepare(self):
        self.own = nn.Parameter(self.shard(self.flat))
        self.adam = torch.optim.AdamW([self.own], **self.settings)

    def gradients(self):
        return self.filled(parameter.grad for parameter in self.parameters)

    def reduce(self, gradients):
        return self.comm.reduce_scatter(torch.empty_like(self.own), gradients, op="mean")

    def gather(self):
        self.comm.all_gather(self.flat, self.shard(self.flat))

    def step(self):
        self.own.grad = self.reduce(self.gradients())
        self.adam.step()
        self.gather()


class WholeStates(Right):
    """Data parallelism: as many bytes on the wire, the same values, and the states N times over."""

    def prepare(self):
        self.adam = torch.optim.AdamW(self.parameters, **self.settings)

    def step(self):
        flat = self.comm.all_reduce(self.gradients(), op="mean", algorithm="ring")
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.grad = view.view_as(parameter)
        self.adam.step()


class ByHand(Right):
    """Right: Adam written out, with moments of this rank's shard."""

    def prepare(self):
        self.own = self.shard(self.flat)
        self.first, self.second = self.moments()
        self.steps = 0

    def moments(self):
        return torch.zeros_like(self.own), torch.zeros_like(self.own)

    def own_moments(self):
        return self.first, self.second

    def step(self):
        gradient = self.reduce(self.gradients())
        (beta1, beta2), lr = self.settings["betas"], self.settings["lr"]
        self.steps += 1
        first, second = self.own_moments()
        first.lerp_(gradient, 1 - beta1)
        second.lerp_(gradient**2, 1 - beta2)
        self.own.mul_(1 - lr * self.settings["weight_decay"])
        root = (second / (1 - beta2**self.steps)).sqrt() + self.settings["eps"]
        self.own -= lr * first / (1 - beta1**self.steps) / root
        self.gather()


class StatesOfFullLength(ByHand):
    """Allocated for all parameters, used for this rank's shard: the rest is zero, and is held all the same."""

    def moments(self):
        return torch.zeros_like(self.flat), torch.zeros_like(self.flat)

    def own_moments(self):
        return self.shard(self.first), self.shard(self.second)


class StatesGathered(ByHand):
    """Every rank keeps a copy of all moments on the class, after the update."""

    everything = ()

    def gather(self):
        super().gather()
        StatesGathered.everything = [
            self.comm.all_gather(torch.empty_like(self.flat), moment) for moment in (self.first, self.second)
        ]


class StatesHidden(WholeStates):
    """Whole states, in a closure instead of on the object."""

    def prepare(self):
        adam = torch.optim.AdamW(self.parameters, **self.settings)
        self.update = lambda: adam.step()

    @property
    def adam(self):
        return self

    def step(self):
        flat = self.comm.all_reduce(self.gradients(), op="mean", algorithm="ring")
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.grad = view.view_as(parameter)
        self.update()


class ReducesEverything(Right):
    """An all-reduce, of which one shard is used."""

    def reduce(self, gradients):
        return self.shard(self.comm.all_reduce(gradients, op="mean", algorithm="ring")).clone()


class GathersByAllReduce(Right):
    """An all-gather as a sum with zeros: right values, twice the bytes."""

    def gather(self):
        with torch.no_grad():
            others = torch.zeros_like(self.flat)
            self.shard(others).copy_(self.own)
            self.flat.copy_(self.comm.all_reduce(others, algorithm="ring"))


class ReducesChunks(Right):
    """Each shard is reduced for everybody, one after the other."""

    def reduce(self, gradients):
        for rank in range(self.comm.size):
            self.comm.all_reduce(self.shard(gradients, rank), op="mean", algorithm="ring")
        return self.shard(gradients).clone()


class SumOfGradients(Right):
    def reduce(self, gradients):
        return self.comm.reduce_scatter(torch.empty_like(self.own), gradients)


class DividedTwice(Right):
    def reduce(self, gradients):
        return super().reduce(gradients) / self.comm.size


class OwnGradientsOnly(Right):
    """Nothing is reduced: each shard follows the samples of one rank."""

    def reduce(self, gradients):
        return self.shard(gradients).clone()


class NotGathered(Right):
    def gather(self):
        pass


class NotCopiedBack(Right):
    """The flat memory is updated, and the model does not use it."""

    def use(self, flat):
        pass


class TailForgotten(Right):
    """Shards are rounded down: the last parameters belong to nobody."""

    def length_of_a_shard(self):
        return self.count // self.comm.size

    def use(self, flat):
        pass

    def gather(self):
        super().gather()
        room = len(self.flat)
        values = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        values[:room] = self.flat
        for parameter, view in zip(self.parameters, self.views(values), strict=True):
            parameter.data.copy_(view.view_as(parameter))


class PaddingCounted(Right):
    """Padding lies in front of the gradients and behind the values: every gradient meets another parameter."""

    def gradients(self):
        gradients = super().gradients()
        return gradients.roll(len(gradients) - self.count)


class OnlyDivides(Right):
    """Nobody has thought of a remainder."""

    def filled(self, tensors):
        return torch.cat([tensor.flatten() for tensor in tensors])


class NewStatesEachStep(Right):
    def step(self):
        self.adam = torch.optim.AdamW([self.own], **self.settings)
        super().step()


class GradientsAddUp(Right):
    """One flat memory for gradients, which is never cleared."""

    memory = None

    def gradients(self):
        gradients = super().gradients()
        self.memory = gradients if self.memory is None else self.memory + gradients
        return self.memory


class GradientsKept(Right):
    """One flat memory for gradients, made once, which stays."""

    memory = None

    def gradients(self):
        self.memory = super().gradients()
        return self.memory


class ShardKeepsTheWhole(Right):
    """The gradient of the shard is a view of all gradients."""

    def reduce(self, gradients):
        return self.comm.reduce_scatter(self.shard(gradients), gradients, op="mean")


class SettingsForgotten(Right):
    def prepare(self):
        self.own = nn.Parameter(self.shard(self.flat))
        self.adam = torch.optim.AdamW([self.own], lr=self.settings["lr"])


class WeightDecayForgotten(Right):
    def prepare(self):
        self.own = nn.Parameter(self.shard(self.flat))
        self.settings.pop("weight_decay")
        self.adam = torch.optim.AdamW([self.own], **self.settings)


class AdamNotAdamW(Right):
    def prepare(self):
        self.own = nn.Parameter(self.shard(self.flat))
        self.adam = torch.optim.Adam([self.own], **self.settings)


class OnlyRank0Steps(Right):
    def step(self):
        if self.comm.rank == 0:
            super().step()


class GradientsZeroed(Right):
    """One flat memory for gradients, with zeros between two steps."""

    def gradients(self):
        self.memory = super().gradients()
        return self.memory

    def step(self):
        super().step()
        self.memory.zero_()


class ModelKeepsItsMemory(Right):
    """The flat memory is a copy, beside what the model uses."""

    def use(self, flat):
        pass

    def gather(self):
        super().gather()
        for parameter, view in zip(self.parameters, self.views(self.flat), strict=True):
            parameter.data.copy_(view.view_as(parameter))


class FlatCopyEachStep(Right):
    """Made anew in each step, and kept until the next."""

    def step(self):
        super().step()
        self.last = torch.cat([parameter.detach().flatten() for parameter in self.parameters])


class OldParametersKept(Right):
    """The tensors that the flat memory was copied from."""

    def use(self, flat):
        self.before = [parameter.data for parameter in self.parameters]
        super().use(flat)


class FirstValuesCloned(OldParametersKept):
    def use(self, flat):
        super().use(flat)
        self.before = [value.clone() for value in self.before]


class GradientsAsArray(Right):
    def gradients(self):
        gradients = super().gradients()
        self.for_later = gradients.numpy().copy()
        return gradients


class GradientsAsBytes(Right):
    """On the class, where no attribute of the object shows them."""

    def gradients(self):
        gradients = super().gradients()
        GradientsAsBytes.for_later = gradients.numpy().tobytes()
        return gradients


class GradientsAsList(Right):
    def gradients(self):
        gradients = super().gradients()
        values = gradients.tolist()
        self.norm = lambda: max(values)
        return gradients


class ParametersAsLists(Right):
    def use(self, flat):
        super().use(flat)
        self.before = [parameter.flatten().tolist() for parameter in self.parameters]


class StatesAsArrays(ByHand):
    """All moments, gathered as arrays as long as if they were gathered."""

    def gather(self):
        super().gather()
        self.all_moments = [moment.numpy().repeat(self.comm.size) for moment in (self.first, self.second)]


class Thirds(Right):
    """Right on three ranks alone."""

    def length_of_a_shard(self):
        return -(-self.count // 3)


class GradientsClearedFirst(Right):
    def gradients(self):
        return super().gradients().zero_()


class GathersHalves(Right):
    """The shard is updated in float64, and travels in bfloat16."""

    def gather(self):
        whole = torch.empty_like(self.flat, dtype=torch.bfloat16)
        self.flat.copy_(self.comm.all_gather(whole, self.shard(self.flat).bfloat16()))


class RateSharedOut(Right):
    def prepare(self):
        self.settings["lr"] /= self.comm.size
        super().prepare()


class Uphill(Right):
    def prepare(self):
        self.settings["maximize"] = True
        super().prepare()


class WithAmsgrad(Right):
    def prepare(self):
        self.settings["amsgrad"] = True
        super().prepare()


WRONG = {
    "sharded-adam": {
        WholeStates: "whole-states",
        StatesOfFullLength: "whole-states",
        StatesGathered: "whole-states",
        StatesHidden: "whole-states",
        ReducesEverything: "too-many-bytes",
        GathersByAllReduce: "too-many-bytes",
        ReducesChunks: "too-many-bytes",
        SumOfGradients: "not-divided",
        DividedTwice: "divided-twice",
        OwnGradientsOnly: "not-averaged",
        NotGathered: "not-gathered",
        NotCopiedBack: "not-copied-back",
        TailForgotten: "tail-forgotten",
        PaddingCounted: "padding",
        OnlyDivides: "only-divides",
        NewStatesEachStep: "second-step",
        GradientsAddUp: "second-step",
        GradientsKept: "gradients-kept",
        ShardKeepsTheWhole: "gradients-kept",
        SettingsForgotten: "settings-lost",
        WeightDecayForgotten: "settings-lost",
        AdamNotAdamW: "other-optimizer",
        GradientsClearedFirst: "no-gradient",
        GathersHalves: "rounded",
        RateSharedOut: "other-rate",
        Uphill: "settings-added",
        WithAmsgrad: "settings-added",
        OnlyRank0Steps: "waited",
        GradientsZeroed: "zeroed-not-freed",
        ModelKeepsItsMemory: "parameters-twice",
        FlatCopyEachStep: "parameters-twice",
        OldParametersKept: "old-parameters-kept",
        FirstValuesCloned: "old-parameters-kept",
        GradientsAsArray: "gradients-kept",
        GradientsAsBytes: "gradients-kept",
        GradientsAsList: "gradients-kept",
        ParametersAsLists: "old-parameters-kept",
        StatesAsArrays: "whole-states",
        Thirds: "other-size",
    },
}
