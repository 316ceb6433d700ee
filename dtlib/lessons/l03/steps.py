"""Every collective round by round: data of all ranks, and messages. SIMULATED (simulated_network.py).

Each rank puts the bit 2**rank into every element of an array with one element per rank. So the bits of a partial sum
show which ranks it contains.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dtlib.comm import algorithms
from dtlib.comm.algorithms import chunks_of
from dtlib.comm.numbers import Numbers, combiner
from dtlib.lessons.l03.simulated_network import Network, SimulatedLink
from dtlib.theory.collectives import ALGORITHMS

ROOT = 0


@dataclass(frozen=True)
class Sent:
    """A message: elements ``start`` to ``stop`` - 1 of the sender's array, or None if it is from other memory."""

    source: int
    dest: int
    start: int | None
    stop: int | None
    count: int


@dataclass(frozen=True)
class Round:
    """Data before a round, and its messages. ``held[rank][place]`` are the ranks summed in that element."""

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


# (operation, algorithm) -> (generator of one rank, which elements are filled at the start: all, each rank's own, all on
# the root, or none).
COLLECTIVES = {
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


def rounds(operation: str, algorithm: str, ranks: int) -> tuple[list[Round], list[SimulatedLink]]:
    """Return all rounds of a collective, and each rank's link with its counts of messages and bytes.

    The last round is the result.
    """
    act, begins = COLLECTIVES[operation, algorithm]
    network = Network(ranks)
    links = [SimulatedLink(network, rank) for rank in range(ranks)]
    arrays = [Numbers([_at_first(begins, rank, place) for place in range(ranks)], "int64") for rank in range(ranks)]
    runs = [act(link, array) for link, array in zip(links, arrays, strict=True)]
    waits: list[list | None] = [[] for _ in runs]
    found = []
    # Advance every rank until it waits for a message; then deliver one round of messages, until there are none.
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
    """Return a message with the position in its sender's array."""
    start = (message.numbers.ctypes.data - array.ctypes.data) // 8
    count = len(message.numbers)
    if not count or not 0 <= start < len(array):
        return Sent(message.source, message.dest, None, None, count)
    return Sent(message.source, message.dest, start, start + count, count)
