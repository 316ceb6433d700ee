"""Plausible wrong answers to lesson 00: what `total` might be, and the mistake that the check must recognise."""


def not_reduced(comm):
    return comm.rank


def reduced_twice(comm):
    return sum(range(comm.size)) * comm.size


def counted_from_one(comm):
    return sum(range(1, comm.size + 1))


def only_a_text(comm):
    return "the sum"


WRONG = {
    "first-sum": {
        not_reduced: "not-reduced",
        reduced_twice: "summed-twice",
        counted_from_one: "other-sum",
        only_a_text: "type",
    },
}
