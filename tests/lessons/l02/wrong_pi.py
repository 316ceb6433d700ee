"""Plausible wrong answers to lesson 02, and the mistake that the check must recognise in each."""

import numpy as np
import torch

from dtlib import pi

# fix: count_my_points(points, comm)


def same_points(points, comm):
    return pi.count_compiled(0, points // comm.size)


def another_seed_a_rank(points, comm):
    start, stop = pi.slice_of(points, comm.rank, comm.size)
    return pi.count_compiled(start, stop, seed=comm.rank)


def forgets_the_remainder(points, comm):
    count = points // comm.size
    return pi.count_compiled(comm.rank * count, (comm.rank + 1) * count)


def first_point_counted_twice(points, comm):
    start, stop = pi.slice_of(points, comm.rank, comm.size)
    return pi.count_compiled(max(0, start - 1), stop)


# build: estimate_pi(points, comm)


def everybody_does_everything(points, comm):
    return 4 * pi.count_compiled(0, points) / points


def only_the_root_knows(points, comm):
    inside = np.array([pi.count_compiled(*pi.slice_of(points, comm.rank, comm.size))])
    comm.reduce(inside, root=0)
    return float(4 * inside[0] / points)


def sums_the_estimates(points, comm):
    start, stop = pi.slice_of(points, comm.rank, comm.size)
    mine = np.array([4 * pi.count_compiled(start, stop) / max(1, stop - start)])
    return float(comm.all_reduce(mine)[0])


def averages_the_estimates(points, comm):
    start, stop = pi.slice_of(points, comm.rank, comm.size)
    mine = np.array([4 * pi.count_compiled(start, stop) / max(1, stop - start)])
    return float(comm.all_reduce(mine, op="mean")[0])


def rounds_the_slices(points, comm):
    count = round(points / comm.size)
    inside = np.array([pi.count_compiled(comm.rank * count, (comm.rank + 1) * count)])
    return float(4 * comm.all_reduce(inside)[0] / points)


def draws_the_same_points(points, comm):
    inside = np.array([pi.count_compiled(0, points // comm.size)])
    return float(4 * comm.all_reduce(inside)[0] / points)


def at_least_one_point_each(points, comm):
    """More points than there are, if they are few."""
    count = max(1, points // comm.size)
    last = comm.rank == comm.size - 1
    inside = np.array([pi.count_compiled(comm.rank * count, points if last else (comm.rank + 1) * count)])
    return float(4 * comm.all_reduce(inside)[0] / points)


def counts_in_16_bits(points, comm):
    inside = np.array([pi.count_compiled(*pi.slice_of(points, comm.rank, comm.size))], dtype=np.int16)
    return float(4 * int(comm.all_reduce(inside)[0]) / points)


def rounds_the_estimate(points, comm):
    inside = np.array([pi.count_compiled(*pi.slice_of(points, comm.rank, comm.size))])
    return round(float(4 * comm.all_reduce(inside)[0] / points), 3)


def keeps_its_own_estimate(points, comm):
    start, stop = pi.slice_of(points, comm.rank, comm.size)
    return 4 * pi.count_compiled(start, stop) / max(1, stop - start)


def divides_by_one_more(points, comm):
    inside = np.array([pi.count_compiled(*pi.slice_of(points, comm.rank, comm.size))])
    return float(4 * comm.all_reduce(inside)[0] / (points + 1))


def root_only_reduces(points, comm):
    inside = np.array([pi.count_compiled(*pi.slice_of(points, comm.rank, comm.size))])
    if comm.rank == 0:
        comm.all_reduce(inside)
    return float(4 * inside[0] / points)


def count_a_third(points, comm):
    return pi.count_compiled(points * comm.rank // 3, points * (comm.rank + 1) // 3)


def estimate_by_thirds(points, comm):
    inside = torch.tensor([count_a_third(points, comm)])
    return 4 * comm.all_reduce(inside).item() / points


WRONG = {
    "pi-streams": {
        same_points: "same-points",
        another_seed_a_rank: "seed",
        forgets_the_remainder: "remainder",
        first_point_counted_twice: "overlap",
        count_a_third: "other-size",
    },
    "pi-on-ranks": {
        everybody_does_everything: "all-on-every-rank",
        only_the_root_knows: "only-root",
        sums_the_estimates: "summed-estimates",
        averages_the_estimates: "averaged-estimates",
        keeps_its_own_estimate: "other-estimate",
        divides_by_one_more: "other-estimate",
        rounds_the_slices: "remainder",
        draws_the_same_points: "same-points",
        at_least_one_point_each: "fewer-points-than-ranks",
        counts_in_16_bits: "narrow-type",
        rounds_the_estimate: "other-estimate",
        root_only_reduces: "waited",
        estimate_by_thirds: "other-size",
    },
}
