"""A log of a training run, for programs that watch it: one JSON line per event, all ranks in one file.

    {"at": 12.31, "what": "started", "rank": 2, "ranks": 4, "pid": 4711, ...}
    {"at": 12.40, "what": "step", "rank": 0, "ranks": 4, "step": 7, "loss": 0.93}       from the lowest rank only
    {"at": 12.42, "what": "fault", "rank": 2, "kind": "kill", "step": 7}                injected, just before it happens
    {"at": 12.44, "what": "lost", "rank": 0, "ranks": 3, "lost": [2]}
    {"at": 12.91, "what": "raised", "rank": 1, "sentence": "NotFinite: ..."}

Each line is written at once, in a single write, so a rank that is killed loses no event. ``at`` is ``time.time()`` in
seconds. ``rank`` is the world rank. ``ranks`` is the number of ranks that are left.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from dtlib.comm import Communicator
from dtlib.recovery.replica import Replica
from dtlib.world import World
from dtlib.world.processes import Process

FILE = "journal.jsonl"


class Journal:
    """A writer of events, one object per rank. Pass it to the training functions as ``on_event``."""

    def __init__(self, folder: str | PathLike[str], world: World):
        self.rank, self.late = world.rank, ""
        self._file = os.open(Path(folder) / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        process = Process.of(os.getpid())
        self.write("started", ranks=world.size, pid=process.pid, created=process.created)

    def write(self, what: str, **facts: object) -> None:
        """Append the event ``what`` with the time, this rank and ``facts``, which must be JSON types."""
        line = json.dumps({"at": time.time(), "what": what, "rank": self.rank, **facts})
        os.write(self._file, line.encode() + b"\n")

    def __call__(
        self, what: str, replica: Replica | None = None, comm: Communicator | None = None, ranks: Iterable[int] = (),
        error: BaseException | None = None,
    ) -> None:  # fmt: skip
        """Write an event of a training function: ``"step"``, ``"lost"`` or ``"undone"``.

        Only the lowest rank writes ``"step"`` and ``"lost"``, which are the same on all ranks. Every rank writes
        ``"undone"``, because ranks may have different errors.
        """
        assert comm is not None
        if comm.rank and what != "undone":
            return
        facts: dict[str, object] = {"ranks": comm.size}
        if what == "lost":
            facts["lost"] = list(ranks)
        elif what == "undone":
            facts["sentence"] = f"{error}"
        elif replica is not None:
            facts |= {"step": replica.steps, "loss": replica.losses[-1]}
            if replica.status.late and not self.late:  # once
                self.late = replica.status.late
                self.write("late", ranks=comm.size, sentence=self.late)
        self.write(what, **facts)

    @contextmanager
    def log_outcome(self) -> Iterator[None]:
        """Write ``"ended"`` when the block ends, or ``"raised"`` if an error ends it, before the process exits."""
        try:
            yield
        except Exception as error:
            self.write("raised", kind=type(error).__name__, sentence=f"{error}")
            raise
        self.write("ended")


def read(folder: str | PathLike[str], start: int = 0) -> tuple[list[dict], int]:
    """Return the events after the first ``start`` bytes of the journal, and the ``start`` for the next call."""
    try:
        with open(Path(folder) / FILE, "rb") as file:
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return [], start
    # The last line may still be incomplete: leave it for the next call.
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


def recovery_seconds(events: list[dict]) -> list[float]:
    """Return, for each kill in the journal (``fault``), the seconds until training had completed a new step.

    Only steps after an event ``"lost"`` or ``"started"`` count, from the remaining or the new ranks. A step that rank 0
    logs just after the kill was completed before it.
    """
    found, furthest, since, others = [], -1, None, False
    for event in sorted(events, key=lambda event: event["at"]):
        match event["what"]:
            case "fault" if event["kind"] == "kill":
                since, others = event["at"], False
            case "lost" | "started":
                others = True
            case "step" if event["step"] > furthest:
                furthest = event["step"]
                if since is not None and others:
                    found.append(event["at"] - since)
                    since = None
    return found
