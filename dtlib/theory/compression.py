"""Exact payload bytes that a rank sends per bucket with the hooks of ``dtlib.parallel.compression`` (pure Python).

A bucket has ``count`` elements of ``itemsize`` bytes. Indices, scales and padding are included. PowerSGD uses
all_reduce, whose bytes depend on its algorithm, so ``powersgd_elements`` returns elements of its two all_reduces.
"""

import math
from collections.abc import Iterable, Sequence

SCALE = INDEX = 4  # bytes


def top_k_bytes(count: int, ranks: int, fraction: float, itemsize: int = 4) -> int:
    """Return the bytes of an all_gather of ``ceil(fraction count)`` indices and values."""
    return (ranks - 1) * math.ceil(fraction * count) * (INDEX + itemsize)


def eight_bit_bytes(count: int, ranks: int, block: int = 256) -> int:
    """Return the bytes of an all_to_all and an all_gather of blocks with scales; the last block is padded."""
    return 2 * (ranks - 1) * math.ceil(count / (ranks * block)) * (SCALE + block)


def powersgd_elements(shapes: Iterable[Sequence[int]], rank: int, min_compression_rate: float = 2) -> tuple[int, int]:
    """Return the elements of two all_reduces: of P with the uncompressed tensors, and of Q.

    The second number is 0 if no tensor is compressed. ``rank`` is the rank of the approximation.
    """
    first = second = 0
    for shape in shapes:
        count, rows = math.prod(shape), shape[0] if shape else 1
        # Only matrices are compressed, and only if their factors are small enough.
        if len(shape) > 1 and rank * (rows + count // rows) * min_compression_rate < count:
            kept = min(rank, rows, count // rows)
            first, second = first + kept * rows, second + kept * (count // rows)
        else:
            first += count
    return first, second
