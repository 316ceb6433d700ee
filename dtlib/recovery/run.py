"""Start a training program on ranks, watch it, and report why it ended.

    event                                source                              reported
    a rank raised an error               its last line in the journal        the error message, and the rank
    a rank was killed, or crashed        mpiexec; with ULFM, its process     the signal, and its likely cause
    a rank is stopped (SIGSTOP)          the state of its process            it counts as alive; how to continue it
    a node lost its connection           mpiexec, from its daemon there      the node; mpiexec's status may still be 0
    a rank is slow                       compute times, sent in each step    how many times slower than the others

``Run.reports`` has the reports in the order of the events.
"""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dtlib.recovery import journal
from dtlib.world.launch import start_ranks
from dtlib.world.processes import Process, end_processes, with_descendants

CHECK_SECONDS = 0.02
STOPPED_SECONDS = 3.0
CAUSES: dict[int, str] = {
    signal.SIGKILL: "kill -9, or the system, which had no memory left (`dmesg` says so)",
    signal.SIGTERM: "another program asked it to end, such as a scheduler at the time limit",
    signal.SIGSEGV: "it accessed memory that does not belong to it: a bug in a library",
    signal.SIGBUS: "a mapped file was removed, or /dev/shm is full",
    signal.SIGABRT: "it aborted; its output before says why",
}
BY_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)")
BY_STATUS = re.compile(r"Process name: \[\S+,(\d+)\]\s+Exit code:\s+(\d+)")
BY_NODE = re.compile(r"lost communication with a remote daemon.*?Remote daemon\s*: \S+ on node (\S+)", re.DOTALL)


