"""Two ways to do the same thing, timed in turns on the same ranks.

Machines are shared and noisy, so absolute times mean little. A ratio of two times taken one right after the other
means more, and the median of thirty such ratios means something:

    repeat 1   ours peer        ratio 1
    repeat 2   peer ours        ratio 2      the order alternates: neither is always first
    ...
"""

import time
from dataclasses import dataclass

import numpy as np

REPEATS = 30


@dataclass
class Row:
    """One comparison: ``ratio`` is our time over the peer's, its quartiles beside it; seconds are medians."""

    case: str
    peer: str
    ratio: float
    low: float
    high: float
    ours_seconds: float
    peer_seconds: float


def compare(comm, case: str, peer: str, ours, theirs, repeats: int = REPEATS) -> Row:
    """Time ``ours()`` and ``theirs()`` in turns; all ranks of ``comm`` call this, and both functions, together."""
    seconds = in_turns(comm, {"ours": ours, "theirs": theirs}, repeats)
    return row(case, peer, seconds["ours"], seconds["theirs"])


def in_turns(comm, functions: dict, repeats: int = REPEATS) -> dict:
    """Seconds of each function, an array of ``repeats``; every other time they run in the reverse order."""
    timed = {name: [] for name in functions}
    for function in functions.values():
        function()  # warm up: caches, compilers, connections
    for repeat in range(repeats):
        for name in list(functions)[:: 1 if repeat % 2 else -1]:
            timed[name].append(seconds_of(comm, functions[name]))
    return {name: np.array(seconds) for name, seconds in timed.items()}


def repeated(function, times: int):
    """A function that does something quick several times, as the noise of one time would be as large as it."""

    def several():
        for _ in range(times):
            function()

    return several


def row(case: str, peer: str, ours, theirs) -> Row:
    """The ratio of two arrays of seconds, paired."""
    low, ratio, high = np.percentile(ours / theirs, (25, 50, 75))
    return Row(case, peer, ratio, low, high, float(np.median(ours)), float(np.median(theirs)))


def seconds_of(comm, function) -> float:
    """Time from the moment when all ranks start until the last one has finished."""
    comm.barrier()
    began = time.perf_counter()
    function()
    took = np.array([time.perf_counter() - began])
    return float(comm.all_reduce(took, op="max")[0])
