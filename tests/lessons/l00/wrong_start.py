"""Plausible wrong answers to lesson 00: what `total` might be, and the mistake that the check must recognise."""

import torch

from dtlib.lessons.l00.judge_sum import observe_total


def not_reduced(comm):
    return comm.rank


def reduced_twice(comm):
    return sum(range(comm.size)) * comm.size


def counted_from_one(comm):
    return sum(range(1, comm.size + 1))


def only_a_text(comm):
    return "the sum"


def copied_from_rank_0(comm):
    return 0


def the_largest(comm):
    return comm.size - 1


def divided(comm):
    return sum(range(comm.size)) // comm.size


def on_rank_0_alone(comm):
    return sum(range(comm.size)) if comm.rank == 0 else comm.rank


def typed_after_a_wrong_sum(comm):
    observe_total(comm.all_reduce(torch.tensor(comm.rank), op="max"), comm)  # a check that ranks have communicated for
    return sum(range(comm.size))


MADE = {
    "first-sum": {
        not_reduced: "not-reduced",
        reduced_twice: "summed-twice",
        counted_from_one: "other-sum",
        only_a_text: "type",
        copied_from_rank_0: "not-added",
        the_largest: "not-added",
        divided: "mean",
        on_rank_0_alone: "only-root",
        typed_after_a_wrong_sum: "nothing-sent",
    },
}
