"""What a rank did and when: every operation and every phase of computing, while somebody records."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dtlib.comm.call import Call, dtype_name, in_short

recordings: list[list["Event"]] = []  # the lists that are being filled; none while nobody records


@dataclass
class Event:
    """An operation or a phase on one rank. Times are seconds of this machine's monotonic clock.

    ``messages`` and ``bytes`` (payload) are what this rank sent for it. ``lane`` is ``main`` for what the program
    itself does, ``background`` for an operation that was started with ``async_op=True``. ``rank`` is this rank as the
    world counts it, ``peer`` the other one as the communicator does. ``what`` is made of these fields, for people.
    """

    rank: int
    kind: str  # "operation", "wait" (for an asynchronous operation) or "phase"
    name: str
    start: float
    end: float | None = None  # None: it never ended
    where: str = ""  # the caller's line
    op: str = ""  # what it combines with: sum, mean, ...
    peer: int | None = None  # the other end of a message, or the root
    shape: tuple[int, ...] | None = None  # of the tensor, where there is one
    dtype: str = ""
    algorithm: str = ""  # the one that was asked for; "" where the choice was left to selection.py
    tag: int | None = None  # of a message
    action: tuple | None = None  # of a pipeline: stage, kind, microbatch (schedule/actions.py)
    messages: int = 0
    bytes: int = 0
    lane: str = "main"
    emulated: bool = False  # on a network that was slowed down on purpose
    simulated: bool = False  # the other ranks did not exist (one_rank.py)

    @property
    def in_short(self) -> str:
        """``send(to rank 1)``: without shape and type."""
        return in_short(self.name, self.op, self.peer, self.algorithm)

    @property
    def what(self) -> str:
        """``send(to rank 1) of (4,) float32``"""
        return self.in_short if self.shape is None else f"{self.in_short} of {self.shape} {self.dtype}"


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Collect the events of this rank in the list that this yields."""
    events: list[Event] = []
    recordings.append(events)
    try:
        yield events
    finally:
        recordings[:] = [others for others in recordings if others is not events]


def record(event: Event) -> Event:
    """Keep an event; its maker fills in the end."""
    for events in recordings:
        events.append(event)
    return event


def event_of(call: Call, kind: str = "operation", lane: str = "main") -> Event:
    """Begin an event for an operation."""
    event = Event(
        call.rank, kind, call.operation, time.monotonic(), where=call.where, op=call.op, peer=call.peer,
        algorithm=call.algorithm, tag=call.tag, lane=lane,
    )  # fmt: skip
    if call.tensor is not None:
        event.shape, event.dtype = tuple(call.tensor.shape), dtype_name(call.tensor.dtype)
    return record(event)


@contextmanager
def phase(what: str | tuple, rank: int = 0) -> Iterator[None]:
    """A piece of computing, for the timeline: ``with phase("forward"): ...``, or an ``Action`` of a pipeline."""
    if not recordings:
        yield
        return
    action = None if isinstance(what, str) else what
    event = record(Event(rank, "phase", str(what), time.monotonic(), action=action))
    try:
        yield
    finally:
        event.end = time.monotonic()
