"""Processes: told apart for certain, and ended without a remainder."""

import os
import sys
import time
from collections import defaultdict
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
        return cls(pid, look(pid)[2])

    def find(self) -> psutil.Process | None:
        """The process if it lives; None once it has ended, even if nobody has collected its status."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if look(self.pid)[2] == self.created and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def look(pid: int) -> tuple[str, int, float]:
    """A process's name, its parent, and when it started.

    On Linux that is in ticks since the machine did, as the time of day may be set meanwhile.

    Raises:
        psutil.Error: where it has ended, or may not be looked at.
    """
    if sys.platform != "linux":
        process = psutil.Process(pid)
        return process.name(), process.ppid(), process.create_time()
    try:
        begin, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        raise psutil.NoSuchProcess(pid) from None
    fields = rest.split()  # from the third on
    return begin.partition("(")[2], int(fields[1]), float(fields[19])


def with_descendants(process: Process) -> list[Process]:
    """A process and all that it has started, down to the last generation, with the ranks that were forked for it."""
    if process.find() is None:
        return []
    known, started, family = {}, defaultdict(list), [process.pid]
    for pid in psutil.pids():  # looked at once: on a hub there are hundreds
        with suppress(psutil.Error, ValueError):  # any user may call a process so
            name, parent, created = look(pid)
            known[pid] = Process(pid, created)
            started[parent].append(pid)
            if name.startswith(STANDS_FOR):
                started[pid].append(int(name.removeprefix(STANDS_FOR)))
    for member in family:  # it grows meanwhile
        family += [pid for pid in started[member] if pid in known and pid not in family]
    return [process, *(known[pid] for pid in family[1:])]


def in_groups_of(processes: list[Process]) -> list[Process]:
    """Who is in a process group that one of these leads or, having ended, has led."""
    found, leaders = [], {process.pid for process in processes}
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getpgid(pid) in leaders:
                found.append(Process.of(pid))
    return found


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
