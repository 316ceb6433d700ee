"""Plausible wrong buckets of gradients, and the mistake that the check must recognise in each."""

import torch

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
            for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad.copy_(piece.view_as(parameter))

    def reduce(self, flat):
        self.comm.all_reduce(flat)


class NoDivision(Right):
    def weight(self, samples):
        return 1


class WeightedButNotDivided(Right):
    def weight(self, samples):
        return samples


class WeightedByTheMean(Right):
    """Not by the sum of all ranks' samples."""

    def weight(self, samples):
        mean = torch.tensor(float(samples), dtype=torch.float64)
        return samples / self.comm.all_reduce(mean, op="mean").item()


class DividedTwice(Right):
    def reduce(self, flat):
        self.comm.all_reduce(flat, op="mean")


class ParameterReduced(Right):
    def average_gradients(self, samples):
        for bucket in self.buckets():
            flat = torch.cat([parameter.data.flatten() for parameter in bucket])
            self.comm.all_reduce(flat, op="mean")
            for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.data.copy_(piece.view_as(parameter))


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
            for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad.copy_(piece.view_as(parameter))


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


class WeightRemembered(Right):
    """Asked for once: right as long as batches stay as they were."""

    def weight(self, samples):
        if not hasattr(self, "first_weight"):
            self.first_weight = super().weight(samples)
        return self.first_weight


class TotalRemembered(Right):
    """The own samples are looked up each time, those of all ranks once."""

    def weight(self, samples):
        if not hasattr(self, "total"):
            self.total = samples / super().weight(samples)
        return samples / self.total


class ClosedAfterItOverflows(Right):
    def buckets(self):
        bucket = []
        for parameter in self.parameters():
            bucket.append(parameter)
            if sum(p.nbytes for p in bucket) > self.bucket_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


class ClosedBeforeItIsFull(Right):
    def buckets(self):
        bucket = []
        for parameter in self.parameters():
            if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes >= self.bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


class LargeOnesJoin(Right):
    """What is larger than a bucket goes into the one that is open."""

    def buckets(self):
        bucket = []
        for parameter in self.parameters():
            filled = sum(p.nbytes for p in bucket)
            if bucket and parameter.nbytes <= self.bucket_bytes < filled + parameter.nbytes:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


class FlatInSinglePrecision(Right):
    """torch.zeros without a type."""

    def reduce(self, flat):
        single = torch.zeros(len(flat))
        single.copy_(flat)
        flat.copy_(self.comm.all_reduce(single))


class OneMessageEach(Right):
    def buckets(self):
        return [[parameter] for parameter in self.parameters()]


class NumbersForBytes(Right):
    def buckets(self):
        bucket = []
        for parameter in self.parameters():
            if bucket and sum(p.numel() for p in bucket) + parameter.numel() > self.bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


class OneBucket(Right):
    def buckets(self):
        return [self.parameters()]


class NobodyWaits(Right):
    def reduce(self, flat):
        self.comm.all_reduce(flat, async_op=True)


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
            for gradient, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))


class Halves(Right):
    """Half the bytes, and a gradient that is rounded: right for byte golf, not here."""

    def reduce(self, flat):
        flat.copy_(self.comm.all_reduce(flat.half()))


class ReducedToRank0(Right):
    def reduce(self, flat):
        self.comm.reduce(flat, root=0)


class Broadcast(Right):
    def weight(self, samples):
        return 1

    def reduce(self, flat):
        self.comm.broadcast(flat)


class OnlyRank0Reduces(Right):
    def reduce(self, flat):
        if self.comm.rank == 0:
            self.comm.all_reduce(flat)


class LastBucketForgotten(Right):
    def buckets(self):
        return list(super().buckets())[:-1]


class LargeOnesSkipped(Right):
    def parameters(self):
        return [parameter for parameter in super().parameters() if parameter.nbytes <= self.bucket_bytes]


class WeightRounded(Right):
    def weight(self, samples):
        return round(super().weight(samples), 2)


class CountsAsOneSample(Right):
    def weight(self, samples):
        return super().weight(samples) / samples


class BroadcastFromTheLast(Right):
    """All ranks have the same, and not rank 0's."""

    def broadcast(self):
        for tensor in super().broadcast():
            self.comm.broadcast(tensor, root=self.comm.size - 1)
        return []


class StateDictBroadcast(Right):
    """A buffer need not be in the state_dict()."""

    def broadcast(self):
        return list(self.module.state_dict().values())


class MeanOfThree(Right):
    def weight(self, samples):
        return super().weight(samples) * 3

    def reduce(self, flat):
        self.comm.all_reduce(flat, op="mean")


WRONG = {
    "buckets-build": {
        NoDivision: "not-divided",
        WeightedButNotDivided: "not-divided",
        WeightedByTheMean: "not-divided",
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
        NumbersForBytes: "one-bucket",
        NobodyWaits: "not-waited",
        NotCopiedBack: "not-averaged",
        ZerosForUnused: "unused",
        FrozenTravelsToo: "bytes",
        FirstStepRemembered: "second-step",
        Halves: "rounded",
        FlatInSinglePrecision: "rounded",
        WeightRemembered: "weight-remembered",
        TotalRemembered: "weight-remembered",
        ClosedAfterItOverflows: "overfull",
        ClosedBeforeItIsFull: "full-bucket",
        LargeOnesJoin: "large-not-alone",
        OnlyRank0Reduces: "waited",
        ReducedToRank0: "only-root",
        Broadcast: "one-rank's",
        LastBucketForgotten: "left-out",
        LargeOnesSkipped: "left-out",
        WeightRounded: "scaled",
        CountsAsOneSample: "scaled",
        BroadcastFromTheLast: "other-root",
        StateDictBroadcast: "buffers-not-broadcast",
        MeanOfThree: "other-size",
    },
}
