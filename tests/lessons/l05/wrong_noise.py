"""Plausible wrong answers to the noise scale of a gradient, and the mistake that the check must recognise in each."""

import torch
from torch import distributed as dist


def summed(comm, tensor):
    """A sum over ranks, in a new tensor."""
    total = tensor.detach().clone()
    dist.all_reduce(total, group=comm.group)
    return total


def lengths(comm, gradient):
    """The mean squared length of the ranks' gradients, and the squared length of their mean."""
    mean = summed(comm, gradient) / comm.size
    return summed(comm, gradient @ gradient) / comm.size, mean @ mean


def parts(small, large, b, B):
    """The squared length of the true gradient, and the noise."""
    return (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)


def ratio(small, large, b, B):
    true, noise = parts(small, large, b, B)
    return (noise / true).item()


def right(comm, gradient, samples):
    return ratio(*lengths(comm, gradient), samples, comm.size * samples)


def as_it_was(comm, gradient, samples):
    """The stub."""


def changes_the_gradient(comm, gradient, samples):
    own = summed(comm, gradient @ gradient) / comm.size
    dist.all_reduce(gradient, group=comm.group)
    gradient /= comm.size
    return ratio(own, gradient @ gradient, samples, comm.size * samples)


def own_length(comm, gradient, samples):
    return ratio(gradient @ gradient, lengths(comm, gradient)[1], samples, comm.size * samples)


def forgets_to_divide_the_gradient(comm, gradient, samples):
    small, large = lengths(comm, gradient)
    return ratio(small, comm.size**2 * large, samples, comm.size * samples)


def forgets_to_divide_the_lengths(comm, gradient, samples):
    small, large = lengths(comm, gradient)
    return ratio(comm.size * small, large, samples, comm.size * samples)


def divides_nothing(comm, gradient, samples):
    total = summed(comm, gradient)
    return ratio(summed(comm, gradient @ gradient), total @ total, samples, comm.size * samples)


def takes_norms(comm, gradient, samples):
    mean = summed(comm, gradient) / comm.size
    return ratio(summed(comm, gradient.norm()) / comm.size, mean.norm(), samples, comm.size * samples)


def squares_the_mean_norm(comm, gradient, samples):
    small = (summed(comm, gradient.norm()) / comm.size) ** 2
    return ratio(small, lengths(comm, gradient)[1], samples, comm.size * samples)


def counts_ranks(comm, gradient, samples):
    return ratio(*lengths(comm, gradient), 1, comm.size)


def takes_ranks_for_all_samples(comm, gradient, samples):
    return ratio(*lengths(comm, gradient), samples + 0.0, comm.size)


def swaps_sizes(comm, gradient, samples):
    return ratio(*lengths(comm, gradient), comm.size * samples, samples)


def swaps_lengths(comm, gradient, samples):
    small, large = lengths(comm, gradient)
    return ratio(large, small, samples, comm.size * samples)


def upside_down(comm, gradient, samples):
    return 1 / right(comm, gradient, samples)


def noise_alone(comm, gradient, samples):
    return parts(*lengths(comm, gradient), samples, comm.size * samples)[1].item()


def true_alone(comm, gradient, samples):
    return parts(*lengths(comm, gradient), samples, comm.size * samples)[0].item()


def over_the_mean_gradient(comm, gradient, samples):
    small, large = lengths(comm, gradient)
    return (parts(small, large, samples, comm.size * samples)[1] / large).item()


def over_a_ranks_gradient(comm, gradient, samples):
    small, large = lengths(comm, gradient)
    return (parts(small, large, samples, comm.size * samples)[1] / small).item()


def takes_a_root(comm, gradient, samples):
    return right(comm, gradient, samples) ** 0.5


def whole_samples(comm, gradient, samples):
    return round(right(comm, gradient, samples), 2)


def three_ranks(comm, gradient, samples):
    mean = summed(comm, gradient) / 3
    return ratio(summed(comm, gradient @ gradient) / 3, mean @ mean, samples, 3 * samples)


def a_tensor_for_each_element(comm, gradient, samples):
    mean = summed(comm, gradient) / comm.size
    true, noise = parts(summed(comm, gradient**2) / comm.size, mean**2, samples, comm.size * samples)
    return noise / true


def mean_over_elements_of_ratios(comm, gradient, samples):
    return a_tensor_for_each_element(comm, gradient, samples).mean().item()


def only_rank_0(comm, gradient, samples):
    found = right(comm, gradient, samples)
    return found if comm.rank == 0 else None


def reduces_on_rank_0(comm, gradient, samples):
    if comm.rank == 0:
        return right(comm, gradient, samples)
    return torch.zeros(()).item()


WRONG = {
    "noise-scale": {
        as_it_was: "type",
        changes_the_gradient: "gradient-changed",
        own_length: "own-length",
        forgets_to_divide_the_gradient: "sum-of-gradients",
        forgets_to_divide_the_lengths: "sum-of-lengths",
        divides_nothing: "sums",
        takes_norms: "not-squared",
        squares_the_mean_norm: "mean-of-roots",
        counts_ranks: "ranks-for-samples",
        takes_ranks_for_all_samples: "rank-for-all",
        swaps_sizes: "swapped",
        swaps_lengths: "swapped",
        upside_down: "upside-down",
        noise_alone: "noise-alone",
        true_alone: "true-alone",
        over_the_mean_gradient: "measured-for-true",
        over_a_ranks_gradient: "measured-for-true",
        takes_a_root: "root",
        whole_samples: "rounded",
        three_ranks: "other-size",
        a_tensor_for_each_element: "type",
        mean_over_elements_of_ratios: "other-number",
        only_rank_0: "type",
        reduces_on_rank_0: "waited",
    },
}
