"""Processes: told apart for certain, and ended without a remainder."""

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Process:
    """A process that cannot be confused with a later one of the same id."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process if it lives; None once it has ended, even if nobody has collected its status."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def with_descendants(process: Process) -> list[Process]:
    """A process and all that it has started, down to the last generation."""
    found = process.find()
    if found is None:
        return []
    family = [process]
    with suppress(psutil.Error):
        for child in found.children(recursive=True):
            with suppress(psutil.Error):
                family.append(Process(child.pid, child.create_time()))
    return family


def end_processes(processes: list[Process], patience: float = 3.0) -> None:
    """End these processes: politely first, then for certain."""
    for polite in (True, False):
        living = [found for process in processes if (found := process.find())]
        for process in living:
            with suppress(psutil.Error):
                process.terminate() if polite else process.kill()
        deadline = time.monotonic() + patience
        while any(process.find() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
