"""Tag ranges, and ``SlowLink``: an emulated network that is slower than the real one."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING

from dtlib.comm.waiting import Link, Scratch
from dtlib.errors import CommunicationError

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from dtlib.comm.link_types import Request


# MPI guarantees 2**15 tags: a quarter for callers, a quarter for notes about their messages, half for collectives.
CALLER_TAGS = 2**13
FIRST_COLLECTIVE_TAG = 2 * CALLER_TAGS
COLLECTIVE_TAGS = 2 * CALLER_TAGS - 2
NOTES_OF_COLLECTIVES = 4 * CALLER_TAGS - 1


class SlowLink(Link):
    """A network that is slower than the real one: EMULATED, by delaying messages before they are sent.

    A message occupies the sender's wire for ``bytes / bandwidth`` seconds. Messages occupy it in turn. Each then
    travels for ``latency`` seconds. All links of a communicator use the same ``wire``.
    """

    def __init__(self, mpi: MPI.Comm, rank: int, size: int, tag: int, buffers: Scratch, wire: Wire):
        super().__init__(mpi, rank, size, tag, buffers)
        self._wire = wire

    def send(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a contiguous array; return a request.

        The real send starts at the time when the emulated network would deliver the message.
        """
        self.messages += 1
        self.bytes += array.nbytes
        return self._wire.hold(array.nbytes, lambda: self._start(self.mpi.Isend, array, dest))

    def all_done(self, requests: list) -> bool:
        """Return True once all requests are complete. Does not wait."""
        # A list, not a generator: every request must be tested, because testing is what starts a message that is due.
        return all([request.Test() for request in requests])


class Wire:
    """An emulated network card: ``latency`` in seconds per message, ``bandwidth`` in bytes per second.

    Messages are sent in the order of ``hold``, even if a later one is tested first. Otherwise a rank that lost its core
    for a while could send the second message before the first, and MPI matches messages of one tag in sending order.

    Raises:
        CommunicationError: for a negative latency, or a bandwidth that is not above 0.
    """

    def __init__(self, latency: float, bandwidth: float):
        if not (latency >= 0 and bandwidth > 0):
            raise CommunicationError(
                f"emulate_network(latency={latency!r}, bandwidth={bandwidth!r}): pass seconds from 0 on, and bytes per "
                "second above 0."
            )
        self.latency = latency
        self.bandwidth = bandwidth
        self._free_at = 0.0
        self._delayed: list[_DelayedMessage] = []
        self._lock = RLock()  # the progress thread may send messages, too

    def hold(self, count: int, start: Callable[[], Request]) -> _DelayedMessage:
        """Delay a message of ``count`` bytes until the wire is free, plus its own transfer time and the latency."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self.bandwidth
            self._delayed.append(_DelayedMessage(self, self._free_at + self.latency, start))
            return self._delayed[-1]

    def send_due(self) -> None:
        """Send the messages that are due."""
        with self._lock:
            while self._delayed and self._delayed[0].at <= time.monotonic():
                due = self._delayed.pop(0)
                if not due.dropped:
                    due.request = due.start()


class _DelayedMessage:
    """A send that is delayed until its time."""

    def __init__(self, wire: Wire, at: float, start):
        self.at = at
        self._wire = wire
        self.start = start
        self.request: Request | None = None
        self.dropped = False  # True if it was cancelled before its time: then nothing is pending

    def Cancel(self) -> None:
        self.dropped = True

    def Test(self, status: MPI.Status | None = None) -> bool:
        if self.request is None:
            self._wire.send_due()
        return self.dropped if self.request is None else self.request.Test()
