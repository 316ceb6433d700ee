import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from dtlib import pi
from tests.cases import refuses
from tests.ranks import on_ranks

# The first outputs of SplitMix64 for seed 0, as its authors' reference program prints them.
REFERENCE = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
RANGES = [(0, 0), (0, 1), (5, 5), (0, 1000), (999, 20_003)]
SEEDS = [0, 1, 2**63, 2**64 - 1, -1]


def test_the_generator_is_splitmix64():
    for i, word in enumerate(REFERENCE):
        assert pi.point(i) == (word >> 33, word & (2**31 - 1))


@pytest.mark.parametrize("start,stop", RANGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_kernel_counts_the_same_points(start, stop, seed):
    expected = pi.count_loop(start, stop, seed)
    assert pi.count_compiled(start, stop, seed) == expected
    for block in (1, 7, 1000, 2**20) if stop - start < 2000 else (1000, 2**20):
        assert pi.count_numpy(start, stop, seed, block) == expected


def test_far_along_the_counter():
    start = 2**62 - 3
    assert (
        pi.count_numpy(start, start + 1000)
        == pi.count_loop(start, start + 1000)
        == pi.count_compiled(start, start + 1000)
    )


@pytest.mark.parametrize("kernel", [pi.count_numpy, pi.count_compiled])
def test_ten_million_points_are_the_same_on_any_number_of_slices(kernel):
    points = 10**7
    expected = 7_853_104  # what the plain loop counts, run once
    for size in (1, 2, 3, 5):
        assert sum(kernel(*pi.slice_of(points, rank, size)) for rank in range(size)) == expected


@pytest.mark.parametrize("points", [0, 1, 2, 10, 1001])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_slices_meet_and_differ_by_one_at_most(points, size):
    slices = [pi.slice_of(points, rank, size) for rank in range(size)]
    assert slices[0][0] == 0 and slices[-1][1] == points
    assert all(before[1] == after[0] for before, after in itertools.pairwise(slices))
    lengths = [stop - start for start, stop in slices]
    assert max(lengths) - min(lengths) <= 1


@on_ranks(1, 2, 3, 4)
def test_ranks_count_what_one_process_counts(world):
    for points in (1, 2, 12_347):
        expected = pi.count_loop(0, points, seed=5)
        for kernel in (pi.count_loop, pi.count_numpy, pi.count_compiled):
            assert pi.count_on_ranks(points, world.comm, kernel, seed=5) == expected


@on_ranks(1, 3)
def test_progress_reaches_the_total_and_does_not_change_the_count(world):
    from dtlib.measure.progress import RankProgress

    with RankProgress(world.comm, 3_000_000) as progress:
        inside = pi.count_on_ranks(3_000_000, world.comm, progress=progress)
    assert inside == pi.count_numpy(0, 3_000_000)
    assert progress.done == (3_000_000 if world.rank == 0 else 0)


@on_ranks(1, 2, 3)
def test_ranks_read_their_slice_of_a_file(world, tmp_path):
    path = tmp_path / "points.bin"
    if world.rank == 0:
        pi.write_points(path, 10_001, seed=9)
    world.comm.barrier()
    estimate = pi.count_file(path, world.comm)
    assert estimate == pi.Estimate(10_001, pi.count_loop(0, 10_001, seed=9))


@on_ranks(2)
def test_a_file_that_holds_no_points_is_refused(world, tmp_path):
    broken = tmp_path / f"broken-{world.rank}"
    broken.write_bytes(b"1234567")
    for path, words in ((broken, "7 bytes"), (tmp_path / "missing", "cannot be read"), (tmp_path, "ordinary")):
        refuses(words, pi.count_file, path, world.comm)


def test_the_standard_error_is_the_scatter_over_seeds():
    # 400 estimates measure their own standard deviation to 1/sqrt(2 * 400) = 3.5 %; 12 % is beyond three of these.
    runs = [pi.Estimate(10_000, pi.count_compiled(0, 10_000, seed)) for seed in range(400)]
    errors = np.array([run.pi - math.pi for run in runs])
    assert errors.std() == pytest.approx(runs[0].standard_error, rel=0.12)
    assert abs(errors.mean()) < 4 * runs[0].standard_error / math.sqrt(len(runs))


@pytest.mark.slow
def test_the_gpu_kernel_counts_the_same_points_in_tritons_interpreter():
    """The kernel's arithmetic, without a GPU: Triton can interpret it on the CPU."""
    pytest.importorskip("triton", reason="needs Triton (0.7 GB; .ci/run has it): pip install -e '.[triton]'")
    program = (
        "from dtlib import pi; from dtlib.pi import gpu; a, b, s = 12345, 300001, 2**63 + 5;"
        "assert gpu.count(a, b, s, device='cpu') == pi.count_numpy(a, b, s)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize("start,stop", [*RANGES, (0, 10**8)])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_gpu_counts_the_same_points(start, stop, seed):
    assert pi.count_gpu(start, stop, seed) == pi.count_compiled(start, stop, seed)
