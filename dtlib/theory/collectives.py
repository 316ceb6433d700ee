"""Closed formulas of collectives: messages, elements sent, rounds and seconds (pure Python).

In the cost model a message of n bytes takes ``latency + n / bandwidth`` seconds between any two ranks. At a time, a
rank sends at most one message and receives at most one. In the usual letters alpha is the latency, beta = 1 / bandwidth
the seconds per byte, and gamma the seconds to combine two bytes. ``lg`` is ceil(log2 N).

    operation, algorithm                  messages of all ranks   rounds       seconds
    broadcast tree                   N - 1                   lg           lg (alpha + n beta)
    reduce tree                      N - 1                   lg           lg (alpha + n beta + n gamma)
    all_reduce naive                 2 (N - 1)               2 (N - 1)    2 (N-1) (alpha + n beta) + (N-1) n gamma
    all_reduce tree                  2 (N - 1)               2 lg         2 lg (alpha + n beta) + lg n gamma
    all_reduce recursive_doubling    N log2 N                log2 N       log2 N (alpha + n beta + n gamma)
      N no power of two: W is the    W log2 W + 2 (N - W)    log2 W + 2   and 2 (alpha + n beta) + n gamma more
      largest below it
    all_reduce ring                  2 N (N - 1)             2 (N - 1)    2 (N-1) (alpha + n/N beta) + (N-1) n/N gamma
    all_reduce rabenseifner          2 N log2 N              2 log2 N     2 log2 N alpha + (N-1) n/N (2 beta + gamma)
      N no power of two: W is the    2 W log2 W + 2 (N - W)  2 log2 W + 2 and 2 (alpha + n beta) + n gamma more
      largest below it
    reduce_scatter ring              N (N - 1)               N - 1        (N-1) (alpha + n/N beta + n/N gamma)
    all_gather ring                  N (N - 1)               N - 1        (N-1) (alpha + n/N beta)
    scatter, gather direct           N - 1                   N - 1        (N-1) (alpha + n/N beta)
    all_to_all pairwise              N (N - 1)               N - 1        (N-1) (alpha + n/N beta)
    barrier dissemination            N lg                    lg           lg alpha

The model and most of the formulas: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 19(1), 2005, sections 3 (cost model) and 4; the ring: P. Patarasuk and X. Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.

``count`` is the size of the whole tensor: for broadcast, reduce and all_reduce the tensor itself, for the others the
tensor of N equal chunks. ``ranks`` is any number from 1; it need not be a power of two.
"""

