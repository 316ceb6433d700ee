"""Answers that are right on three ranks, as the number three is written into them."""

import torch
from torch import nn

from dtlib import pi
from tests.wrong_answers import (
    buckets_wrong,
    data_parallel_wrong,
    mlp_wrong,
    pipelines_wrong,
    replicator_wrong,
    tensor_wrong,
    zero3_wrong,
)
from tests.wrong_answers.collectives_wrong import ring


def count_a_third(points, comm):
    return pi.count_compiled(points * comm.rank // 3, points * (comm.rank + 1) // 3)


def estimate_by_thirds(points, comm):
    inside = torch.tensor([count_a_third(points, comm)])
    return 4 * comm.all_reduce(inside).item() / points


def ring_in_three_chunks(comm, tensor):
    return ring(comm, tensor, torch.tensor_split(tensor, 3))


def hooks_divide_by_three(comm, module):
    def act(parameter):
        comm.all_reduce(parameter.grad)
        parameter.grad /= 3

    return data_parallel_wrong.with_hooks(comm, module, act)


def hooks_on_the_world(comm, module):
    """Not on the ranks that it was given."""
    import dtlib

    everywhere = dtlib.init().comm
    return data_parallel_wrong.with_hooks(comm, module, lambda p: everywhere.all_reduce(p.grad, op="mean"))


class MeanOfThree(buckets_wrong.Right):
    def weight(self, samples):
        return super().weight(samples) * 3

    def reduce(self, flat):
        self.comm.all_reduce(flat, op="mean")


class AThirdOfTheLayer(zero3_wrong.RightLayer):
    def cut(self, padded):
        third = len(padded) // 3
        return padded[self.comm.rank * third : (self.comm.rank + 1) * third].clone()

    def gather(self):
        whole = torch.empty(len(self.own) * self.comm.size, dtype=self.own.dtype)
        return self.comm.all_gather(whole, self.own)


class AThirdOfTheFeatures(mlp_wrong.RightMLP):
    def __init__(self, linear1, linear2, comm):
        super().__init__(linear1, linear2, comm)
        for name, whole, dim in (
            ("weight1", linear1.weight, 0),
            ("bias1", linear1.bias, 0),
            ("weight2", linear2.weight, 1),
        ):
            setattr(self, name, nn.Parameter(whole.detach().chunk(3, dim)[comm.rank].clone()))


class AThirdOfTheRow(tensor_wrong.RightRow):
    def __init__(self, whole, comm):
        super().__init__(whole, comm)
        self.weight = nn.Parameter(whole.weight.detach().chunk(3, 1)[comm.rank].clone())


def step_of_three_replicas(replicator, model):
    """The mean of accuracies by a number."""

    def metric(right, x, y):
        return replicator.map_reduce(right) / 3

    return replicator_wrong.built(replicator, model, metric=metric)


class LastIsRank2(pipelines_wrong.Step):
    def run(self, count):
        self.last = self.comm.rank == 2
        super().run(count)


class WarmsUpForThree(pipelines_wrong.Right1F1B):
    """One forward pass more in hand than two ranks need."""

    def run(self, count):
        ahead = min(2 - self.comm.rank, count)
        for m in range(ahead):
            self.forward(m)
        for m in range(count):
            if m + ahead < count:
                self.forward(m + ahead)
            self.backward(m)


WRONG = {
    count_a_third: "pi-streams",
    estimate_by_thirds: "pi-on-ranks",
    ring_in_three_chunks: "ring-build",
    hooks_divide_by_three: "hook-mend",
    hooks_on_the_world: "hook-mend",
    MeanOfThree: "buckets-build",
    AThirdOfTheLayer: "gather-on-demand",
    AThirdOfTheFeatures: "mlp-build",
    AThirdOfTheRow: "row-mend",
    step_of_three_replicas: "step-build",
    LastIsRank2: "gpipe-build",
    WarmsUpForThree: "1f1b-build",
}
