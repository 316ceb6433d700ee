"""What an algorithm sends and receives with: the messages of one collective on one communicator."""

import mmap
import time
from threading import RLock

import numpy as np

# The tags that MPI guarantees: a quarter for callers, a quarter for notes about their messages, half for collectives.
CALLER_TAGS = 2**13
FIRST_COLLECTIVE_TAG = 2 * CALLER_TAGS
COLLECTIVE_TAGS = 2 * CALLER_TAGS - 2
NOTES_OF_COLLECTIVES = 4 * CALLER_TAGS - 1

LARGEST = 2**30  # bytes: from here on messages are cut, as MPI counts what it sends in 31 bits


class Link:
    """Messages under one tag. ``messages`` and ``bytes`` count what this rank has sent through it."""

    def __init__(self, mpi, rank: int, size: int, tag: int, buffers: dict):
        self.mpi = mpi
        self.rank = rank
        self.size = size
        self.messages = 0
        self.bytes = 0
        self._tag = tag
        self._buffers = buffers
        self._cut = False  # has it had messages that were cut?

    def send(self, array: np.ndarray, dest: int):
        """Start to send a contiguous array; returns a request."""
        self.messages += 1
        self.bytes += array.nbytes
        return self._start(self.mpi.Isend, array, dest)

    def recv(self, array: np.ndarray, source: int):
        """Start to receive into a contiguous array; returns a request."""
        return self._start(self.mpi.Irecv, array, source)

    def _start(self, begin, array: np.ndarray, other: int):
        if array.nbytes < LARGEST:
            return begin(array, other, self._tag)
        self._cut = True
        return _Pieces(lambda piece: begin(piece, other, self._tag), array)

    def all_done(self, requests: list) -> bool:
        """True once all these requests are complete. Does not wait."""
        if self._cut:
            return all([request.Test() for request in requests])  # all of them are asked
        return type(requests[0]).Testall(requests)  # of the class, MPI.Request

    def give_up(self, requests: list) -> None:
        """Cancel the receives to which no message has arrived yet. (Open MPI cancels no send.)"""
        for request in requests:
            if request:
                request.Cancel()

    def nothing(self) -> np.ndarray:
        """The array of a message that says only that it has arrived."""
        return np.zeros(0, dtype=np.uint8)

    def scratch(self, like: np.ndarray, number: int = 0) -> np.ndarray:
        """Room for an array like this one. It is kept from call to call: fresh memory costs a page fault a page."""
        key = (like.dtype, number)
        room = self._buffers.get(key)
        if room is None or room.size < like.size:
            room = self._buffers[key] = _page_aligned(like.size, like.dtype)
        return room[: like.size]


def _page_aligned(size: int, dtype) -> np.ndarray:
    """An array that begins on a page, as large torch tensors do: from page to page processors copy fastest."""
    room = np.empty(size * dtype.itemsize + mmap.PAGESIZE, dtype=np.uint8)
    start = -room.ctypes.data % mmap.PAGESIZE
    return room[start : start + size * dtype.itemsize].view(dtype)


class _Pieces:
    """One message as several of ``LARGEST`` bytes and a shorter one, perhaps of none, by which its end is known."""

    def __init__(self, start, array: np.ndarray):
        flat = array.reshape(-1).view(np.uint8)
        self._requests = [start(flat[at : at + LARGEST]) for at in range(0, flat.size + 1, LARGEST)]
        self.come = 0  # bytes of those that are complete, but for the last

    def Test(self, status=None) -> bool:
        """True once all are complete; of a receive, whose ``status`` is given, also after a shorter one."""
        from mpi4py import MPI

        while self._requests[0].Test(status):
            if len(self._requests) == 1:
                return True
            if status is not None and status.Get_count(MPI.BYTE) < LARGEST:
                self.Cancel()
                return True
            del self._requests[0]
            self.come += LARGEST
        return False

    def Cancel(self) -> None:
        for request in self._requests:
            if request:
                request.Cancel()


class IncomingLink:
    """The receiving end of one message: it knows how long the message was."""

    def __init__(self, link: Link):
        from mpi4py import MPI

        self.messages = self.bytes = 0
        self._link = link
        self._mpi, self._status = MPI, MPI.Status()
        self._too_long = False

    def recv(self, array, source):
        self._arriving = self._link.recv(array, source)
        return self._arriving

    def all_done(self, requests: list) -> bool:
        try:
            return requests[0].Test(self._status)
        except self._mpi.Exception as error:
            self._too_long = error.Get_error_class() == self._mpi.ERR_TRUNCATE
            if self._too_long:
                return True
            raise

    def give_up(self, requests: list) -> None:
        self._link.give_up(requests)

    def length(self) -> int | None:
        """Bytes of the message that came last; None where it was longer than there was room for."""
        return None if self._too_long else self._status.Get_count(self._mpi.BYTE) + getattr(self._arriving, "come", 0)


class Awaited:
    """Requests that somebody else has started: they are not counted, and cannot always be cancelled."""

    messages = bytes = 0

    def __init__(self, mpi):
        self._mpi = mpi  # held: it is in use

    def all_done(self, requests: list) -> bool:
        return type(requests[0]).Testall(requests)

    def give_up(self, requests: list) -> None:
        pass


class SlowLink(Link):
    """A network that is slower than this one: EMULATED, by holding messages back before they leave.

    A message occupies the sender's wire for ``bytes / bandwidth`` seconds, one after the other, and then travels for
    ``latency`` seconds. ``wire`` is shared by all links of a communicator.
    """

    def __init__(self, mpi, rank, size, tag, buffers, wire: "Wire"):
        super().__init__(mpi, rank, size, tag, buffers)
        self._wire = wire

    def send(self, array, dest):
        self.messages += 1
        self.bytes += array.nbytes
        return self._wire.hold(array.nbytes, lambda: self._start(self.mpi.Isend, array, dest))

    def all_done(self, requests):
        return all([request.Test() for request in requests])  # all of them are asked: each may have to leave now

    def give_up(self, requests):
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
        self._held = []
        self._lock = RLock()  # a thread may move messages on

    def hold(self, count: int, start) -> "_HeldBack":
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
        self._request = None

    def leave(self) -> None:
        self._request = self._start()

    def Test(self) -> bool:
        if self._request is None:
            self._wire.let_go()
        return self._request is not None and self._request.Test()
