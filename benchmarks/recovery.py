"""Three recoveries: seconds from the kill of one of four ranks to the next step that had not been done before.

Start all again: from a checkpoint that is three steps old, by mpiexec anew, so most of it is the start of four
processes that import torch. The other two go on in processes that are there.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import Row, row
from dtlib.recovery import Run, supervise
from dtlib.recovery.journal import seconds_to_go_on

RANKS = 0  # it starts them itself
KILLED = {"kind": "kill", "rank": 2, "step": 8, "at": "begin"}
OPTIONS = {"steps": 12, "every": 5, "time_limit": 60, "faults": [KILLED]}
CASES = {
    "start all again from the checkpoint": {"by": "checkpoint"},
    "commit and restore in memory": {"by": "memory"},
    "shrink and go on": {"by": "shrink"},
    "start all again, runtime dtlib": {"by": "engine", "runtime": "dtlib"},
    "start all again, runtime torch": {"by": "engine", "runtime": "torch"},
}
PAIRS = (
    ("shrink and go on", "start all again from the checkpoint"),
    ("commit and restore in memory", "start all again from the checkpoint"),
    ("shrink and go on", "commit and restore in memory"),
    ("start all again, runtime dtlib", "start all again, runtime torch"),
)


def rows(_, repeats: int) -> list[Row]:
    seconds = {name: [] for name in CASES}
    for repeat in range(repeats):
        for name in list(CASES)[:: 1 if repeat % 2 else -1]:
            seconds[name].append(seconds_of(CASES[name]))
    return [row(ours, theirs, np.array(seconds[ours]), np.array(seconds[theirs])) for ours, theirs in PAIRS]


def seconds_of(case: dict) -> float:
    """Of one run of this kind."""
    program = ["-m", "dtlib.lab.lessons.l11b.training", json.dumps(OPTIONS | case)]
    with tempfile.TemporaryDirectory() as folder:
        if case["by"] in ("memory", "shrink"):
            runs = [Run(program, 4, Path(folder), survive=True).start()]
            if runs[0].wait(120):
                raise RuntimeError(f"{runs[0].said} {runs[0].output()}")
        else:
            runs = supervise(program, 4, folder, say=lambda sentence: None)
    return seconds_to_go_on([event for run in runs for event in run.events])[0]
