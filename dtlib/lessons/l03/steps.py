"""Every collective one round at a time: who holds what, and who sends what next. SIMULATED (turns.py); the algorithms
are the library's own.

Each rank puts the bit 2**rank into every place of an array with a place a rank, so that a partial sum tells who is in
it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dtlib.comm import algorithms
from dtlib.comm.algorithms import chunks_of
from dtlib.comm.numbers import Numbers, combiner
from dtlib.lessons.l03.turns import Network, TurnLink
from dtlib.theory.collectives import ALGORITHMS

ROOT = 0


@dataclass(frozen=True)
class Sent:
    """A message of a round: the places ``start`` to ``stop`` - 1 of the sender's array; None: not from there."""

    source: int
    dest: int
    start: int | None
    stop: int | None
    count: int


@dataclass(frozen=True)
class Round:
    """The ranks before a round, and what arrives in it. ``held[rank][place]`` are the ranks whose values are there."""

    held: tuple
    sent: tuple[Sent, ...]


def _reduce_scatter(link, array):
    return algorithms.ring_reduce_scatter_in_place(link, chunks_of(array, link.size), combiner("sum"))


def _all_gather(link, array):
    return algorithms.ring_all_gather(link, chunks_of(array, link.size))


def _scatter(link, array):
    chunks = chunks_of(array, link.size)
    return algorithms.direct_scatter(link, chunks[link.rank], chunks, ROOT)


def _gather(link, array):
    chunks = chunks_of(array, link.size)
    return algorithms.direct_gather(link, chunks, chunks[link.rank], ROOT)


def _all_to_all(link, array):
    return algorithms.pairwise_all_to_all(
        link, chunks_of(array, link.size), chunks_of(Numbers([1 << link.rank] * link.size, array.dtype), link.size)
    )


def _of_all_reduce(name: str) -> Callable:
    return lambda link, array: getattr(algorithms, f"{name}_all_reduce")(link, array, combiner("sum"))


# What a rank does, as a generator, and in which places of its array it has something to begin with: all, its own, or
# all on the root.
KNOWN = {
    **{("all_reduce", name): (_of_all_reduce(name), "all") for name in ALGORITHMS["all_reduce"]},
    ("broadcast", "tree"): (lambda link, array: algorithms.tree_broadcast(link, array, ROOT), "root"),
    ("reduce", "tree"): (lambda link, array: algorithms.tree_reduce(link, array, ROOT, combiner("sum")), "all"),
    ("reduce_scatter", "ring"): (_reduce_scatter, "all"),
    ("all_gather", "ring"): (_all_gather, "own"),
    ("scatter", "direct"): (_scatter, "root"),
    ("gather", "direct"): (_gather, "own"),
    ("all_to_all", "pairwise"): (_all_to_all, "none"),
    ("barrier", "dissemination"): (lambda link, array: algorithms.dissemination_barrier(link), "none"),
}


def rounds(operation: str, algorithm: str, ranks: int) -> tuple[list[Round], list[TurnLink]]:
    """All rounds of a collective on ``ranks`` ranks, the last entry being the result; and each rank's link, which has
    counted its messages."""
    act, begins = KNOWN[operation, algorithm]
    network = Network(ranks)
    links = [TurnLink(network, rank) for rank in range(ranks)]
    arrays = [Numbers([_at_first(begins, rank, place) for place in range(ranks)], "int64") for rank in range(ranks)]
    runs = [act(link, array) for link, array in zip(links, arrays, strict=True)]
    waits: list[list | None] = [[] for _ in runs]
    found = []
    while True:
        for rank, run in enumerate(runs):
            while (wanted := waits[rank]) is not None and links[rank].all_done(wanted):
                waits[rank] = next(run, None)
        held = _held(arrays)
        got = network.deliver()
        found.append(Round(held, tuple(_sent(message, arrays[message.source]) for message in got)))
        if not got:
            return found, links


def _at_first(begins: str, rank: int, place: int) -> int:
    return (1 << rank) * {"all": True, "own": place == rank, "root": rank == ROOT, "none": False}[begins]


def _held(arrays) -> tuple:
    ranks = range(len(arrays))
    return tuple(tuple(tuple(rank for rank in ranks if value >> rank & 1) for value in array) for array in arrays)


def _sent(message, array) -> Sent:
    """Where in its array a message began."""
    start = (message.numbers.ctypes.data - array.ctypes.data) // 8
    count = len(message.numbers)
    if not count or not 0 <= start < len(array):
        return Sent(message.source, message.dest, None, None, count)
    return Sent(message.source, message.dest, start, start + count, count)
