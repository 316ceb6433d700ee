"""The closed formulas of the lectures: what a collective sends, in how many rounds, and what it costs (pure Python).

The machine of the model: a message of n bytes takes ``latency + n / bandwidth`` seconds, whoever sends it to whom, and
a rank sends one message and receives one at a time. Written with the field's letters, alpha is the latency, beta =
1 / bandwidth the seconds a byte, and gamma the seconds to combine a byte with another. ceil(log2 N) is ``lg`` here.

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

``count`` is always the whole: the tensor of broadcast, reduce and all_reduce, and the one of ``size`` equal chunks of
the others. ``ranks`` may be any number from 1, no power of two in particular.
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
    """Messages that all ranks together send."""
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
    """Messages that one rank sends; ``root`` matters to broadcast, reduce, scatter and gather alone."""
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
    """Elements that one rank sends, exactly; times the bytes of an element they are the payload bytes.

    The ring of all_reduce divides ``count`` elements into chunks that differ by one element at most. A rank sends every
    chunk twice, but for its own and its right neighbour's, which it sends once. Rabenseifner's sends in every halving
    one half of what it has, and the other half when that is doubled again.
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


def elements_sent_by_the_busiest(operation: str, algorithm: str, ranks: int, count: int, root: int = 0) -> int:
    """Elements sent by the rank that sends most."""
    return max(elements_sent(operation, algorithm, ranks, rank, count, root) for rank in range(ranks))


def rounds(operation: str, algorithm: str, ranks: int) -> int:
    """Messages one after the other: how often ``latency`` is paid."""
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
    """Seconds by the model.

    Args:
        count: bytes of the whole.
        latency: seconds a message (alpha).
        bandwidth: bytes a second (1 / beta).
        combine: seconds to combine a byte with another (gamma).
    """
    steps = rounds(operation, algorithm, ranks)
    if operation == "barrier":
        return steps * latency
    if algorithm == "rabenseifner":
        whole, extra = _whole_and_extra(ranks)
        halved = count * (whole - 1) / whole
        more = count if extra else 0
        return steps * latency + 2 * (halved + more) / bandwidth + (halved + more) * combine
    in_chunks = algorithm in ("ring", "direct", "pairwise")
    size = count / ranks if in_chunks else count
    return steps * (latency + size / bandwidth) + _combined(operation, algorithm, ranks) * size * combine


def _combined(operation, algorithm, ranks) -> int:
    """In how many of the rounds the busiest rank combines what it received."""
    _, extra = _whole_and_extra(ranks)
    if algorithm == "recursive_doubling":
        return rounds(operation, algorithm, ranks) - (extra > 0)
    if operation == "all_reduce":
        return rounds(operation, algorithm, ranks) // 2
    return rounds(operation, algorithm, ranks) if operation in ("reduce", "reduce_scatter") else 0


def log2_up(number: int) -> int:
    """The whole number not below log2 of ``number``."""
    return (number - 1).bit_length()


def _known(operation, algorithm):
    if algorithm not in ALGORITHMS.get(operation, ()):
        known = ", ".join(f"{operation} {name}" for operation, names in ALGORITHMS.items() for name in names)
        raise ValueError(f"There is no formula for {operation} {algorithm}; there is one for {known}.")
    return operation, algorithm


def _whole_and_extra(ranks: int) -> tuple[int, int]:
    """The largest power of two that is no larger than ``ranks``, and how many ranks are beyond it."""
    whole = 1 << (ranks.bit_length() - 1)
    return whole, ranks - whole


def _sent_by_halving(ranks: int, rank: int, count: int) -> int:
    """Elements sent in Rabenseifner's algorithm: in each round a rank sends both halves of what it had."""
    whole, extra = _whole_and_extra(ranks)
    if rank >= whole:
        return count
    sent, mine, bit = count * (rank < extra), count, whole // 2
    while bit:
        sent += mine
        mine = mine - mine // 2 if rank & bit else mine // 2
        bit //= 2
    return sent


def _children(me: int, ranks: int) -> int:
    """To how many ranks rank ``me`` of a binomial tree sends: the bits below its lowest, as far as there are ranks."""
    lowest = me & -me or 1 << log2_up(ranks)
    return sum(me + (1 << bit) < ranks for bit in range(log2_up(lowest)))


def _chunk(rank: int, ranks: int, count: int) -> int:
    """Elements in chunk ``rank``."""
    return count * (rank + 1) // ranks - count * rank // ranks
