"""Tags of messages, and an emulated network that is slower than this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING

from dtlib.comm.waiting import Link, Scratch

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from dtlib.comm.link_types import Request


# The tags that MPI guarantees: a quarter for callers, a quarter for notes about their messages, half for collectives.
CALLER_TAGS = 2**13
FIRST_COLLECTIVE_TAG = 2 * CALLER_TAGS
COLLECTIVE_TAGS = 2 * CALLER_TAGS - 2
NOTES_OF_COLLECTIVES = 4 * CALLER_TAGS - 1


class SlowLink(Link):
    """A network that is slower than this one: EMULATED, by holding messages back before they leave.

    A message occupies the sender's wire for ``bytes / bandwidth`` seconds, one after the other, and then travels for
    ``latency`` seconds. ``wire`` is shared by all links of a communicator.
    """

    def __init__(self, mpi: MPI.Comm, rank: int, size: int, tag: int, buffers: Scratch, wire: Wire):
        super().__init__(mpi, rank, size, tag, buffers)
        self._wire = wire

    def send(self, array: np.ndarray, dest: int) -> Request:
        self.messages += 1
        self.bytes += array.nbytes
        return self._wire.hold(array.nbytes, lambda: self._start(self.mpi.Isend, array, dest))

    def all_done(self, requests: list) -> bool:
        return all([request.Test() for request in requests])  # all of them are asked: each may have to leave now

    def give_up(self, requests: list) -> None:
        super().give_up([request for request in requests if not isinstance(request, _HeldBack)])
        self._wire.forget([request for request in requests if isinstance(request, _HeldBack)])


class Wire:
    """An emulated network card: seconds a message, bytes a second, when it is free again, and what has not left it.

    Messages leave in their order, whichever is asked for first: a rank that had no core for a while would otherwise
    let the second one overtake the first, and MPI hands out messages of one tag in the order in which they were sent.
    """

    def __init__(self, latency: float, bandwidth: float):
        self.latency = latency
        self.bandwidth = bandwidth
        self._free_at = 0.0
        self._held: list[_HeldBack] = []
        self._lock = RLock()  # a thread may move messages on

    def hold(self, count: int, start: Callable[[], Request]) -> _HeldBack:
        """A message of ``count`` bytes that is sent now: it has arrived when all before it have, and its own time."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self.bandwidth
            self._held.append(_HeldBack(self, self._free_at + self.latency, start))
            return self._held[-1]

    def let_go(self) -> None:
        """Start what has to leave by now."""
        with self._lock:
            while self._held and self._held[0].at <= time.monotonic():
                self._held.pop(0).leave()

    def forget(self, messages: list) -> None:
        with self._lock:
            self._held = [message for message in self._held if message not in messages]


class _HeldBack:
    """A send that starts when its time has arrived."""

    def __init__(self, wire: Wire, at: float, start):
        self.at = at
        self._wire = wire
        self._start = start
        self._request: Request | None = None

    def Cancel(self) -> None:
        """It is forgotten by its wire instead."""

    def leave(self) -> None:
        self._request = self._start()

    def Test(self, status: MPI.Status | None = None) -> bool:
        if self._request is None:
            self._wire.let_go()
        return self._request is not None and self._request.Test()
