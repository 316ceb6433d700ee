"""Record each operation and each phase of computing of a rank, with start and end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dtlib.comm.call import Call, dtype_name, in_short

recordings: list[list["Event"]] = []  # one list per active recording


@dataclass
class Event:
    """An operation or a phase on one rank. Times are seconds of this machine's monotonic clock.

    ``messages`` and ``bytes`` (payload) count what this rank sent. ``lane`` is ``background`` for operations that were
    started with ``async_op=True``, otherwise ``main``. ``rank`` is the world rank; ``peer`` is a rank of the
    communicator.
    """

    rank: int
    kind: str  # "operation", "wait" (for an asynchronous operation) or "phase"
    name: str
    start: float
    end: float | None = None  # None if it never ended
    where: str = ""  # the caller's line
    op: str = ""  # the reduction: sum, mean, ...
    peer: int | None = None  # the other end of a message, or the root
    shape: tuple[int, ...] | None = None  # the tensor's shape, if there is a tensor
    dtype: str = ""
    algorithm: str = ""  # as requested with algorithm=; "" if selection.py chose
    tag: int | None = None  # for messages
    action: tuple | None = None  # for pipelines: stage, kind, microbatch (schedule/actions.py)
    messages: int = 0
    bytes: int = 0
    lane: str = "main"
    emulated: bool = False  # on an emulated slow network
    simulated: bool = False  # without the other ranks (one_rank.py)

    @property
    def in_short(self) -> str:
        """The call without shape and dtype: ``send(to rank 1)``."""
        return in_short(self.name, self.op, self.peer, self.algorithm)

    @property
    def what(self) -> str:
        """The call as text: ``send(to rank 1) of (4,) float32``."""
        return self.in_short if self.shape is None else f"{self.in_short} of {self.shape} {self.dtype}"


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Record the events of this rank into the list that this context manager yields."""
    events: list[Event] = []
    recordings.append(events)
    try:
        yield events
    finally:
        recordings[:] = [others for others in recordings if others is not events]


def record(event: Event) -> Event:
    """Append an event to all active recordings; the caller sets its end."""
    for events in recordings:
        events.append(event)
    return event


def event_of(call: Call, kind: str = "operation", lane: str = "main") -> Event:
    """Create and record an event for an operation that starts now."""
    event = Event(
        call.rank, kind, call.operation, time.monotonic(), where=call.where, op=call.op, peer=call.peer,
        algorithm=call.algorithm, tag=call.tag, lane=lane,
    )  # fmt: skip
    if call.shape is not None:
        event.shape, event.dtype = tuple(call.shape), dtype_name(call.dtype)
    return record(event)


@contextmanager
def phase(what: str | tuple, rank: int = 0) -> Iterator[None]:
    """Record a phase of computing: ``with phase("forward"): ...``, or an ``Action`` of a pipeline."""
    if not recordings:
        yield
        return
    action = None if isinstance(what, str) else what
    event = record(Event(rank, "phase", str(what), time.monotonic(), action=action))
    try:
        yield
    finally:
        event.end = time.monotonic()
