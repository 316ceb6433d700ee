"""Object collectives (pickled), for communicators of all kinds."""

import pickle
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np

from dtlib.comm.call import ArgumentChecks
from dtlib.errors import CommunicationError

V = TypeVar("V")


class ObjectOperations(ArgumentChecks):
    """A base class for communicators with ``all_gather`` and ``broadcast``."""

    name: str
    time_limit: float | None
    members: Sequence[int]  # world ranks
    all_gather: Callable
    broadcast: Callable

    def all_gather_object(self, thing: V) -> list[V]:
        """Return a list of every rank's ``thing`` (any object that pickles), in rank order, on every rank."""
        mine = np.frombuffer(_pickled(thing), dtype=np.uint8)
        sizes = self.all_gather(np.zeros(self.size, dtype=np.int64), np.array([mine.size]))
        # Pad every chunk to the longest, so that a single all_gather of equal chunks is enough.
        padded = np.zeros(sizes.max(), dtype=np.uint8)
        padded[: mine.size] = mine
        chunks = self.all_gather(np.zeros((self.size, padded.size), dtype=np.uint8), padded)
        return [_unpickled(chunk[:size], rank) for rank, (chunk, size) in enumerate(zip(chunks, sizes, strict=True))]

    def broadcast_object(self, thing: V | None, root: int = 0) -> V:
        """Return the ``thing`` of rank ``root`` (any object that pickles), on every rank."""
        self._check_rank(root, "broadcast_object", "root")
        mine = np.frombuffer(_pickled(thing) if self.rank == root else b"", dtype=np.uint8)
        size = self.broadcast(np.array([mine.size]), root)
        data = mine.copy() if self.rank == root else np.zeros(size[0], dtype=np.uint8)
        return _unpickled(self.broadcast(data, root), root)

    def __reduce__(self) -> NoReturn:
        raise CommunicationError(
            "A communicator cannot be copied or pickled, because all ranks would have to do it together: copy the "
            "wrapped module, or save a state_dict()."
        )


class _Unpicklable(str):
    """Why a rank's object could not be pickled; it is sent in place of the object, so that no rank waits for ever."""


def _pickled(thing) -> bytes:
    try:
        return pickle.dumps(thing)
    except Exception as error:
        return pickle.dumps(_Unpicklable(f"{thing!r:.60} does not pickle ({error})"))


def _unpickled(data, rank: int):
    thing = pickle.loads(data)
    if isinstance(thing, _Unpicklable):
        raise CommunicationError(f"Rank {rank}'s {thing}: send plain data, tensors, or functions of a module.")
    return thing
