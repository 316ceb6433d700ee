"""Plausible wrong answers to lesson 00: what `total` might be, and the mistake that the check must recognise."""


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
    },
}
