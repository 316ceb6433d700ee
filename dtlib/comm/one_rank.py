"""One rank of many without the others: for arithmetic on messages, bytes, shapes and memory. SIMULATED."""

from typing import NoReturn

import numpy as np

from dtlib.comm.communicator import Communicator
from dtlib.comm.objects import V
from dtlib.errors import CommunicationError


def solo(rank: int, size: int) -> "SoloCommunicator":
    """Rank ``rank`` of ``size`` ranks that do not exist: SIMULATED, in one process and without MPI.

    Its operations check their arguments and run the algorithms of the real ones, message by message, so that a
    recording counts exactly what this rank would send. What would come from others is zeros: values mean nothing::

        comm = dtlib.comm.solo(0, 64)
        with recording() as events:
            comm.all_reduce(gradients)
        events[0].bytes, events[0].simulated

    Raises:
        CommunicationError: where ``rank`` is not one of ``size`` ranks.
    """
    return SoloCommunicator(rank, size)


class SoloCommunicator(Communicator):
    """What ``solo`` gives. Objects that would come from other ranks are this rank's own, as the best guess."""

    simulated = True

    def __init__(self, rank: int, size: int):
        if not isinstance(size, int) or size < 1 or not isinstance(rank, int) or not 0 <= rank < size:
            raise CommunicationError(f"solo(rank={rank!r}, size={size!r}): rank is a whole number from 0 to size - 1.")
        self._mpi = None  # type: ignore[assignment]  # it does without
        self._prepare(rank, size, tuple(range(size)), name="solo")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, simulated)"

    def all_gather_object(self, thing: V) -> list[V]:
        """``size`` times ``thing``; counted as if those of the other ranks were as long."""
        data = _pickled(thing)
        self.all_gather(np.zeros(self.size, dtype=np.int64), np.array([data.size]))
        self.all_gather(np.zeros((self.size, data.size), dtype=np.uint8), data)
        return [thing] * self.size

    def broadcast_object(self, thing: V | None, root: int = 0) -> V:
        """This rank's own ``thing``; counted as if that of the root were as long."""
        self._check_rank(root, "broadcast_object", "root")
        data = _pickled(thing)
        self.broadcast(np.array([data.size]), root)
        self.broadcast(data, root)
        return thing  # type: ignore[return-value]  # it should not be None here

    def split(self, color: int | None, key: int = 0) -> NoReturn:
        raise CommunicationError(
            f"split(color={color!r}) needs other ranks, but solo has none: create a communicator with the size that "
            "you need, solo(rank, size)."
        )

    def wait_for(self, request: object, buffers: object, description: str, time_limit: float | None = None) -> None:
        raise CommunicationError(f"{description} waits for MPI, which solo does not use: use dtlib.init().comm.")

    def _link(self, tag):
        return SoloLink(self.rank, self.size)

    _side_link = _incoming = _link


class SoloLink:
    """What is sent goes nowhere and is counted; what is received is zeros."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.messages = 0
        self.bytes = 0
        self._length = 0

    def send(self, array: np.ndarray, dest: int) -> None:
        self.messages += 1
        self.bytes += array.nbytes

    def recv(self, array: np.ndarray, source: int) -> None:
        array[...] = 0
        self._length = array.nbytes

    def all_done(self, requests: list) -> bool:
        return True

    def length(self) -> int:
        return self._length

    def nothing(self) -> np.ndarray:
        return np.zeros(0, dtype=np.uint8)

    def scratch(self, like: np.ndarray, number: int = 0) -> np.ndarray:
        return np.zeros_like(like)


def _pickled(thing):
    import pickle

    return np.frombuffer(pickle.dumps(thing), dtype=np.uint8).copy()
