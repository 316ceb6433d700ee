"""Monte Carlo pi on a GPU: a Triton kernel that keeps its points in registers.

Each program of the grid counts ``SLICES * BLOCK`` consecutive points. Its threads generate and test points
without storing them. Each program accesses memory once, when it adds its count to the total.

    program 0                            program 1
    slice 0: points 0 .. 1023            slice 0: points 1024 * SLICES ..
    slice 1: points 1024 .. 2047         ...
"""

import torch
import triton
import triton.language as tl

from dtlib.pi.generator import GOLDEN, MASK_31, MIX_1, MIX_2, RADIUS_SQUARED

BLOCK = 1024
SLICES = 256


# By default Triton compiles special kernels, for example with an argument of 1 as a constant. Here one kernel serves
# all ranges and seeds.
@triton.jit(do_not_specialize=["start", "stop", "seed"])
def _count_kernel(
    total, start, stop, seed,
    GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, MASK_31: tl.constexpr, RADIUS_SQUARED: tl.constexpr,
    BLOCK: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    first = start + tl.program_id(0).to(tl.int64) * (BLOCK * SLICES)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    inside = tl.zeros([BLOCK], dtype=tl.int32)
    for s in range(SLICES):
        i = first + s * BLOCK + lane
        z = seed.to(tl.uint64) + (i + 1).to(tl.uint64) * GOLDEN
        z = (z ^ (z >> 30)) * MIX_1
        z = (z ^ (z >> 27)) * MIX_2
        z = z ^ (z >> 31)
        x = z >> 33
        y = z & MASK_31
        hit = (x * x + y * y < RADIUS_SQUARED) & (i < stop)
        inside += hit.to(tl.int32)
    tl.atomic_add(total, tl.sum(inside.to(tl.int64), axis=0))


def count(start: int, stop: int, seed: int, device: torch.device | str | None = None) -> int:
    """Count the points from ``start`` to ``stop - 1`` that lie inside, on this rank's GPU or on ``device``."""
    if stop <= start:
        return 0
    if device is None:
        from dtlib.world import init

        device = init().device
    total = torch.zeros(1, dtype=torch.int64, device=device)
    # The same 64 bits as a signed integer, which all versions of Triton's launcher accept.
    signed_seed = seed - 2**64 if seed >= 2**63 else seed
    _count_kernel[(triton.cdiv(stop - start, BLOCK * SLICES),)](
        total, start, stop, signed_seed,
        GOLDEN=GOLDEN, MIX_1=MIX_1, MIX_2=MIX_2, MASK_31=MASK_31, RADIUS_SQUARED=RADIUS_SQUARED,
        BLOCK=BLOCK, SLICES=SLICES,
    )  # fmt: skip
    return int(total.item())
