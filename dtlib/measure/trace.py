"""``dtlib.trace()``: a record of the operations and compute phases of all ranks, on one clock.

    %%px
    with dtlib.trace() as trace:
        with dtlib.phase("compute"):
            ...
        world.comm.all_reduce(gradients)

Exercises check the messages and bytes of the record, and notebooks draw its timeline (``lab.timeline("trace")``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from dtlib.comm.watch import recorder
from dtlib.comm.watch.recorder import Event
from dtlib.world import init

if TYPE_CHECKING:
    from dtlib.comm import Communicator


ROUND_TRIPS = 20


@dataclass
class Trace:
    """The record of one rank. Its times plus ``clock_offset`` are times of rank 0's clock, in seconds."""

    rank: int
    clock_offset: float = 0.0
    events: list[Event] = field(default_factory=list)
    until: float | None = None  # when the block ended

    def sent(self, operation: str | None = None) -> tuple[int, int]:
        """Return the number of messages and of payload bytes that this rank sent, for one operation or for all."""
        chosen = [event for event in self.events if operation in (None, event.name)]
        return sum(event.messages for event in chosen), sum(event.bytes for event in chosen)

    def gather(self, comm: Communicator | None = None) -> Timeline:
        """Return the records of all ranks, on every rank; all ranks call it."""
        return Timeline((comm or init().comm).all_gather_object(self))


@contextmanager
def trace() -> Iterator[Trace]:
    """Record every operation and phase of this rank while the block runs: ``with dtlib.trace() as trace: ...``

    On several machines all ranks must enter it together, because it first compares their clocks. If an operation is
    pending when the block ends, its end time is set later. An interrupted operation has no end time.
    """
    world = init()
    # Ranks on one machine read the same clock.
    offset = 0.0 if world.nodes == 1 else clock_offset(world.comm)
    with recorder.recording() as events:
        record = Trace(world.rank, offset, events)
        try:
            yield record
        finally:
            record.until = time.monotonic()


def phase(name: str) -> AbstractContextManager[None]:
    """Record a compute phase for the timeline: ``with dtlib.phase("forward"): ...``"""
    return recorder.phase(str(name), init().rank)


def clock_offset(comm: Communicator, clock: Callable[[], float] = time.monotonic) -> float:
    """Return the seconds to add to this rank's ``clock`` to get rank 0's clock; all ranks call it.

    The shortest of several round trips is used, as if rank 0 had read its clock in the middle of it. The error is at
    most half of the round trip. F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.

        rank r   asks at a -----------\\            /-------> gets t at b
        rank 0                         reads t -----           offset = t - (a + b) / 2
    """
    # Rank 0 serves the other ranks in turn. The shortest round trip has the smallest error.
    reading = np.zeros(1)
    best = (float("inf"), 0.0)
    for other in range(1, comm.size):
        for _ in range(ROUND_TRIPS):
            if comm.rank == 0:
                comm.recv(reading, other)
                reading[0] = clock()
                comm.send(reading, other)
            elif comm.rank == other:
                asked = clock()
                comm.send(reading, 0)
                comm.recv(reading, 0)
                took = clock() - asked
                best = min(best, (took, float(reading[0]) - asked - took / 2))
    return best[1]


class Timeline:
    """The events of all ranks, sorted by start; times are in seconds since the start of the first event."""

    def __init__(self, traces: list[Trace]):
        self.ranks = sorted(trace.rank for trace in traces)
        shifted = [
            replace(event, start=event.start + trace.clock_offset, end=event.end and event.end + trace.clock_offset)
            for trace in traces for event in trace.events
        ]  # fmt: skip
        begin = min((event.start for event in shifted), default=0.0)
        moved = [replace(event, start=event.start - begin, end=event.end and event.end - begin) for event in shifted]
        self.events = sorted(moved, key=lambda event: (event.start, event.rank))
        self.until = {t.rank: t.until + t.clock_offset - begin for t in traces if t.until is not None}

    @property
    def end(self) -> float:
        """The end of the last event in seconds; for events without an end, their start."""
        return max((event.end or event.start for event in self.events), default=0.0)

    @property
    def emulated(self) -> bool:
        """Whether a part ran on an emulated network, which is slowed down on purpose."""
        return any(event.emulated for event in self.events)
