"""One rank without the other ranks, to compute messages, bytes, shapes and memory. SIMULATED."""

from typing import NoReturn

import numpy as np

from dtlib.comm.communicator import Communicator
from dtlib.comm.objects import V
from dtlib.comm.waiting import Link
from dtlib.errors import CommunicationError


def solo(rank: int, size: int) -> "SoloCommunicator":
    """Return rank ``rank`` of ``size`` ranks that do not exist: SIMULATED, in one process and without MPI.

    Its operations check their arguments and run the real algorithms message by message. A recording therefore counts
    exactly the messages that this rank would send. Received data are zeros, so values mean nothing::

        comm = dtlib.comm.solo(0, 64)
        with recording() as events:
            comm.all_reduce(gradients)
        events[0].bytes, events[0].simulated

    Raises:
        CommunicationError: if ``rank`` is not one of ``size`` ranks.
    """
    return SoloCommunicator(rank, size)


class SoloCommunicator(Communicator):
    """The communicator that ``solo`` returns. Objects from other ranks are replaced by this rank's own object."""

    simulated = True

    def __init__(self, rank: int, size: int):
        if not isinstance(size, int) or size < 1 or not isinstance(rank, int) or not 0 <= rank < size:
            raise CommunicationError(f"solo(rank={rank!r}, size={size!r}): rank is a whole number from 0 to size - 1.")
        self._mpi = None  # type: ignore[assignment]  # not needed
        self._prepare(rank, size, tuple(range(size)), name="solo")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, simulated)"

    def all_gather_object(self, obj: V) -> list[V]:
        """Return ``size`` references to ``obj``; bytes are counted as if all ranks' objects had the same length."""
        data = _pickled(obj)
        self.all_gather(np.zeros(self.size, dtype=np.int64), np.array([data.size]))
        self.all_gather(np.zeros((self.size, data.size), dtype=np.uint8), data)
        return [obj] * self.size

    def broadcast_object(self, obj: V | None, root: int = 0) -> V:
        """Return this rank's own ``obj``; bytes are counted as if the root's object had the same length."""
        self._check_rank(root, "broadcast_object", "root")
        data = _pickled(obj)
        self.broadcast(np.array([data.size]), root)
        self.broadcast(data, root)
        return obj  # type: ignore[return-value]  # callers pass an object here

    def split(self, color: int | None, key: int = 0) -> NoReturn:
        """Raise CommunicationError, because splitting needs the other ranks' colors."""
        raise CommunicationError(
            f"split(color={color!r}) needs other ranks, but solo has none: create a communicator with the size that "
            "you need, solo(rank, size)."
        )

    def _link(self, tag):
        return SoloLink(self._mpi, self.rank, self.size, tag, self._buffers)

    _side_link = _incoming = _link


class SoloLink(Link):
    """A link that counts sent messages and discards them, and receives zeros."""

    def send(self, array: np.ndarray, dest: int) -> None:  # type: ignore[override]  # nothing is ever pending
        """Count a message and discard it."""
        self.messages += 1
        self.bytes += array.nbytes

    def recv(self, array: np.ndarray, source: int) -> None:  # type: ignore[override]  # nothing is ever pending
        """Fill ``array`` with zeros."""
        array[...] = 0
        self._length = array.nbytes

    def all_done(self, requests: list) -> bool:
        """Return True: nothing is ever pending."""
        return True

    def length(self) -> int:
        """Return the bytes of the last received message."""
        return self._length


def _pickled(obj):
    import pickle

    return np.frombuffer(pickle.dumps(obj), dtype=np.uint8).copy()
