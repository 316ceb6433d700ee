"""What the hooks of ``dtlib.parallel.compression`` send: payload bytes of a rank and a bucket, exactly (pure Python).

``count`` elements of ``itemsize`` bytes on ``ranks`` ranks, with indices, scales and padding. What PowerSGD sends
goes by all_reduce, whose formula depends on its algorithm: ``powersgd_elements`` are those of its two.
"""

import math
from collections.abc import Iterable, Sequence

SCALE = INDEX = 4  # bytes


def top_k_bytes(count: int, ranks: int, fraction: float, itemsize: int = 4) -> int:
    """An all_gather of ``ceil(fraction count)`` places and values."""
    return (ranks - 1) * math.ceil(fraction * count) * (INDEX + itemsize)


def eight_bit_bytes(count: int, ranks: int, block: int = 256) -> int:
    """An all_to_all and an all_gather of blocks, each with its scale; the last ones are padded."""
    return 2 * (ranks - 1) * math.ceil(count / (ranks * block)) * (SCALE + block)


def powersgd_elements(shapes: Iterable[Sequence[int]], rank: int, min_compression_rate: float = 2) -> tuple[int, int]:
    """Elements of its all_reduces: of P, with what travels whole beside it; and of Q, 0 if all travels whole."""
    first = second = 0
    for shape in shapes:
        count, rows = math.prod(shape), shape[0] if shape else 1
        if len(shape) > 1 and rank * (rows + count // rows) * min_compression_rate < count:
            kept = min(rank, rows, count // rows)
            first, second = first + kept * rows, second + kept * (count // rows)
        else:
            first += count
    return first, second
