"""Starting: ranks that are forked from a zygote that waits, against ranks that are started one by one.

Seconds and CPU seconds until four engines are there and until their first sum of tensors, of a script, and of a restart
after a fault. CPU seconds are those of the whole machine, so measure on a quiet one. MB are of one of the engines after
that sum: PSS counts memory that several share in parts. The zygote's own start has a row to itself, against one `import
torch`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.compare import Row, row
from benchmarks.recovery import CASES, seconds_of
from dtlib.lab.course import LEFT_BEHIND, PROFILE
from dtlib.lab.course import folder as workshop_folder
from dtlib.world import forking
from dtlib.world.launch import find_mpiexec, forked_ranks, python_of_a_rank, run_ranks

RANKS = 0  # it starts them itself
REPEATS = 10
QUIET_SECONDS = 15  # in which the zygote does what it puts off
IMPORT = [sys.executable, "-c", "import torch"]
SUM = "import torch, dtlib; dtlib.init().comm.all_reduce(torch.ones(1000))"
ENGINES = """
import json, sys, time, psutil
from dtlib.lab.engines.engine_set import engines
from dtlib.world.machine import usable_cores
import ipyparallel  # a notebook of `dtlib lab` has it
def spent():
    times = psutil.cpu_times()
    return times.user + times.system
began, cpu = time.perf_counter(), spent()
ranks = engines(4, profile=sys.argv[1])
there = time.perf_counter() - began, spent() - cpu
ranks.view.execute(sys.argv[2])
first = time.perf_counter() - began, spent() - cpu
memory = [psutil.Process(pid).memory_full_info() for pid in ranks.view.apply_sync(__import__("os").getpid)]
sizes = [max(m.uss for m in memory) / 1e6, max(m.pss for m in memory) / 1e6]
ranks.end()
print("\\n" + json.dumps([*there, *first, *sizes]))
"""


@dataclass
class StartRow(Row):
    """Beside the ratio of seconds: CPU seconds, private memory and PSS of a rank in MB, ours and the peer's."""

    ours_cpu: float = float("nan")
    peer_cpu: float = float("nan")
    private: float = float("nan")
    peer_private: float = float("nan")
    pss: float = float("nan")
    peer_pss: float = float("nan")


def rows(_, repeats: int):
    if why := forking.why_not(find_mpiexec()):
        raise SystemExit(f"benchmarks start: ranks are started one by one here: {why}.")
    yield compared("a zygote", "one import of torch", start_a_zygote, lambda: cpu_of(IMPORT), repeats)
    with forked_ranks():
        time.sleep(QUIET_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            found = {way: np.array([engines(way, folder) for _ in range(repeats)]) for way in (ours, plain)}
        for case, column in {"engines: four ranks": 0, "engines: first sum of tensors": 2}.items():
            a, b = found[ours], found[plain]
            yield StartRow(
                **vars(row(case, "one by one", a[:, column], b[:, column])),
                ours_cpu=np.median(a[:, column + 1]), peer_cpu=np.median(b[:, column + 1]),
                private=np.median(a[:, 4]), peer_private=np.median(b[:, 4]),
                pss=np.median(a[:, 5]), peer_pss=np.median(b[:, 5]),
            )  # fmt: skip
        for ranks in (1, 2, 4):
            both = (partial(script, way, ranks) for way in (ours, plain))
            yield compared(f"script on {ranks}", "one by one", *both, repeats)
        yield compared("restart after a fault", "one by one", lambda: restart(ours), lambda: restart(plain), repeats)


@contextmanager
def ours():
    yield


@contextmanager
def plain():
    before = os.environ[forking.VARIABLE]
    os.environ[forking.VARIABLE] = "off"
    try:
        yield
    finally:
        os.environ[forking.VARIABLE] = before


def spent() -> float:
    times = psutil.cpu_times()
    return times.user + times.system


def compared(case, peer, first, second, repeats) -> StartRow:
    a, b = np.array([first() for _ in range(repeats)]), np.array([second() for _ in range(repeats)])
    made = StartRow(**vars(row(case, peer, a[:, 0], b[:, 0])))
    return replace(made, ours_cpu=np.median(a[:, 1]), peer_cpu=np.median(b[:, 1]))


def cpu_of(command) -> tuple[float, float]:
    began, cpu = time.perf_counter(), spent()
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return time.perf_counter() - began, spent() - cpu


def start_a_zygote() -> tuple[float, float]:
    """Until it has forked its first."""
    with forked_ranks():
        return cpu_of([*python_of_a_rank(), "-c", "pass"])


def script(way, ranks: int) -> tuple[float, float]:
    with way():
        began, cpu = time.perf_counter(), spent()
        if status := run_ranks(["-c", SUM], ranks):
            raise RuntimeError(f"status {status}")
        return time.perf_counter() - began, spent() - cpu


def restart(way) -> tuple[float, float]:
    with way():
        cpu = spent()
        return seconds_of(CASES["restart all ranks from the checkpoint"]), spent() - cpu


def engines(way, folder) -> list[float]:
    profile = Path(folder) / "profile_local_mpi"
    ignore = shutil.ignore_patterns(*LEFT_BEHIND)
    shutil.copytree(workshop_folder() / PROFILE, profile, ignore=ignore, dirs_exist_ok=True)
    command = [sys.executable, "-c", ENGINES, str(profile), SUM]
    with way():
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(said.stdout.splitlines()[-1])
