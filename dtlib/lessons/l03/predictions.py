"""Lesson 03: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction
from dtlib.theory import collectives as theory


def _megabytes_of_ring(ranks: int) -> float:
    return theory.elements_sent_by_the_busiest("all_reduce", "ring", ranks, 120_000_000) / 1e6


def _crossing() -> int:
    """Return the bytes from which the ring is no slower than recursive doubling, on four ranks."""

    def seconds(algorithm, count):
        return theory.cost("all_reduce", algorithm, 4, count, latency=5e-3, bandwidth=100e6)

    sizes = range(10_000, 10**8, 10_000)
    return next(n for n in sizes if seconds("ring", n) < seconds("recursive_doubling", n) + 1e-9)


_RING = "2 (N-1) steps, in each of them an N-th of the array."

PREDICTIONS = {
    "chunk-of-rank-1": Prediction(got=lambda: 2 + 4, hint="Rank 1 gets chunk 1: the second number of each rank."),
    "naive-and-tree": Prediction(
        got=lambda: {
            "messages, naive": theory.messages("all_reduce", "naive", 8),
            "messages, tree": theory.messages("all_reduce", "tree", 8),
            "rounds, naive": theory.rounds("all_reduce", "naive", 8),
            "rounds, tree": theory.rounds("all_reduce", "tree", 8),
        },
        hint={
            "messages, naive": "Seven ranks send up, seven get an answer.",
            "messages, tree": "Seven ranks send up, seven get an answer.",
            "rounds, naive": "One at a time.",
            "rounds, tree": "Up log2 8, down log2 8.",
        },
    ),
    "megabytes-of-a-ring": Prediction(
        got=lambda: {ranks: _megabytes_of_ring(ranks) for ranks in (4, 1000)}, tolerance=0.01, hint=_RING
    ),
    "crossing": Prediction(got=_crossing, tolerance=0.1, hint="2 α + 2 n β = 6 α + 1.5 n β: n = 8 α / β."),
    "between-machines": Prediction(
        got=lambda between: between,
        tolerance=0.01,
        hint={"ring": "One rank of each machine sends to the other.", "hierarchical": "n/2 from each of two ranks."},
    ),
    # The exercises
    "tree-broadcast": Prediction(
        got=lambda: {
            "messages": theory.messages("broadcast", "tree", 8),
            "rounds": theory.rounds("broadcast", "tree", 8),
        },
        hint="Every rank but the root receives it once; the number of ranks that have it doubles.",
    ),
    "bytes-of-a-ring": Prediction(got=lambda sent_bytes: sent_bytes[0], hint=_RING),
}
