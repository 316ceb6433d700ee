"""Plausible wrong answers to lesson 04, and the mistake that the check must recognise in each."""

import torch
from torch.nn.functional import cross_entropy

from dtlib.lab import digits

# mend: average_with_hooks(comm, module)


def with_hooks(comm, module, act, broadcast=lambda module: [*module.parameters(), *module.buffers()], hooked=None):
    """The right answer, with its pieces to turn: ``act(parameter)`` is called when a gradient has come."""

    def gradient_has_come(parameter):
        act(parameter)  # a hook returns nothing

    for tensor in broadcast(module):
        comm.broadcast(tensor)
    for parameter in hooked(module) if hooked else module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient_has_come)
    return module


def hooks_as_they_were(comm, module):
    """The planted bug: it is the parameter that travels."""
    return with_hooks(comm, module, lambda parameter: comm.all_reduce(parameter.data, op="mean"))


def hooks_reduce_both(comm, module):
    def act(parameter):
        comm.all_reduce(parameter.grad, op="mean")
        comm.all_reduce(parameter.data, op="mean")

    return with_hooks(comm, module, act)


def hooks_do_not_divide(comm, module):
    return with_hooks(comm, module, lambda parameter: comm.all_reduce(parameter.grad))


def hooks_divide_twice(comm, module):
    def act(parameter):
        comm.all_reduce(parameter.grad, op="mean")
        parameter.grad /= comm.size

    return with_hooks(comm, module, act)


def hooks_reduce_a_copy(comm, module):
    return with_hooks(comm, module, lambda parameter: comm.all_reduce(parameter.grad.clone(), op="mean"))


def hooks_without_broadcast(comm, module):
    return with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"), broadcast=lambda module: [])


def hooks_without_buffers(comm, module):
    return with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"), lambda module: module.parameters())


def hooks_without_frozen(comm, module):
    def trained(module):
        return [*(p for p in module.parameters() if p.requires_grad), *module.buffers()]

    return with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"), trained)


def hooks_on_both_names(comm, module):
    """Tied weights get two hooks, and are reduced twice."""

    def by_name(module):
        return [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]

    return with_hooks(comm, module, lambda p: comm.all_reduce(p.grad, op="mean"), hooked=by_name)


# build: MyDataParallel(comm, module, bucket_bytes) with average_gradients(samples)


class Right:
    """The right answer, in pieces that the wrong ones replace."""

    def __init__(self, comm, module, bucket_bytes):
        self.comm, self.module, self.bucket_bytes = comm, module, bucket_bytes
        for tensor in self.broadcast():
            comm.broadcast(tensor)

    def broadcast(self):
        return [*self.module.parameters(), *self.module.buffers()]

    def parameters(self):
        """In the order in which their gradients come."""
        return [parameter for parameter in list(self.module.parameters())[::-1] if parameter.grad is not None]

    def weight(self, samples):
        total = torch.tensor(float(samples), dtype=torch.float64)
        return samples / self.comm.all_reduce(total).item()

    def buckets(self):
        bucket = []
        for parameter in self.parameters():
            if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > self.bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket

    def average_gradients(self, samples):
        weight = self.weight(samples)
        for bucket in self.buckets():
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket]) * weight
            self.reduce(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad.copy_(part.view_as(parameter))

    def reduce(self, flat):
        self.comm.all_reduce(flat)


class NoDivision(Right):
    def weight(self, samples):
        return 1


class WeightedButNotDivided(Right):
    def weight(self, samples):
        return samples


class DividedTwice(Right):
    def reduce(self, flat):
        self.comm.all_reduce(flat, op="mean")


class ParameterReduced(Right):
    def average_gradients(self, samples):
        for bucket in self.buckets():
            flat = torch.cat([parameter.data.flatten() for parameter in bucket])
            self.comm.all_reduce(flat, op="mean")
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.data.copy_(part.view_as(parameter))


class TiedTwice(Right):
    """Collects layer by layer: a tied weight is in two of them."""

    def parameters(self):
        layers = [layer for layer in self.module.modules() if not list(layer.children())]
        return [p for layer in layers[::-1] for p in layer.parameters() if p.grad is not None]


class TiedWeightedTwice(TiedTwice):
    """And each time it is multiplied by the weight, in place."""

    def average_gradients(self, samples):
        weight = self.weight(samples)
        for parameter in self.parameters():
            parameter.grad *= weight
        for bucket in self.buckets():
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            self.comm.all_reduce(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad.copy_(part.view_as(parameter))


class BuffersNotBroadcast(Right):
    def broadcast(self):
        return list(self.module.parameters())


class FrozenNotBroadcast(Right):
    def broadcast(self):
        return [*(p for p in self.module.parameters() if p.requires_grad), *self.module.buffers()]


class NothingBroadcast(Right):
    def broadcast(self):
        return []


class Unweighted(Right):
    """The last partial batch counts as much as a whole one."""

    def weight(self, samples):
        return 1 / self.comm.size


class WeightedByTheLargest(Right):
    """Weights that do not add up to one as soon as a batch is smaller than the others."""

    def weight(self, samples):
        largest = torch.tensor(float(samples), dtype=torch.float64)
        return samples / self.comm.all_reduce(largest, op="max").item() / self.comm.size


class OneMessageEach(Right):
    def buckets(self):
        return [[parameter] for parameter in self.parameters()]


class OneBucket(Right):
    def buckets(self):
        return [self.parameters()]


class NotCopiedBack(Right):
    def average_gradients(self, samples):
        weight = self.weight(samples)
        for bucket in self.buckets():
            self.reduce(torch.cat([parameter.grad.flatten() for parameter in bucket]) * weight)


class ZerosForUnused(Right):
    def parameters(self):
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return list(self.module.parameters())[::-1]


class FrozenTravelsToo(Right):
    """Everything has a place in a bucket, used or not."""

    def average_gradients(self, samples):
        super().average_gradients(samples)
        rest = [parameter for parameter in self.module.parameters() if parameter.grad is None]
        if rest:
            self.comm.all_reduce(torch.cat([torch.zeros_like(parameter).flatten() for parameter in rest]))


class FirstStepRemembered(Right):
    """The gradients are looked up once; in the next step they are other tensors."""

    gradients = None

    def average_gradients(self, samples):
        weight = self.weight(samples)
        if self.gradients is None:
            self.gradients = [[parameter.grad for parameter in bucket] for bucket in self.buckets()]
        for bucket in self.gradients:
            flat = torch.cat([gradient.flatten() for gradient in bucket]) * weight
            self.reduce(flat)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))


