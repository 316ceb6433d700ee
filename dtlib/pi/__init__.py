"""Monte Carlo pi in six ways, from a loop to ranks that read a file, which all count exactly the same points.

Throw points at the unit square and count the points inside the quarter circle: pi is four times their fraction.
Point number i is made by a counter-based generator, a function of i alone. So any rank can compute any point
without communication, in any order and in blocks of any size:

    i + 1 --(multiply, add the seed)--> z --(mix)--> 64 bits --> x: the upper 31 bits, y: the lower 31 bits

The mixing is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
figure 16), whose period is 2**64. x and y stay integers: a point is inside if x*x + y*y < 2**62. Nothing is
rounded, so two machines must get equal counts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtlib.errors import DtlibError
from dtlib.files import open_nonblocking, opened_to_read, writing
from dtlib.pi.generator import GOLDEN, MASK_31, MASK_64, MIX_1, MIX_2, RADIUS_SQUARED

if TYPE_CHECKING:
    from dtlib.comm import Communicator


BLOCK = 2**13  # points in memory at once: their arrays of 64 kB stay in a core's cache


@dataclass(frozen=True)
class Estimate:
    """An estimate of pi: ``inside`` of ``points`` points lie in the quarter circle."""

    points: int
    inside: int

    @property
    def pi(self) -> float:
        """Four times the fraction of points inside."""
        return 4 * self.inside / self.points

    @property
    def standard_error(self) -> float:
        """Standard deviation of ``pi`` over seeds: each point is a coin with p = pi/4, so 4 sqrt(p (1-p) / n)."""
        fraction = self.inside / self.points
        return 4 * math.sqrt(fraction * (1 - fraction) / self.points)


# 1: a plain Python loop


def point(i: int, seed: int = 0) -> tuple[int, int]:
    """Return point number ``i`` as two integers from 0 to 2**31 - 1."""
    z = (seed + (i + 1) * GOLDEN) & MASK_64
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    z = z ^ (z >> 31)
    return z >> 33, z & MASK_31


def count_loop(start: int, stop: int, seed: int = 0) -> int:
    """Count the points from ``start`` to ``stop - 1`` that lie inside, in a Python loop."""
    inside = 0
    for i in range(start, stop):
        x, y = point(i, seed)
        inside += x * x + y * y < RADIUS_SQUARED
    return inside


# 2: numpy, block by block


def points_numpy(start: int, stop: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the points from ``start`` to ``stop - 1`` as two uint64 arrays, whose arithmetic wraps at 2**64."""
    z = np.arange(start + 1, stop + 1, dtype=np.uint64)
    z *= np.uint64(GOLDEN)
    z += np.uint64(seed & MASK_64)
    shifted = z >> np.uint64(30)
    z ^= shifted
    z *= np.uint64(MIX_1)
    np.right_shift(z, np.uint64(27), out=shifted)
    z ^= shifted
    z *= np.uint64(MIX_2)
    np.right_shift(z, np.uint64(31), out=shifted)
    z ^= shifted
    np.right_shift(z, np.uint64(33), out=shifted)
    z &= np.uint64(MASK_31)
    return shifted, z


def inside_numpy(x: np.ndarray, y: np.ndarray) -> int:
    """Count the points that lie inside. Overwrites ``x`` and ``y`` (uint64)."""
    x *= x
    y *= y
    x += y
    return int(np.count_nonzero(x < np.uint64(RADIUS_SQUARED)))


def count_numpy(start: int, stop: int, seed: int = 0, block: int = BLOCK) -> int:
    """Count with numpy in blocks that fit the cache: all points at once would need 16 bytes per point."""
    return sum(inside_numpy(*points_numpy(a, min(a + block, stop), seed)) for a in range(start, stop, block))


# 3: the loop again, compiled


