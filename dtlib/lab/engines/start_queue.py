"""Many learners on one machine: starts of engines queue, and time limits grow with the load.

The process that starts engines shows its state as its process name, which every user can read. So no shared file is
needed, and a process that dies leaves the queue.
"""

import ctypes
import os
import sys
import time

import psutil

from dtlib.world.machine import usable_cores
from dtlib.world.processes import Process, read_process

WAITS, STARTS, KEEPS = "dtlib: waits", "dtlib: starts", "dtlib: keeps"  # Linux allows 15 letters
PR_SET_NAME = 15
LONGEST_START, LONGEST_WAIT = 120, 900  # seconds; limits for one start and for the queue
LARGEST_LOAD_FACTOR = 8


def name_this_process(name: str) -> None:
    """Set this process's name, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def load_factor() -> float:
    """Return the factor by which a start may take longer than on an idle machine."""
    return min(LARGEST_LOAD_FACTOR, max(1.0, os.getloadavg()[0] / usable_cores()))


class Limit:
    """A time limit of ``seconds``, which grows with the load of the machine."""

    def __init__(self, seconds: float):
        self.seconds, self._began = seconds, time.monotonic()

    def passed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Return whether the limit has passed."""
        return self.passed() > self.seconds * load_factor()


class Queue:
    """This process's place among all processes, of all users, that start engines on this machine."""

    def __init__(self, at_once: int | None = None):
        self.at_once = at_once or max(1, usable_cores() // 2)
        self._me = Process.of(os.getpid())
        self._began = time.monotonic()
        self._seen: dict[tuple[int, float], float] = {}  # process that starts -> time when it was first seen

    def before(self) -> int:
        """Return the number of earlier processes in the queue, or 0 if this one may start."""
        now, before = time.monotonic(), 0
        if now - self._began > LONGEST_WAIT:
            return 0
        for pid in psutil.pids() if sys.platform == "linux" else ():
            try:
                name, _, created = read_process(pid)
            except psutil.Error:
                continue
            if name not in (WAITS, STARTS) or (created, pid) >= (self._me.created, self._me.pid):
                continue
            if name == WAITS or now - self._seen.setdefault((pid, created), now) < LONGEST_START:
                before += 1
        return before if before >= self.at_once else 0
