"""Choose the algorithm for an operation and size, from measurements; ``algorithm=`` overrides the choice.

The number of messages dominates for small arrays, the number of bytes for large ones. The sizes at which another
algorithm becomes faster were measured on one machine with two cores. On a network they differ, but have the same
order of magnitude.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from dtlib.comm import algorithms
from dtlib.errors import CommunicationError

# The first algorithm is the default; only all_reduce is chosen by size.
KNOWN: dict[str, dict[str, Callable[..., Iterator[list]]]] = {
    "broadcast": {"tree": algorithms.tree_broadcast},
    "reduce": {"tree": algorithms.tree_reduce},
    "scatter": {"direct": algorithms.direct_scatter},
    "gather": {"direct": algorithms.direct_gather},
    "all_reduce": {
        "ring": algorithms.ring_all_reduce,
        "recursive_doubling": algorithms.recursive_doubling_all_reduce,
        "rabenseifner": algorithms.rabenseifner_all_reduce,
        "tree": algorithms.tree_all_reduce,
        "naive": algorithms.naive_all_reduce,
    },
    "reduce_scatter": {
        "ring": algorithms.ring_reduce_scatter,
        "ring_over_input": algorithms.ring_reduce_scatter_over_input,
    },
    "all_gather": {"ring": algorithms.ring_all_gather},
    "all_to_all": {"pairwise": algorithms.pairwise_all_to_all},
    "barrier": {"dissemination": algorithms.dissemination_barrier},
}

# all_reduce uses recursive doubling up to this many bytes, by number of ranks. Other numbers use the next larger key.
DOUBLING_UP_TO = {2: 2**18, 4: 2**19}
_ON_MANY_RANKS = min(DOUBLING_UP_TO.values())
# Above that size and on more than four ranks, all_reduce uses Rabenseifner's algorithm. On eight ranks it is twice as
# fast as the ring at 1 MB, and no faster from 16 MB on, where the number of rounds no longer matters. It needs half of
# the array as scratch memory; the ring needs one rank's chunk. If the number of ranks is not a power of two, it sends
# up to twice as many bytes, so the ring is used.
HALVING_FROM_RANKS, HALVING_UP_TO = 5, 2**24


# A program sends few different sizes, many times each.
@lru_cache(maxsize=4096)
def choose(operation: str, count: int, size: int, wanted: str | None = None) -> Callable[..., Iterator[list]]:
    """Return the algorithm (a generator function) of an operation for ``count`` bytes on ``size`` ranks, or ``wanted``.

    Raises:
        CommunicationError: if the operation has no algorithm with this name.
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
