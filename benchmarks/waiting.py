"""How much of a core do four ranks take that wait for ten seconds: against the twentieth that they may have."""

import time

import numpy as np

from benchmarks.compare import row

RANKS = 4
SECONDS = 10.0
FRACTION = 0.05


def rows(world, repeats: int):
    """One wait takes ten seconds, so a tenth of the repeats."""
    used = np.array([_seconds_of_cpu(world.comm) for _ in range(max(1, repeats // 10))])
    yield row(f"CPU time of {world.size} ranks in {SECONDS:g} s", f"{FRACTION:.0%} of a core", used, FRACTION * SECONDS)


def _seconds_of_cpu(comm) -> float:
    """Rank 0 sleeps and the others wait for it; seconds of all ranks together."""
    comm.barrier()
    began = time.process_time()
    if comm.rank == 0:
        time.sleep(SECONDS)
    comm.barrier()
    return sum(comm.all_gather_object(time.process_time() - began))
