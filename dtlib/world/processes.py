"""Processes: told apart for certain, and ended without a remainder."""

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

STANDS_FOR = "rank is "  # the name of a process that stands for a forked rank, and that one's number (launcher.c)


@dataclass(frozen=True)
class Process:
    """A process that cannot be confused with a later one of the same id: ``created`` says when it started."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, _created(pid))

    def find(self) -> psutil.Process | None:
        """The process if it lives; None once it has ended, even if nobody has collected its status."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if _created(self.pid) == self.created and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def _created(pid: int) -> float:
    """When a process started: on Linux in ticks since the machine did, as the time of day may be set meanwhile."""
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return float(after_name.split()[19])  # field 22 of the line, of which the first two are cut off


def with_descendants(process: Process) -> list[Process]:
    """A process and all that it has started, down to the last generation, with the ranks that were forked for it."""
    found = process.find()
    if found is None:
        return []
    family, members = [], [found]
    with suppress(psutil.Error):
        members += found.children(recursive=True)
    for member in members:
        with suppress(psutil.Error):
            family.append(Process.of(member.pid))
            if member.name().startswith(STANDS_FOR):
                family += with_descendants(Process.of(int(member.name().removeprefix(STANDS_FOR))))
    return family


def listening(process: Process) -> list[tuple[str, str, int]]:
    """Name, address and port of what a process and its descendants listen on, as far as this user may look."""
    found = []
    for member in with_descendants(process):
        with suppress(psutil.Error):
            look = psutil.Process(member.pid)
            sockets = look.net_connections(kind="inet")
            found += [(look.name(), *each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN]
    return found


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