ALGORITHMS = {
    "broadcast": ("tree",),
    "reduce": ("tree",),
    "all_reduce": ("ring", "recursive_doubling", "rabenseifner", "tree", "naive"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
    "scatter": ("direct",),
    "gather": ("direct",),
    "all_to_all": ("pairwise",),
    "barrier": ("dissemination",),
}


def messages(operation: str, algorithm: str, ranks: int) -> int:
    """Return the number of messages that all ranks send together."""
    n, lg = ranks, log2_up(ranks)
    whole, extra = _whole_and_extra(ranks)
    return {
        ("broadcast", "tree"): n - 1,
        ("reduce", "tree"): n - 1,
        ("all_reduce", "naive"): 2 * (n - 1),
        ("all_reduce", "tree"): 2 * (n - 1),
        ("all_reduce", "recursive_doubling"): whole * log2_up(whole) + 2 * extra,
        ("all_reduce", "rabenseifner"): 2 * whole * log2_up(whole) + 2 * extra,
        ("all_reduce", "ring"): 2 * n * (n - 1),
        ("reduce_scatter", "ring"): n * (n - 1),
        ("all_gather", "ring"): n * (n - 1),
        ("scatter", "direct"): n - 1,
        ("gather", "direct"): n - 1,
        ("all_to_all", "pairwise"): n * (n - 1),
        ("barrier", "dissemination"): n * lg,
    }[_known(operation, algorithm)]


def messages_of_rank(operation: str, algorithm: str, ranks: int, rank: int, root: int = 0) -> int:
    """Return the number of messages that one rank sends; only broadcast, reduce, scatter and gather use ``root``."""
    n, at_root = ranks, rank == root
    whole, extra = _whole_and_extra(ranks)
    return {
        ("broadcast", "tree"): _children((rank - root) % n, n),
        ("reduce", "tree"): 1 - at_root,
        ("all_reduce", "naive"): n - 1 if rank == 0 else 1,
        ("all_reduce", "tree"): _children(rank, n) + (rank > 0),
        ("all_reduce", "recursive_doubling"): 1 if rank >= whole else log2_up(whole) + (rank < extra),
        ("all_reduce", "rabenseifner"): 1 if rank >= whole else 2 * log2_up(whole) + (rank < extra),
        ("all_reduce", "ring"): 2 * (n - 1),
        ("reduce_scatter", "ring"): n - 1,
        ("all_gather", "ring"): n - 1,
        ("scatter", "direct"): (n - 1) * at_root,
        ("gather", "direct"): 1 - at_root,
        ("all_to_all", "pairwise"): n - 1,
        ("barrier", "dissemination"): log2_up(n),
    }[_known(operation, algorithm)]


def elements_sent(operation: str, algorithm: str, ranks: int, rank: int, count: int, root: int = 0) -> int:
    """Return the exact number of elements that one rank sends; times the bytes per element it is the payload.

    The ring all-reduce splits ``count`` elements into chunks that differ by one element at most. A rank sends every
    chunk twice, except its own chunk and its right neighbour's, which it sends once. In Rabenseifner's algorithm a rank
    sends half of its current part in each halving, and the other half in the matching doubling.
    """
    sent = messages_of_rank(operation, algorithm, ranks, rank, root)
    if (operation, algorithm) == ("all_reduce", "ring"):
        return 2 * count - _chunk(rank, ranks, count) - _chunk((rank + 1) % ranks, ranks, count)
    if (operation, algorithm) == ("all_reduce", "rabenseifner"):
        return _sent_by_halving(ranks, rank, count)
    if operation == "barrier":
        return 0
    whole_arrays = operation in ("broadcast", "reduce", "all_reduce")
    return sent * count if whole_arrays else sent * count // ranks


# all_reduce uses recursive doubling up to this many bytes, by number of ranks. 3 ranks use the limit of 4, and more
# ranks the smallest limit. The number of messages dominates for small arrays, the number of bytes for large ones. The
# limits were measured on one machine with two cores. On a network they differ, but have the same order of magnitude.
DOUBLING_UP_TO, DOUBLING_UP_TO_DEFAULT = {2: 2**18, 4: 2**19}, 2**18
# Above that size and on more than four ranks, all_reduce uses Rabenseifner's algorithm. On eight ranks it is twice as
# fast as the ring at 1 MB, and no faster from 16 MB on, where the number of rounds no longer matters. It needs half of
# the array as scratch memory; the ring needs one rank's chunk. If the number of ranks is not a power of two, it sends
# up to twice as many bytes, so the ring is used.
HALVING_FROM_RANKS, HALVING_UP_TO = 5, 2**24


def chosen_all_reduce(ranks: int, nbytes: int) -> str:
    """Return the algorithm that ``Communicator.all_reduce`` uses by default for an array of this many bytes."""
    if nbytes <= next((limit for most, limit in DOUBLING_UP_TO.items() if ranks <= most), DOUBLING_UP_TO_DEFAULT):
        return "recursive_doubling"
    halves = HALVING_FROM_RANKS <= ranks == _whole_and_extra(ranks)[0] and nbytes <= HALVING_UP_TO
    return "rabenseifner" if halves else "ring"


def elements_sent_by_the_busiest(operation: str, algorithm: str, ranks: int, count: int, root: int = 0) -> int:
    """Return the number of elements sent by the rank that sends most."""
    return max(elements_sent(operation, algorithm, ranks, rank, count, root) for rank in range(ranks))


def rounds(operation: str, algorithm: str, ranks: int) -> int:
    """Return the number of messages in sequence; each one costs one ``latency``."""
    n, lg = ranks, log2_up(ranks)
    whole, extra = _whole_and_extra(ranks)
    return {
        ("broadcast", "tree"): lg,
        ("reduce", "tree"): lg,
        ("all_reduce", "naive"): 2 * (n - 1),
        ("all_reduce", "tree"): 2 * lg,
        ("all_reduce", "recursive_doubling"): log2_up(whole) + 2 * (extra > 0),
        ("all_reduce", "rabenseifner"): 2 * log2_up(whole) + 2 * (extra > 0),
        ("all_reduce", "ring"): 2 * (n - 1),
        ("reduce_scatter", "ring"): n - 1,
        ("all_gather", "ring"): n - 1,
        ("scatter", "direct"): n - 1,
        ("gather", "direct"): n - 1,
        ("all_to_all", "pairwise"): n - 1,
        ("barrier", "dissemination"): lg,
    }[_known(operation, algorithm)]


def cost(
    operation: str, algorithm: str, ranks: int, count: float, latency: float, bandwidth: float, combine: float = 0.0
) -> float:
    """Return the seconds that a collective takes in the cost model.

    Args:
        count: bytes of the whole tensor.
        latency: seconds per message (alpha).
        bandwidth: bytes per second (1 / beta).
        combine: seconds to combine two bytes (gamma).
    """
    steps = rounds(operation, algorithm, ranks)
    if operation == "barrier":
        return steps * latency
    if algorithm == "rabenseifner":
        # The halvings send count/2 + count/4 + ... bytes, and the doublings the same. If N is no power of two, the
        # extra ranks first send their tensor to a partner, and receive the result at the end.
        whole, extra = _whole_and_extra(ranks)
        halved = count * (whole - 1) / whole
        more = count if extra else 0
        return steps * latency + 2 * (halved + more) / bandwidth + (halved + more) * combine
    in_chunks = algorithm in ("ring", "direct", "pairwise")
    size = count / ranks if in_chunks else count
    return steps * (latency + size / bandwidth) + _combined(operation, algorithm, ranks) * size * combine


def _combined(operation, algorithm, ranks) -> int:
    """Return the number of rounds in which the busiest rank combines received elements with its own."""
    _, extra = _whole_and_extra(ranks)
    if algorithm == "recursive_doubling":
        return rounds(operation, algorithm, ranks) - (extra > 0)
    if operation == "all_reduce":
        return rounds(operation, algorithm, ranks) // 2
    return rounds(operation, algorithm, ranks) if operation in ("reduce", "reduce_scatter") else 0


def log2_up(number: int) -> int:
    """Return log2 of ``number``, rounded up."""
    return (number - 1).bit_length()


def _known(operation, algorithm):
    if algorithm not in ALGORITHMS.get(operation, ()):
        known = ", ".join(f"{operation} {name}" for operation, names in ALGORITHMS.items() for name in names)
        raise ValueError(f"There is no formula for {operation} {algorithm}; there is one for {known}.")
    return operation, algorithm


def _whole_and_extra(ranks: int) -> tuple[int, int]:
    """Return the largest power of two that is at most ``ranks``, and the number of ranks above it."""
    whole = 1 << (ranks.bit_length() - 1)
    return whole, ranks - whole


def _sent_by_halving(ranks: int, rank: int, count: int) -> int:
    """Return the elements that ``rank`` sends in Rabenseifner's algorithm."""
    whole, extra = _whole_and_extra(ranks)
    if rank >= whole:
        return count
    # For each halving count both messages: half of the current part now, the other half when doubling.
    sent, mine, bit = count * (rank < extra), count, whole // 2
    while bit:
        sent += mine
        mine = mine - mine // 2 if rank & bit else mine // 2
        bit //= 2
    return sent


def _children(me: int, ranks: int) -> int:
    """Return the number of children of ``me`` in a binomial tree: one per bit below its lowest, if it exists."""
    lowest = me & -me or 1 << log2_up(ranks)
    return sum(me + (1 << bit) < ranks for bit in range(log2_up(lowest)))


def _chunk(rank: int, ranks: int, count: int) -> int:
    """Return the number of elements in chunk ``rank``."""
    return count * (rank + 1) // ranks - count * rank // ranks