@lru_cache
def _compiled_kernel():
    import numba
    from numba import uint64

    @numba.njit("int64(uint64, uint64, uint64)", cache=True, nogil=True)
    def kernel(start, stop, seed):
        inside = 0
        for i in range(start, stop):
            z = seed + (i + uint64(1)) * uint64(GOLDEN)
            z = (z ^ (z >> uint64(30))) * uint64(MIX_1)
            z = (z ^ (z >> uint64(27))) * uint64(MIX_2)
            z = z ^ (z >> uint64(31))
            x = z >> uint64(33)
            y = z & uint64(MASK_31)
            inside += x * x + y * y < uint64(RADIUS_SQUARED)
        return inside

    return kernel


def count_compiled(start: int, stop: int, seed: int = 0) -> int:
    """Count with the plain loop, compiled by numba: points stay in registers and are never stored."""
    return _compiled_kernel()(start, stop, seed & MASK_64)


# 4: a GPU


def count_gpu(start: int, stop: int, seed: int = 0) -> int:
    """Count with thousands of threads on this rank's GPU."""
    from dtlib.pi.gpu import count

    return count(start, stop, seed & MASK_64)


KERNELS = {"loop": count_loop, "numpy": count_numpy, "compiled": count_compiled, "gpu": count_gpu}


# 5: ranks that each count a slice, and reduce


def slice_of(points: int, rank: int, size: int) -> tuple[int, int]:
    """Return start and stop (exclusive) of the points that ``rank`` of ``size`` counts.

    For any number of points the slices have no gap and no overlap, and differ by at most one point:

        10 points, 3 ranks:   0 1 2 | 3 4 5 | 6 7 8 9
    """
    return points * rank // size, points * (rank + 1) // size


def count_on_ranks(
    points: int, comm: Communicator, kernel: Callable[..., int] = count_compiled, seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> int:  # fmt: skip
    """Count on all ranks of ``comm``; every rank returns the total.

    With ``progress``, each rank counts in pieces of about half a second, and after each calls ``progress(done)`` with
    an estimate of the points that all ranks counted meanwhile: its own points times the number of ranks.
    """
    start, stop = slice_of(points, comm.rank, comm.size)
    inside = np.zeros(1, dtype=np.int64)
    burst = stop - start if progress is None else 10**6
    while start < stop:
        began = time.perf_counter()
        end = min(start + burst, stop)
        inside += kernel(start, end, seed)
        if progress is not None:
            progress((end - start) * comm.size)
            # Aim at half a second per piece, but grow at most fourfold, because a short piece is timed badly.
            elapsed = max(time.perf_counter() - began, 1e-6)
            burst = max(1, min(int(burst * 0.5 / elapsed), 4 * burst))
        start = end
    return int(comm.all_reduce(inside)[0])


# 6: ranks that each read a slice of a file


def write_points(path: str | PathLike[str], points: int, seed: int = 0) -> Path:
    """Write ``points`` points to ``path``: pairs of little-endian uint32, x then y, 8 bytes per point."""
    path = Path(path)
    with writing(path), open(path, "wb", opener=open_nonblocking) as file:
        for start in range(0, points, BLOCK):
            pairs = np.stack(points_numpy(start, min(start + BLOCK, points), seed), axis=1)
            file.write(pairs.astype("<u4").tobytes())
    return path


def count_file(path: str | PathLike[str], comm: Communicator) -> Estimate:
    """Count the points of a file from ``write_points``; each rank reads its own slice only."""
    try:
        with open(path, "rb", opener=opened_to_read) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as problem:
        raise DtlibError(f"{path} cannot be read ({problem.strerror}): write it with dtlib.pi.write_points.") from None
    if size == 0 or size % 8:
        raise DtlibError(f"{path} has {size} bytes, which is not a whole number of 8-byte points: write it again.")
    points = size // 8
    start, stop = slice_of(points, comm.rank, comm.size)
    inside = np.zeros(1, dtype=np.int64)
    with open(path, "rb") as file:
        file.seek(8 * start)
        for a in range(start, stop, BLOCK):
            pairs = np.fromfile(file, dtype="<u4", count=2 * min(BLOCK, stop - a)).reshape(-1, 2).astype(np.uint64)
            inside += inside_numpy(pairs[:, 0], pairs[:, 1])
    return Estimate(points, int(comm.all_reduce(inside)[0]))
