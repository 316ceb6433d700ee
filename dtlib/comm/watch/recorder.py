"""What a rank did and when: every operation and every phase of computing, while somebody records."""

import time
from contextlib import contextmanager
from dataclasses import dataclass

_recordings = []  # the lists that are being filled


@dataclass
class Event:
    """An operation or a phase on one rank. Times are seconds of this machine's monotonic clock.

    ``messages`` and ``bytes`` (payload) are what this rank sent for it. ``lane`` is ``main`` for what the program
    itself does, ``background`` for an operation that was started with ``async_op=True``.
    """

    rank: int
    kind: str  # "operation", "wait" (for an asynchronous operation) or "phase"
    name: str
    start: float
    end: float | None = None  # None: it never ended
    what: str = ""
    where: str = ""
    messages: int = 0
    bytes: int = 0
    lane: str = "main"
    emulated: bool = False  # on a network that was slowed down on purpose
    simulated: bool = False  # the other ranks did not exist (solo.py)


@contextmanager
def recording():
    """Collect the events of this rank in the list that this yields."""
    events = []
    _recordings.append(events)
    try:
        yield events
    finally:
        _recordings[:] = [others for others in _recordings if others is not events]


def active() -> bool:
    return bool(_recordings)


def record(event: Event) -> Event:
    """Keep an event; its maker fills in the end."""
    for events in _recordings:
        events.append(event)
    return event


def event_of(call, kind: str = "operation", lane: str = "main") -> Event:
    """Begin an event for an operation."""
    event = Event(call.rank, kind, call.operation, time.monotonic(), None, str(call), call.where, lane=lane)
    return record(event)


@contextmanager
def phase(name, rank: int = 0):
    """A piece of computing, for the timeline: ``with phase("forward"): ...``"""
    if not _recordings:
        yield
        return
    event = record(Event(rank, "phase", str(name), time.monotonic()))
    try:
        yield
    finally:
        event.end = time.monotonic()
