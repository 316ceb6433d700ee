"""Two orders that assign the tokens of a sequence of any length to ranks.

    12 tokens on 3 ranks     rank 0             rank 1             rank 2             causal work
    contiguous               0 1 2 3            4 5 6 7            8 9 10 11          most on the last rank
    zigzag                   0 1 10 11          2 3 8 9            4 5 6 7            equal

If the length is not divisible, chunks differ by one token.
"""

import torch

from dtlib.errors import DtlibError

ORDERS = ("contiguous", "zigzag")


def positions_of(rank: int, ranks: int, length: int, order: str) -> torch.Tensor:
    """Return the positions of this rank's tokens in a sequence of ``length``, ascending; int64."""
    if order == "contiguous":
        return torch.arange(length * rank // ranks, length * (rank + 1) // ranks)
    if order != "zigzag":
        raise DtlibError(f"order={order!r}: choose one of {', '.join(ORDERS)}.")
    ends = [length * i // (2 * ranks) for i in range(2 * ranks + 1)]
    return torch.cat([torch.arange(ends[chunk], ends[chunk + 1]) for chunk in (rank, 2 * ranks - 1 - rank)])


def runs_of(positions: torch.Tensor) -> list[slice]:
    """Divide a rank's tokens into two runs, so that keys later than all queries of a run can be skipped."""
    jumps = (positions.diff() > 1).nonzero()  # in zigzag order, the two runs are apart
    first = int(jumps[0]) + 1 if len(jumps) else len(positions) // 2
    return [run for run in (slice(0, first), slice(first, len(positions))) if run.start < run.stop]
