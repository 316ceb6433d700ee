"""Three recoveries: seconds from the kill of one of four ranks to the next step that had not been done before.

Restart all ranks: from a checkpoint that is three steps old, by mpiexec anew, so most of it is the start of four
processes that import torch. That under each runtime, too, in float32, as DeepSpeed has no float64. The other two
recoveries go on in processes that are there. Each is compared with the first.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import Row, row
from benchmarks.peers import deepspeed_is_installed
from dtlib.recovery import Run, supervise
from dtlib.recovery.journal import recovery_seconds

RANKS = 0  # it starts them itself
REPEATS = 3  # each starts some forty processes that import torch
LIMIT = 120.0  # seconds of a run
KILLED = {"kind": "kill", "rank": 2, "step": 8, "at": "begin"}
OPTIONS = {"steps": 10, "every": 5, "time_limit": 60, "faults": [KILLED]}
CASES = {
    "restart all ranks from the checkpoint": {"by": "checkpoint"},
    "commit and restore in memory": {"by": "memory"},
    "shrink and continue": {"by": "shrink"},
    **{
        f"restart all ranks, runtime {runtime}": {"by": "engine", "runtime": runtime, "dtype": "float32"}
        for runtime in ("dtlib", "torch", "deepspeed")
    },
}


def rows(_, repeats: int) -> list[Row]:
    cases = {name: case for name, case in CASES.items() if "deepspeed" not in name or deepspeed_is_installed()}
    seconds = {name: [] for name in cases}
    for repeat in range(repeats):
        for name in list(cases)[:: 1 if repeat % 2 else -1]:
            seconds[name].append(seconds_of(cases[name]))
    first, *others = cases
    return [row(name, first, np.array(seconds[name]), np.array(seconds[first])) for name in others]


def seconds_of(case: dict) -> float:
    """Of one run of this kind."""
    program = ["-m", "dtlib.lessons.l11b.training", json.dumps(OPTIONS | case)]
    with tempfile.TemporaryDirectory() as folder:
        if case["by"] in ("memory", "shrink"):
            runs = [Run(program, 4, Path(folder), survive=True).start()]
            if runs[0].wait(LIMIT):
                raise RuntimeError(f"{runs[0].reports} {runs[0].output()}")
        else:
            runs = supervise(program, 4, folder, say=lambda sentence: None)
    return recovery_seconds([event for run in runs for event in run.events])[0]
