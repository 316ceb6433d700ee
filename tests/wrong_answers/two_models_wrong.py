"""Lesson 10: configs that do not fit, batches dealt out wrongly, workloads that are not what they say."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dtlib.workloads import digits
from dtlib.workloads.workload import Workload


def config(stage=0, micro=8, **more):
    return {
        "train_batch_size": 96, "train_micro_batch_size_per_gpu": micro, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, **more,
    }  # fmt: skip


HALF = {"bf16": {"enabled": True}}


def whole_batch(step, batch, rank, ranks):
    return range(step * batch, (step + 1) * batch)


def batch_for_each(step, batch, rank, ranks):
    first = (step * ranks + rank) * batch
    return range(first, first + batch)


def neighbours_too(step, batch, rank, ranks):
    size = -(-batch // ranks)
    first = step * batch + rank * size
    return range(first, min(first + size + 1, (step + 1) * batch))


def rest_left_out(step, batch, rank, ranks):
    size = batch // ranks
    first = step * batch + rank * size
    return range(first, first + size)


def every_third(step, batch, rank, ranks):
    return range(step * batch + rank, (step + 1) * batch, 3)


def in_a_row(step, batch, rank, ranks):
    first, last = batch * rank // ranks, batch * (rank + 1) // ranks
    return range(step * batch + first, step * batch + last)


def a_workload(loss_fn=cross_entropy, wide=10, shuffled=False, of_own_slice=False, kind=Workload):
    def my_workload(config):
        (x, y), (test_x, test_y) = digits.split()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, wide))

        def evaluate(model, comm):
            mine = slice(comm.rank, None, comm.size)
            with torch.no_grad():
                right = (model(test_x[mine]).argmax(1) == test_y[mine]).sum()
            if of_own_slice:
                return {"accuracy": right.item() / len(test_y[mine])}
            return {"accuracy": comm.all_reduce(right).item() / len(test_y)}

        pairs = torch.utils.data.TensorDataset
        if shuffled:
            y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
        return kind(
            name="mine", model=model, layers=[], seed=0, train=pairs(x, y), test=pairs(test_x, test_y), collate=None,
            loss_fn=loss_fn, evaluate=evaluate,
        )  # fmt: skip

    return my_workload


def summed(outputs, targets):
    return cross_entropy(outputs, targets, reduction="sum")


NAMED = {
    "fits-200-mb": {
        "stage 0": (config(), "too-much"),
        "stage 1 in float32": (config(1), "too-much"),
        "stage 2 in float32": (config(2), "sends-more"),
        "stage 3": (config(3), "sends-more"),
        "a smaller batch": ({**config(1, **HALF), "train_batch_size": 48}, "another-training"),
        "all at once": (config(2, micro=32), "another-training"),
        "does not multiply out": (config(1, micro=7, **HALF), "refused"),
    },
    "slower-mend": {
        "the whole batch": (whole_batch, "whole-batch"),
        "a batch for each rank": (batch_for_each, "other-places"),
        "one place too many": (neighbours_too, "twice"),
        "the rest is left out": (rest_left_out, "left-out"),
        "three is written into it": (every_third, "other-size"),
    },
    "wrap-a-model": {
        "a dictionary": (a_workload(kind=dict), "no-workload"),
        "eleven scores": (a_workload(wide=11), "shape"),
        "a sum": (a_workload(summed), "no-mean"),
        "accuracy of its own slice": (a_workload(of_own_slice=True), "accuracy"),
        "labels of others": (a_workload(shuffled=True), "does-not-learn"),
    },
}
RIGHT = {
    "fits-200-mb": [config(1, **HALF), config(1, fp16={"enabled": True}), config(1, 4, **HALF)],
    "slower-mend": [in_a_row],
    "wrap-a-model": [a_workload()],
}