@dataclass
class Run:
    """One run of a training program under mpiexec.

    Args:
        program: the arguments of Python. ``folder`` is added as the last one, and the program writes a journal there.
        ranks: the number of ranks.
        folder: created if it does not exist.
        survive: whether the other ranks continue if a rank dies (ULFM).
        say: is called with each report, as soon as the event is noticed.
        processes: the processes by world rank, from the journal.
        events: the events of the journal so far.
        reports: the reports so far.
        lost: the ranks that have died.
        status: None until the run is over; then mpiexec's exit status, or 1 if it is 0 although ranks have failed.
    """

    program: list[str]
    ranks: int
    folder: Path
    survive: bool = False
    say: Callable[[str], object] = lambda sentence: None
    processes: dict[int, Process] = field(default_factory=dict)
    events: list[dict] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    status: int | None = None

    def start(self) -> "Run":
        """Start mpiexec and return at once; output of the ranks goes to a temporary file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read = journal.read(self.folder)[1]  # skip the events of earlier runs
        self._stopped: dict[int, float] = {}  # rank -> time since which it is stopped
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (``output`` reads it as long as the run exists)
        self.mpiexec = start_ranks(
            [*self.program, str(self.folder)], self.ranks, self.survive, stderr=self._errors, stdout=self._errors
        )
        return self

    def poll(self) -> list[dict]:
        """Return the journal's events since the last call, and report them; set ``status`` if the run is over."""
        over = self.mpiexec.poll()
        # Check processes before reading the journal: a rank without error writes "ended" before its process is gone.
        gone = [rank for rank, process in self.processes.items() if not process.find()]
        fresh, self._read = journal.read(self.folder, self._read)
        self.events += fresh
        for event in fresh:
            if event["what"] == "started":
                self.processes[event["rank"]] = Process(event["pid"], event["created"])
            elif event["what"] == "lost":  # the other ranks may notice it before we see that the process is gone
                self._note_the_dead(rank for rank in event["lost"] if rank not in self.lost)
            elif event["what"] == "late":
                self._say(event["sentence"])
            elif event["what"] == "undone":
                sentence = f"{event['sentence']} The step is undone on all ranks, and tried once more."
                if sentence not in self.reports:  # several ranks may have written it
                    self._say(sentence)
        # With ULFM, mpiexec does not report a dead rank. A rank is dead if its process is gone and it has not logged
        # "ended" or "raised".
        if self.survive and over is None:
            left = {event["rank"] for event in self.events if event["what"] in ("ended", "raised")}
            self._note_the_dead(
                rank for rank in gone if rank not in self.lost | left and not self.processes[rank].find()
            )
        self._find_stopped_ranks()
        if over is not None and self.status is None:
            self.status = over or int(not self._all_well())
            if self.status:
                self._say(self._why_it_ended())
        return fresh

    def wait(self, seconds: float | None = None) -> int:
        """Call ``poll`` until the run is over, and return ``status``; end the run after ``seconds``, if given."""
        deadline = time.monotonic() + seconds if seconds else float("inf")
        try:
            while self.status is None:
                self.poll()
                if time.monotonic() > deadline:
                    self._say(f"The training was ended, because it took longer than {seconds:g} s.")
                    break
                time.sleep(CHECK_SECONDS)
        finally:
            self.end()
        assert self.status is not None
        return self.status

    def end(self) -> None:
        """End the processes of the run that still exist: ranks, mpiexec and its descendants."""
        living = [process for process in self.processes.values() if process.find()]
        if self.mpiexec.poll() is None or living:
            family = with_descendants(Process.of(self.mpiexec.pid)) if self.mpiexec.poll() is None else []
            # SIGKILL, because a stopped process does not react to SIGTERM.
            for process in living:
                if found := process.find():
                    found.kill()
            end_processes([*family, *living])
        self.status = self.mpiexec.wait() if self.status is None else self.status

    def send_signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send signal ``number`` to a rank, and record it as a fault."""
        if found := self.processes[rank].find():
            kind = signal.Signals(number).name.removeprefix("SIG").lower()
            self.events.append({"at": time.time(), "what": "fault", "rank": rank, "kind": kind})
            found.send_signal(number)

    def output(self) -> str:
        """Return all output of the ranks so far."""
        # pread does not move the file offset, which we share with the ranks that write.
        return os.pread(self._errors.fileno(), os.fstat(self._errors.fileno()).st_size, 0).decode(errors="replace")

    def _say(self, sentence: str) -> None:
        self.reports.append(sentence)
        self.say(sentence)

    def _note_the_dead(self, ranks) -> None:
        for rank in ranks:
            self.lost.add(rank)
            self._say(f"Rank {rank} has died: {self.ranks - len(self.lost)} ranks are left, and go on.")

    def _find_stopped_ranks(self) -> None:
        now = time.monotonic()
        for rank, process in self.processes.items():
            found = process.find()
            try:
                stopped = found is not None and found.status() == psutil.STATUS_STOPPED
            except psutil.Error:
                stopped = False
            if not stopped:
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > STOPPED_SECONDS:
                self._stopped[rank] = float("inf")  # report it only once
                self._say(
                    f"Rank {rank} (process {process.pid}) is stopped, by SIGSTOP, Ctrl-Z or a debugger: it counts as "
                    f"alive, so all wait for it. `kill -CONT {process.pid}` lets it go on; after "
                    f"`kill -9 {process.pid}` it counts as dead."
                )

    def _all_well(self) -> bool:
        """Return whether the ranks have ended without error, when mpiexec's status is 0.

        The status alone is not enough: mpiexec of Open MPI 5.0.11 also returns 0 after it has lost a node.
        """
        started, ended = ({e["rank"] for e in self.events if e["what"] == what} for what in ("started", "ended"))
        all_reported = bool(ended) if self.survive else started == ended
        return (all_reported or not started) and not BY_NODE.search(self.output())

    def _why_it_ended(self) -> str:
        """Return the first reason found: a signal, a rank's error, an exit status, a lost node, mpiexec's last line."""
        output, killed = self.output(), BY_SIGNAL.search(self.output())
        # Without ULFM, after a kill the other ranks raise errors, too. These are only consequences.
        if self.survive or not killed:
            for event in self.events:
                if event["what"] == "raised":
                    return f"Rank {event['rank']} ended with {event['kind']}: {event['sentence']}"
        if killed:
            rank, node, number = int(killed[1]), killed[2], int(killed[3])
            self.lost.add(rank)
            name = signal.Signals(number).name
            return f"Rank {rank} on {node} was ended by {name}: {CAUSES.get(number, 'look at what it printed')}."
        if found := BY_STATUS.search(output):
            self.lost.add(int(found[1]))
            return f"Rank {found[1]} ended with status {found[2]} and no message: look at its output."
        if found := BY_NODE.search(output):
            return f"Node {found[1]} does not answer: it is down, or has no network."
        last = next((line for line in reversed(output.splitlines()) if line.strip(" -")), "it said nothing")
        return f"mpiexec ended with status {self.status}: {last.rstrip('.')}."
