"""How fast is Monte Carlo pi: a compiled loop against numpy, two ranks against one, and an article's claims."""

import csv

from benchmarks.compare import Row, compare
from dtlib import pi
from dtlib.lab.course import folder
from dtlib.world.machine import gpu_names

RANKS = 2
POINTS = 2 * 10**8
CLAIMED_POINTS = 10**8


def rows(world, repeats: int):
    """The comparisons, on two ranks. Where one rank is measured the other waits, asleep."""
    comm = world.comm

    def alone(kernel, points):
        return lambda: kernel(0, points) if comm.rank == 0 else None

    few = POINTS // 10
    yield compare(
        comm, "compiled kernel, one core", "numpy by blocks, same points",
        alone(pi.count_compiled, few), alone(pi.count_numpy, few), repeats,
    )  # fmt: skip
    two = compare(
        comm, "two ranks", "one rank",
        lambda: pi.count_on_ranks(POINTS, comm), alone(pi.count_compiled, POINTS), repeats,
    )  # fmt: skip
    yield two
    if gpu_names():
        many = 10**11
        pi.count_gpu(0, 1)
        yield compare(
            comm, f"{gpu_names()[0]}, {many:.0e} points", f"one core, {few:.0e} points",
            alone(pi.count_gpu, many), alone(pi.count_compiled, few), repeats,
        )  # fmt: skip
    yield from _claims(two)


def _claims(two: Row):
    """The article's claims for 10^8 points beside what was measured here; claims, not measurements."""
    fraction = CLAIMED_POINTS / POINTS
    ours = {1: two.peer_seconds * fraction, 2: two.ours_seconds * fraction}
    with open(folder() / "data" / "claims.csv") as file:
        claims = [row for row in csv.DictReader(file) if "OpenMPI" in row["source"] and row["unit"] == "s"]
    for (ranks, seconds), claim in zip(ours.items(), claims, strict=True):
        claimed = float(claim["figure"])
        spread = [seconds / claimed] * 3
        yield Row(f"{ranks} rank{'s' * (ranks > 1)}, 1e8 points", f"CLAIM: {claim['claim']}", *spread, seconds, claimed)
