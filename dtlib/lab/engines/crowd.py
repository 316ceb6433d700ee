"""Many learners on one machine: their starts wait for one another, and time limits grow with the load.

A keeper's process has a name that says what it does, and every user can read it: nobody writes where others could, and
who dies is out of the queue.
"""

import ctypes
import os
import sys
import time

import psutil

from dtlib.world.machine import usable_cores
from dtlib.world.processes import Process, look

WAITS, STARTS, KEEPS = "dtlib: waits", "dtlib: starts", "dtlib: keeps"  # at most 15 letters
PR_SET_NAME = 15
LONGEST_START, LONGEST_WAIT = 120, 900  # seconds; nobody waits longer, whatever others do
MOST_PATIENCE = 8


def name_this_process(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def patience() -> float:
    """How many times longer than on an idle machine a start may take here and now."""
    return min(MOST_PATIENCE, max(1.0, os.getloadavg()[0] / usable_cores()))


class Limit:
    """So many seconds, or more as the load grows."""

    def __init__(self, seconds: float):
        self.seconds, self._began = seconds, time.monotonic()

    def passed(self) -> float:
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        return self.passed() > self.seconds * patience()


class Queue:
    """The turn of this process among those that start engines on this machine, whoever's they are."""

    def __init__(self, at_once: int | None = None):
        self.at_once = at_once or max(1, usable_cores() // 2)
        self._me = Process.of(os.getpid())
        self._began = time.monotonic()
        self._seen: dict[tuple[int, float], float] = {}  # process that starts -> since when

    def before(self) -> int:
        """How many are before this one; 0 once it may start."""
        now, before = time.monotonic(), 0
        if now - self._began > LONGEST_WAIT:
            return 0
        for pid in psutil.pids() if sys.platform == "linux" else ():
            try:
                name, _, created = look(pid)
            except psutil.Error:
                continue
            if name not in (WAITS, STARTS) or (created, pid) >= (self._me.created, self._me.pid):
                continue
            if name == WAITS or now - self._seen.setdefault((pid, created), now) < LONGEST_START:
                before += 1
        return before if before >= self.at_once else 0
