"""Which algorithm for which operation and size: measured, and overridden by ``algorithm=``.

Small arrays are dominated by the number of messages, large ones by the number of bytes. Where the two curves cross was
measured inside one machine with two cores; on a network it lies elsewhere, but the order of magnitude holds.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from dtlib.comm import algorithms, mpi_collectives
from dtlib.errors import CommunicationError

# The first is taken unless something else is asked for; all_reduce is chosen by size.
KNOWN: dict[str, dict[str, Callable[..., Iterator[list]]]] = {
    "broadcast": {"tree": algorithms.tree_broadcast, "mpi": mpi_collectives.broadcast},
    "reduce": {"tree": algorithms.tree_reduce},
    "scatter": {"direct": algorithms.direct_scatter},
    "gather": {"direct": algorithms.direct_gather},
    "all_reduce": {
        "ring": algorithms.ring_all_reduce,
        "recursive_doubling": algorithms.recursive_doubling_all_reduce,
        "rabenseifner": algorithms.rabenseifner_all_reduce,
        "tree": algorithms.tree_all_reduce,
        "naive": algorithms.naive_all_reduce,
        "mpi": mpi_collectives.all_reduce,
    },
    "reduce_scatter": {
        "ring": algorithms.ring_reduce_scatter,
        "ring_over_input": algorithms.ring_reduce_scatter_over_input,
    },
    "all_gather": {"ring": algorithms.ring_all_gather},
    "all_to_all": {"pairwise": algorithms.pairwise_all_to_all},
    "barrier": {"dissemination": algorithms.dissemination_barrier},
}

# For all_reduce: up to this many bytes recursive doubling. By ranks; the next larger entry counts.
DOUBLING_UP_TO = {2: 2**18, 4: 2**19}
_ON_MANY_RANKS = min(DOUBLING_UP_TO.values())
# Then, on more than four ranks, Rabenseifner's algorithm: twice as fast as the ring on eight ranks at 1 MB, and no
# faster from 16 MB on, where the rounds no longer count. It needs half the array as scratch, the ring a rank's chunk;
# and where the ranks are no power of two it sends up to twice as much, so there the ring stays.
HALVING_FROM_RANKS, HALVING_UP_TO = 5, 2**24


@lru_cache(maxsize=4096)  # a program sends few sizes, again and again
def choose(operation: str, count: int, size: int, wanted: str | None = None) -> Callable[..., Iterator[list]]:
    """The algorithm of an operation for ``count`` bytes on ``size`` ranks, or the ``wanted`` one: a generator function.

    Raises:
        CommunicationError: where the operation has none of that name.
    """
    known = KNOWN[operation]
    if wanted is not None:
        if wanted not in known:
            raise CommunicationError(f"{operation} has no algorithm {wanted!r}: choose one of {', '.join(known)}.")
        return known[wanted]
    if operation != "all_reduce":
        return next(iter(known.values()))
    limit = next((limit for ranks, limit in DOUBLING_UP_TO.items() if size <= ranks), _ON_MANY_RANKS)
    if count <= limit:
        return known["recursive_doubling"]
    halving = HALVING_FROM_RANKS <= size == algorithms.largest_power_of_two(size) and count <= HALVING_UP_TO
    return known["rabenseifner" if halving else "ring"]
