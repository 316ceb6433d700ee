"""Identify processes safely, and end them with all their descendants."""

import os
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# A launcher renames itself to this and the id of its forked rank (launcher.c).
LAUNCHER_PREFIX = "rank is "


@dataclass(frozen=True)
class Process:
    """A process that cannot be confused with a later one of the same id, because ``created`` holds its start time."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Return the running process with this id."""
        return cls(pid, read_process(pid)[2])

    def find(self) -> psutil.Process | None:
        """Return the process if it is alive; None once it has ended, even if its parent has not read its status."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if read_process(self.pid)[2] == self.created and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def read_process(pid: int) -> tuple[str, int, float]:
    """Return a process's name, its parent's id, and its start time.

    On Linux the start time is in ticks since boot, because the time of day may be changed meanwhile.

    Raises:
        psutil.Error: if the process has ended, or if this user may not read it.
    """
    if sys.platform != "linux":
        process = psutil.Process(pid)
        return process.name(), process.ppid(), process.create_time()
    try:
        begin, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        raise psutil.NoSuchProcess(pid) from None
    fields = rest.split()  # from the third field on
    return begin.partition("(")[2], int(fields[1]), float(fields[19])


def with_descendants(process: Process) -> list[Process]:
    """Return a process and all its descendants, including ranks that were forked for it."""
    if process.find() is None:
        return []
    known, started, family = {}, defaultdict(list), [process.pid]
    for pid in psutil.pids():  # one pass only: a hub has hundreds of processes
        with suppress(psutil.Error, ValueError):  # any user may give a process such a name
            name, parent, created = read_process(pid)
            known[pid] = Process(pid, created)
            started[parent].append(pid)
            if name.startswith(LAUNCHER_PREFIX):
                started[pid].append(int(name.removeprefix(LAUNCHER_PREFIX)))
    for member in family:  # the list grows during the loop
        family += [pid for pid in started[member] if pid in known and pid not in family]
    return [process, *(known[pid] for pid in family[1:])]


def in_groups_of(processes: list[Process]) -> list[Process]:
    """Return processes in process groups whose leader is in ``processes``, even if the leader has ended."""
    found, leaders = [], {process.pid for process in processes}
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getpgid(pid) in leaders:
                found.append(Process.of(pid))
    return found


def listening(process: Process) -> list[tuple[str, str, int]]:
    """Return name, address and port of all listening sockets of a process and its descendants.

    Processes that this user may not read are left out.
    """
    found = []
    for member in with_descendants(process):
        with suppress(psutil.Error):
            observed = psutil.Process(member.pid)
            sockets = observed.net_connections(kind="inet")
            found += [(observed.name(), *each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN]
    return found


def end_processes(processes: list[Process], load_factor: float = 3.0) -> None:
    """End these processes: send SIGTERM, wait ``load_factor`` seconds, then send SIGKILL."""
    for polite in (True, False):
        living = [found for process in processes if (found := process.find())]
        for process in living:
            with suppress(psutil.Error):
                process.terminate() if polite else process.kill()
        deadline = time.monotonic() + load_factor
        while any(process.find() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
