"""Lesson 10: configs that do not fit, batches dealt out wrongly, workloads that are not what they say."""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dtlib
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


def last_takes_all(step, batch, rank, ranks):
    """Each place once, and no faster."""
    return range(step * batch, (step + 1) * batch) if rank == ranks - 1 else []


def first_step_for_ever(step, batch, rank, ranks):
    return range(rank, batch, ranks)


def a_slice(step, batch, rank, ranks):
    return slice(step * batch + rank, (step + 1) * batch, ranks)


def right_among(model, images, labels):
    with torch.no_grad():
        return (model(images).argmax(1) == labels).sum()


def shared(model, comm, x, y):
    mine = slice(comm.rank, None, comm.size)
    return {"accuracy": comm.all_reduce(right_among(model, x[mine], y[mine])).item() / len(y)}


def of_own_slice(model, comm, x, y):
    mine = slice(comm.rank, None, comm.size)
    return {"accuracy": right_among(model, x[mine], y[mine]).item() / len(y[mine])}


def on_the_whole(model, comm, x, y):
    return {"accuracy": right_among(model, x, y).item() / len(y)}


def whole_and_added_up(model, comm, x, y):
    return {"accuracy": comm.all_reduce(right_among(model, x, y)).item() / len(y)}


def without_the_rest(model, comm, x, y):
    """357 divides by three ranks, and not by two."""
    each = len(x) // comm.size
    mine = slice(comm.rank * each, (comm.rank + 1) * each)
    return {"accuracy": comm.all_reduce(right_among(model, x[mine], y[mine])).item() / (each * comm.size)}


def mean_of_ranks(model, comm, x, y):
    mine = slice(comm.rank, None, comm.size)
    own = right_among(model, x[mine], y[mine]) / len(y[mine])
    return {"accuracy": comm.all_reduce(own, op="mean").item()}


def in_percent(model, comm, x, y):
    return {"accuracy": 100 * shared(model, comm, x, y)["accuracy"]}


def on_the_world(model, comm, x, y):
    return shared(model, dtlib.init().comm, x, y)


def a_number(model, comm, x, y):
    return shared(model, comm, x, y)["accuracy"]


def told_by_rank_0(model, comm, x, y):
    """Right: one rank looks, and tells the others."""
    return comm.broadcast_object(on_the_whole(model, comm, x, y) if comm.rank == 0 else None)


def in_batches(model, comm, x, y):
    """Right: batches are dealt out, the last of them short."""
    right = sum(
        right_among(model, x[at : at + 10], y[at : at + 10]) for at in range(10 * comm.rank, len(x), 10 * comm.size)
    )
    return {"accuracy": comm.all_reduce(torch.as_tensor(right)).item() / len(y)}


def of_the_first_hundred(model, comm, x, y):
    return shared(model, comm, x[:100], y[:100])


def second_best_counts(model, comm, x, y):
    with torch.no_grad():
        return {"accuracy": (model(x).topk(2).indices == y[:, None]).any(1).double().mean().item()}


def forgetful():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


def small(wide=10):
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, wide))


def convolutional():
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))


def a_workload(
    loss_fn=cross_entropy, make=small, labels=lambda y: y, evaluated=shared, kind=Workload, seed=lambda: 0, own=False,
    tested="test", asked="test", images=lambda x: x, taken=lambda: slice(None),
):  # fmt: skip
    """``own``: ``evaluate`` asks the model of the workload, and not the one that it is given."""

    def my_workload(config):
        data = {key: (images(x), y) for key, (x, y) in zip(("train", "test"), digits.split(), strict=True)}
        if seed() is not None:
            torch.manual_seed(seed())
        mine = make()

        def evaluate(model, comm):
            return evaluated(mine if own else model, comm, *data[asked])

        x, y = (tensor[taken()] for tensor in data["train"])
        return kind(
            name="mine", model=mine, layers=[], seed=0, train=TensorDataset(x, labels(y)),
            test=TensorDataset(*data[tested]), collate=None, loss_fn=loss_fn, evaluate=evaluate,
        )  # fmt: skip

    return my_workload


