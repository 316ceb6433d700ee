"""Choose the algorithm for an operation and size, from measurements; ``algorithm=`` overrides the choice.

The limits of all_reduce are in theory/collectives.py (``chosen_all_reduce``), because the planner needs them, too.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from dtlib.comm import algorithms
from dtlib.errors import CommunicationError
from dtlib.theory.collectives import DOUBLING_UP_TO, DOUBLING_UP_TO_DEFAULT, HALVING_FROM_RANKS, HALVING_UP_TO

# The first algorithm is the default; only all_reduce is chosen by size.
IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Iterator[list]]]] = {
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


# A program sends few different sizes, many times each.
@lru_cache(maxsize=4096)
def choose(operation: str, count: int, size: int, wanted: str | None = None) -> Callable[..., Iterator[list]]:
    """Return the algorithm (a generator function) of an operation for ``count`` bytes on ``size`` ranks, or ``wanted``.

    Raises:
        CommunicationError: if the operation has no algorithm with this name.
    """
    functions = IMPLEMENTATIONS[operation]
    if wanted is not None:
        if wanted not in functions:
            raise CommunicationError(f"{operation} has no algorithm {wanted!r}: choose one of {', '.join(functions)}.")
        return functions[wanted]
    if operation != "all_reduce":
        return next(iter(functions.values()))
    # As in `chosen_all_reduce`, which a test compares: a call of it would lead readers through one more file.
    if count <= next((limit for most, limit in DOUBLING_UP_TO.items() if size <= most), DOUBLING_UP_TO_DEFAULT):
        return functions["recursive_doubling"]
    halves = HALVING_FROM_RANKS <= size == algorithms.largest_power_of_two(size) and count <= HALVING_UP_TO
    return functions["rabenseifner" if halves else "ring"]
