"""What a training tells whoever watches it from outside: a line of JSON an event, all ranks in one file.

    {"at": 12.31, "what": "started", "rank": 2, "ranks": 4, "pid": 4711, ...}
    {"at": 12.40, "what": "step", "rank": 0, "ranks": 4, "step": 7, "loss": 0.93}       by the lowest rank alone
    {"at": 12.42, "what": "fault", "rank": 2, "kind": "kill", "step": 7}                planted, just before it happens
    {"at": 12.44, "what": "lost", "rank": 0, "ranks": 3, "lost": [2]}
    {"at": 12.91, "what": "raised", "rank": 1, "sentence": "NotFinite: ..."}

Each line is written at once and as a whole, so nothing is lost with a rank that is killed. ``at`` counts seconds on the
machine's clock; ``rank`` is that of the world, and ``ranks`` says how many are left.
"""

from __future__ import annotations

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
    """One rank's pen; ``tell`` of the trainings is one of these."""

    def __init__(self, folder: str | PathLike[str], world: World):
        self.rank, self.late = world.rank, ""
        self._file = os.open(Path(folder) / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        process = Process.of(os.getpid())
        self.write("started", ranks=world.size, pid=process.pid, created=process.created)

    def write(self, what: str, **facts: object) -> None:
        line = json.dumps({"at": time.time(), "what": what, "rank": self.rank, **facts})
        os.write(self._file, line.encode() + b"\n")

    def __call__(
        self, what: str, replica: Replica | None = None, comm: Communicator | None = None, ranks: Iterable[int] = (),
        error: BaseException | None = None,
    ) -> None:  # fmt: skip
        """Told of a step, of ranks that were lost, and of a step that was undone. The first two the lowest rank writes
        down; an error that undoes a step may be that of any rank."""
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
            if replica.signs.late and not self.late:  # once
                self.late = replica.signs.late
                self.write("late", ranks=comm.size, sentence=self.late)
        self.write(what, **facts)

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """An error that ends the training on this rank is in the journal before it ends the process."""
        try:
            yield
        except Exception as error:
            self.write("raised", kind=type(error).__name__, sentence=f"{error}")
            raise
        self.write("ended")


def read(folder: str | PathLike[str], start: int = 0) -> tuple[list[dict], int]:
    """The events after the first ``start`` bytes of the journal in ``folder``, and where the next ones will begin."""
    try:
        with open(Path(folder) / FILE, "rb") as file:
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return [], start
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


def seconds_to_go_on(events: list[dict]) -> list[float]:
    """After each kill that the journal knows of (``fault``), the seconds until a step that had not been done before.

    By the ranks that are left, or by new ones: a step that rank 0 tells of just after the kill was done before it.
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
