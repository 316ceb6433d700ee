"""Which algorithm for which size: measured, and overridden by ``algorithm=``.

Small arrays are dominated by the number of messages, large ones by the number of bytes. Where the two curves cross was
measured inside one machine with two cores; on a network it lies elsewhere, but the order of magnitude holds.
"""

# For all_reduce: up to this many bytes recursive doubling, above it the ring. By ranks; the next larger entry counts.
DOUBLING_UP_TO = {2: 2**18, 4: 2**19}


def choose(verb: str, count: int, size: int, known) -> str:
    """The name of the algorithm for ``count`` bytes on ``size`` ranks, one of ``known``."""
    if verb != "all_reduce":
        return next(iter(known))
    limit = next((limit for ranks, limit in DOUBLING_UP_TO.items() if size <= ranks), min(DOUBLING_UP_TO.values()))
    return "recursive_doubling" if count <= limit else "ring"