class Halves(Right):
    """Half the bytes, and a gradient that is rounded: right for byte golf, not here."""

    def reduce(self, flat):
        flat.copy_(self.comm.all_reduce(flat.half()))


class OnlyRank0Reduces(Right):
    def reduce(self, flat):
        if self.comm.rank == 0:
            self.comm.all_reduce(flat)


# byte golf: golf(comm, x, y)


def golf_alone(comm, x, y):
    """No bytes at all; each rank knows its own digits."""
    net = digits.net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def golf_small_batches(comm, x, y):
    """As the stub does: many steps, all of them in float32."""
    net = digits.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(400):
        images = torch.arange(step * 32, step * 32 + 32) % len(x)
        images = torch.randperm(len(x), generator=torch.Generator().manual_seed(step // 15))[images]
        optimizer.zero_grad()
        cross_entropy(net(x[images]), y[images]).backward()
        for parameter in net.parameters():
            comm.all_reduce(parameter.grad, op="mean")
        optimizer.step()
    return net


def golf_only_rank_0(comm, x, y):
    """The best bytes go to rank 0 alone, and so does what is learnt."""
    net = digits.net(hidden=32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        for parameter in net.parameters():
            comm.reduce(parameter.grad, root=0)
        optimizer.step()
    return net


def golf_returns_nothing(comm, x, y):
    golf_alone(comm, x, y)


WRONG = {
    "hook-mend": {
        hooks_as_they_were: "parameter-reduced",
        hooks_reduce_both: "parameter-reduced",
        hooks_do_not_divide: "not-divided",
        hooks_divide_twice: "divided-twice",
        hooks_reduce_a_copy: "not-averaged",
        hooks_without_broadcast: "not-broadcast",
        hooks_without_buffers: "buffers-not-broadcast",
        hooks_without_frozen: "frozen-not-broadcast",
        hooks_on_both_names: "tied-twice",
    },
    "buckets-build": {
        NoDivision: "not-divided",
        WeightedButNotDivided: "not-divided",
        DividedTwice: "divided-twice",
        ParameterReduced: "parameter-reduced",
        TiedTwice: "tied-twice",
        TiedWeightedTwice: "tied-twice",
        BuffersNotBroadcast: "buffers-not-broadcast",
        FrozenNotBroadcast: "frozen-not-broadcast",
        NothingBroadcast: "not-broadcast",
        Unweighted: "unweighted",
        WeightedByTheLargest: "weights",
        OneMessageEach: "no-buckets",
        OneBucket: "one-bucket",
        NotCopiedBack: "not-averaged",
        ZerosForUnused: "unused",
        FrozenTravelsToo: "bytes",
        FirstStepRemembered: "second-step",
        Halves: "other-values",
        OnlyRank0Reduces: "waited",
    },
    "byte-golf": {
        golf_alone: "accuracy",
        golf_small_batches: "over-par",
        golf_only_rank_0: "accuracy",
        golf_returns_nothing: "type",
    },
}
