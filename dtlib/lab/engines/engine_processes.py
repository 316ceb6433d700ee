"""Start, interrupt and end the processes of a set of engines, and find out why they ended."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.lab.engines import start_queue
from dtlib.lab.engines.workshop import Record
from dtlib.lab.foreign import Client
from dtlib.world.launch import check_mpiexec, find_mpiexec, python_of_a_rank
from dtlib.world.processes import Process, end_processes, with_descendants

START_SECONDS = 60
NOT_INTERRUPTED = "Some ranks do not react to the interrupt: run lab.engines(restart=True) to start new ranks."


def start_keeper(record: Record, ranks: int, say: Callable = lambda how_far: None) -> None:
    """Start a keeper, and wait until it has recorded where the engines are; call ``say`` with the progress.

    Raises:
        DtlibError: if the keeper or the engines do not start.
    """
    if "$" in str(record.profile):
        raise DtlibError(
            f"Engines cannot run in {record.profile}: ipyparallel reads $ as a variable, so rename that folder."
        )
    check_mpiexec(find_mpiexec())
    log = record.profile / "log"
    command = [*python_of_a_rank(), "-m", "dtlib.lab.engines.keeper", str(record.profile), str(ranks)]
    try:
        log.mkdir(mode=0o700, exist_ok=True)
        with open(log / "keeper.log", "w") as output:
            status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
        said = (log / "keeper.log").read_text(errors="replace").split("\n") if status else []
    except OSError as problem:
        raise DtlibError(
            f"The process that starts the engines cannot be started ({problem}): free disk space and memory, or run "
            "`dtlib doctor`."
        ) from None
    if status:
        last = next(filter(None, map(str.strip, reversed(said))), f"exit status {status}")
        raise DtlibError(
            f"The process that starts the engines ended immediately ({last}): fix this, or run `dtlib doctor`; "
            f"{log / 'keeper.log'} has its complete output."
        )
    import ipyparallel  # noqa: F401  (takes half a second, which the keeper needs too)

    limit = start_queue.Limit(START_SECONDS)
    while not (note := record.read("set.json")).get("connection"):
        if reason := note.get("error"):
            record.remove("set.json")
            raise DtlibError(reason)
        if before := note.get("before"):
            limit = start_queue.Limit(START_SECONDS)
            say(f"{before} other{'s' * (before > 1)} on this machine start{'s' * (before == 1)} first")
        else:
            say("their controller starts")
        if not record.keeper() or limit.is_over():
            why = f"see {log / 'keeper.log'}" if (log / "keeper.log").stat().st_size else f"look into {log}"
            raise DtlibError(f"The engines did not start: {why}, or run the cell again.")
        time.sleep(0.02)


def end(record: Record) -> None:
    """End the running or remaining engines with all their child processes."""
    note = record.read("set.json")
    known = [Process(**process) for process in [note.get("keeper"), *note.get("processes", [])] if process]
    family = dict.fromkeys(member for process in known for member in with_descendants(process))
    if record.keeper():
        end_processes([known[0]])  # the keeper then ends its own processes
    end_processes(list(family))
    record.remove("set.json")


def interrupt(client: Client, places: list[tuple[str, int]]) -> None:
    """Interrupt the ranks at ``places``, (host, process id) each, as Ctrl-C would."""
    if any(host != socket.gethostname() for host, _ in places):
        client.send_signal(signal.SIGINT, block=True)  # by the helper process beside each rank
        return
    for _, pid in places:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGINT)


def why_ended(profile: Path) -> str:
    """Return mpiexec's report on the first rank that ended, from the log of the engines."""
    logs = sorted((profile / "log").glob("ipengine-*.log"), key=lambda path: path.stat().st_mtime)
    said = " ".join(logs[-1].read_text(errors="replace").split()) if logs else ""
    if found := re.search(r"process rank (\d+) .{0,200}?exited on signal (\d+) \(([^)]+)\)", said):
        rank, number, name = found.groups()
        return f"Rank {rank} was ended by signal {number} ({name}), and an MPI world ends with any of its ranks"
    return "The ranks have ended"
