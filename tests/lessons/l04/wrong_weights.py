"""Plausible wrong losses for an uneven batch, and the mistake that the check must recognise in each."""

import torch
from torch.nn.functional import cross_entropy


def summed(model, images, labels):
    return cross_entropy(model(images), labels, reduction="sum")


def total_of(comm, images, op="sum"):
    return comm.all_reduce(torch.tensor(float(len(images))), op=op).item()


def as_it_was(comm, model, images, labels):
    return cross_entropy(model(images), labels)


def forgets_the_average(comm, model, images, labels):
    return summed(model, images, labels) / total_of(comm, images)


def mean_of_none(comm, model, images, labels):
    """Right, unless a rank has no image."""
    return cross_entropy(model(images), labels) * comm.size * len(images) / total_of(comm, images)


def sum_alone(comm, model, images, labels):
    return summed(model, images, labels)


def sum_times_ranks(comm, model, images, labels):
    return summed(model, images, labels) * comm.size


def upside_down(comm, model, images, labels):
    total = total_of(comm, images)
    return cross_entropy(model(images), labels) * total / (comm.size * len(images)) if len(images) else 0


def over_the_largest(comm, model, images, labels):
    return summed(model, images, labels) / total_of(comm, images, "max")


def divides_by_ranks(comm, model, images, labels):
    return summed(model, images, labels) / total_of(comm, images) / comm.size


def four_ranks(comm, model, images, labels):
    """The number of ranks is written into it."""
    return summed(model, images, labels) * 3 / total_of(comm, images)


def equal_slices(comm, model, images, labels):
    """Every rank is taken to have as many."""
    return summed(model, images, labels) / max(1, len(images))


class Remembers:
    """The images of all ranks, as they were in the first batch."""

    def __init__(self):
        self.total = None

    def __call__(self, comm, model, images, labels):
        self.total = self.total or total_of(comm, images)
        return summed(model, images, labels) * comm.size / self.total


def remembers(comm):
    return Remembers()


def skips_without_images(comm, model, images, labels):
    total = total_of(comm, images)
    if not len(images):
        return torch.tensor(0.0)
    return summed(model, images, labels) * comm.size / total


def counts_ranks_with_images(comm, model, images, labels):
    total, ranks = total_of(comm, images), comm.all_reduce(torch.tensor(float(len(images) > 0))).item()
    return summed(model, images, labels) * ranks / total


def returns_a_number(comm, model, images, labels):
    return summed(model, images, labels).item() * comm.size / total_of(comm, images)


def returns_none(comm, model, images, labels):
    (summed(model, images, labels) * comm.size / total_of(comm, images)).backward()


def weight_squared(comm, model, images, labels):
    weight = comm.size * len(images) / total_of(comm, images)
    return weight * summed(model, images, labels) * comm.size / total_of(comm, images)


def decays_weights(comm, model, images, labels):
    decay = sum(parameter.square().sum() for parameter in model.parameters())
    return summed(model, images, labels) * comm.size / total_of(comm, images) + 0.01 * decay


def whole_numbers(comm, model, images, labels):
    return summed(model, images, labels) * (comm.size * len(images) // total_of(comm, images)) / max(1, len(images))


def ranks_are_counted_by_hand(comm, model, images, labels):
    """As if rank r had r + 1 images, as in the cell below the exercise."""
    total = sum(range(1, comm.size + 1))
    return summed(model, images, labels) / max(1, len(images)) * comm.size * (comm.rank + 1) / total


def at_least_one_image(comm, model, images, labels):
    total = comm.all_reduce(torch.tensor(float(max(1, len(images))))).item()
    return summed(model, images, labels) * comm.size / total


def own_images_alone(comm, model, images, labels):
    """Takes a rank's images for all images."""
    return summed(model, images, labels) / max(1, comm.size * len(images))


def smooths_labels(comm, model, images, labels):
    loss = cross_entropy(model(images), labels, reduction="sum", label_smoothing=0.1)
    return loss * comm.size / total_of(comm, images)


def one_loss_an_image(comm, model, images, labels):
    return cross_entropy(model(images), labels, reduction="none") * comm.size / total_of(comm, images)


def divides_by_most(comm, model, images, labels):
    return summed(model, images, labels) * comm.size / total_of(comm, images, "max")


def averages_the_loss(comm, model, images, labels):
    """The value is right, and has no graph."""
    return comm.all_reduce(summed(model, images, labels).detach()) / total_of(comm, images)


def skips_the_sum_without_images(comm, model, images, labels):
    if not len(images):
        return model(images).sum()
    return summed(model, images, labels) * comm.size / total_of(comm, images)


def zero_beside_the_model(comm, model, images, labels):
    """It has a graph, in which no parameter of the model has a part: torch's DDP would send nothing."""
    total = total_of(comm, images)
    return summed(model, images, labels) * comm.size / total if len(images) else torch.zeros((), requires_grad=True)


def mean_in_whole_numbers(comm, model, images, labels):
    return summed(model, images, labels) / (total_of(comm, images) // comm.size)


def weight_of_the_others(comm, model, images, labels):
    total = total_of(comm, images)
    weight = comm.size * (total - len(images)) / total / (comm.size - 1)
    return summed(model, images, labels) / max(1, len(images)) * weight


WRONG = {
    "weight-the-batch": {
        as_it_was: "unweighted",
        equal_slices: "unweighted",
        forgets_the_average: "average-forgotten",
        mean_of_none: "nan-of-none",
        sum_alone: "not-divided",
        sum_times_ranks: "not-divided",
        upside_down: "upside-down",
        over_the_largest: "largest",
        divides_by_ranks: "scaled",
        four_ranks: "other-size",
        skips_without_images: "no-graph",
        counts_ranks_with_images: "ranks-with-images",
        returns_a_number: "type",
        returns_none: "type",
        whole_numbers: "other-weights",
        ranks_are_counted_by_hand: "other-weights",
        at_least_one_image: "ranks-with-images",
        own_images_alone: "unweighted",
        smooths_labels: "other-values",
        one_loss_an_image: "type",
        divides_by_most: "largest",
        zero_beside_the_model: "no-graph",
        mean_in_whole_numbers: "whole-number-mean",
        averages_the_loss: "no-graph",
        skips_the_sum_without_images: "waited",
        weight_of_the_others: "other-weights",
        weight_squared: "other-weights",
        decays_weights: "other-values",
    },
}
MADE = {"weight-the-batch": {remembers: "weight-remembered"}}