def shuffled(y):
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]


def own_rank():
    return dtlib.init().rank


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
    "slower-fix": {
        "the whole batch": (whole_batch, "whole-batch"),
        "a batch for each rank": (batch_for_each, "other-places"),
        "one place too many": (neighbours_too, "twice"),
        "the rest is left out": (rest_left_out, "left-out"),
        "the last takes all": (last_takes_all, "uneven"),
        "the first step for ever": (first_step_for_ever, "not-of-this-step"),
        "a slice": (a_slice, "type"),
        "three is written into it": (every_third, "other-size"),
    },
    "wrap-a-model": {
        "a dictionary": (a_workload(kind=dict), "no-workload"),
        "no evaluate": (a_workload(kind=lambda **parts: Workload(**parts | {"evaluate": None})), "incomplete"),
        "a function for a model": (a_workload(make=lambda: lambda x: x[:, :10]), "incomplete"),
        "eleven scores": (a_workload(make=lambda: small(11)), "shape"),
        "a seed for each rank": (a_workload(seed=own_rank, evaluated=on_the_whole), "other-parameters"),
        "no seed": (a_workload(seed=lambda: None), "other-parameters"),
        "a sum": (a_workload(summed), "no-mean"),
        "a loss for each sample": (a_workload(partial(cross_entropy, reduction="none")), "no-mean"),
        "a loss of outputs alone": (a_workload(lambda out, y: cross_entropy(out, out.argmax(1))), "ignores-targets"),
        "tested on what it learns": (a_workload(tested="train", asked="train"), "tested-on-train"),
        "evaluates what it learns": (a_workload(asked="train"), "other-images"),
        "asks its own model": (a_workload(own=True), "ignores-model"),
        "accuracy of its own slice": (a_workload(evaluated=of_own_slice), "own-slice"),
        "the rest is left out": (a_workload(evaluated=without_the_rest), "left-out"),
        "the first hundred": (a_workload(evaluated=of_the_first_hundred), "left-out"),
        "second best counts": (a_workload(evaluated=second_best_counts), "second-best"),
        "dropout while it is judged": (a_workload(make=forgetful), "training-mode"),
        "a third of the mean": (a_workload(lambda out, y: cross_entropy(out, y) / 3), "scaled"),
        "the mean of ranks": (a_workload(evaluated=mean_of_ranks), "mean-of-means"),
        "all look, and add up": (a_workload(evaluated=whole_and_added_up), "added-up"),
        "in percent": (a_workload(evaluated=in_percent), "percent"),
        "on the world": (a_workload(evaluated=on_the_world), "world-comm"),
        "a number": (a_workload(evaluated=a_number), "no-accuracy"),
        "labels of others": (a_workload(labels=shuffled), "does-not-learn"),
        "logarithms wanted": (
            a_workload(nn.NLLLoss(), make=lambda: nn.Sequential(small(), nn.Softmax(1))),
            "negative-loss",
        ),
        "images of 8 x 8": (
            a_workload(images=lambda x: x.view(-1, 8, 8), make=lambda: nn.Sequential(nn.Flatten(), small())),
            "image-shape",
        ),
        "a part for each rank": (a_workload(taken=lambda: slice(own_rank(), None, 3)), "train-shared-out"),
        "softmax": (a_workload(make=lambda: nn.Sequential(small(), nn.Softmax(1))), "does-not-learn"),
        "labels from one": (a_workload(labels=lambda y: (y + 1) % 10), "learns-something-else"),
    },
}
RIGHT = {
    "fits-200-mb": [config(1, **HALF), config(1, fp16={"enabled": True}), config(1, 4, **HALF)],
    "slower-fix": [in_a_row],
    "wrap-a-model": [
        a_workload(),
        a_workload(make=convolutional, evaluated=in_batches),
        a_workload(evaluated=told_by_rank_0),
    ],
}
