"""Free an MPI communicator once no member uses it any more.

MPI has room for some thousands of communicators. Freeing one is collective: all its members must do it, in the same
order. Python's garbage collection runs at a different time on every rank. So each rank notes the communicators that
are garbage here. When ranks synchronise to create a new communicator, they exchange these notes, and free the
communicators that are garbage on all their members.

    rank 0   garbage: a, b     \\  a is garbage everywhere: free it
    rank 1   garbage: a         /  b is not: keep it
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from dtlib.comm import waiting

if TYPE_CHECKING:
    from mpi4py import MPI

    from dtlib.comm.waiting import Link

_members: dict[tuple, frozenset[int]] = {}  # key -> members of a communicator that is not freed yet
_handles: dict[tuple, MPI.Comm] = {}  # key -> its MPI handle, used to free it
_garbage: set[tuple] = set()  # keys of communicators that this rank cannot use any more
_arriving: dict[tuple, list] = {}  # key -> pending receives of messages that no operation asked for
_drawn = itertools.count(1)


def draw(rank: int) -> tuple[int, int]:
    """Return a key that no other communicator has; ``rank`` is this rank's world rank."""
    return rank, next(_drawn)


def free_when_unused(mpi: MPI.Comm, key: tuple, members: Iterable[int]) -> None:
    """Free ``mpi`` after the last reference to this object is gone: the communicator's and those of pending operations.

    ``key`` is equal on all members; ``members`` are world ranks.
    """
    # Keep a second Python object with the same MPI handle: it can still be freed after `mpi` was collected.
    _members[key], _handles[key] = frozenset(members), type(mpi)(mpi)
    weakref.finalize(mpi, _garbage.add, key).atexit = False


def garbage_among(ranks: Iterable[int]) -> list[tuple]:
    """Return keys of communicators that are garbage here and whose members are all among ``ranks``.

    ``ranks`` are about to synchronise.
    """
    waiting.drop_abandoned()
    ranks = frozenset(ranks)
    found = [key for key in list(_garbage) if _members[key] <= ranks]
    # Receive messages that other ranks still send there, so that their sends complete too.
    return [key for key in found if not _receive_strays(key)]


def free(unused: dict[int, list[tuple]]) -> None:
    """Free communicators that are garbage on all members; ``unused`` maps world ranks to their garbage keys."""
    everywhere = set.union(set(), *unused.values())
    # Freeing is collective, so all members must do it in the same order: sort the keys.
    for key in sorted(key for key in everywhere if key in _members and all(key in unused[r] for r in _members[key])):
        while _receive_strays(key):
            # The senders have finished, and `exchange` delivers a rank's notes after its earlier messages: this loop
            # ends.
            pass
        _handles.pop(key).Free()
        del _members[key]
        _garbage.discard(key)
        _arriving.pop(key, None)


def _receive_strays(key) -> bool:
    """Receive messages that no operation will ask for; return True while some are still pending.

    If a member died, its communicator was revoked: no further messages arrive, and it is never freed.
    """
    from mpi4py import MPI

    status, handle, pending = MPI.Status(), _handles[key], _arriving.setdefault(key, [])
    with suppress(MPI.Exception):
        while message := handle.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            pending.append(message.Irecv(np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)))
        pending[:] = [request for request in pending if not request.Test()]
        return bool(pending)
    return True


def exchange(link: Link, parts: list[bytes]) -> Iterator[list]:
    """All-gather bytes, as a generator like those in algorithms.py; ``parts[rank]`` holds this rank's bytes.

    Every rank sends to every other rank directly. So when this message arrives, all earlier messages from the same rank
    have arrived too.
    """
    others = [rank for rank in range(link.size) if rank != link.rank]
    mine = np.frombuffer(parts[link.rank], dtype=np.uint8)
    lengths = np.full(link.size, mine.size)
    length = lengths[link.rank : link.rank + 1].copy()
    yield [link.recv(lengths[rank : rank + 1], rank) for rank in others] + [link.send(length, rank) for rank in others]
    buffers = {rank: np.empty(lengths[rank], dtype=np.uint8) for rank in others}
    yield [link.recv(buffer, rank) for rank, buffer in buffers.items()] + [link.send(mine, rank) for rank in others]
    for rank, buffer in buffers.items():
        parts[rank] = buffer.tobytes()


class ForeignRequests:
    """Requests that were started elsewhere: their bytes are not counted, and they cannot always be cancelled."""

    messages = bytes = 0

    def __init__(self, mpi: MPI.Comm):
        self._mpi = mpi  # keeps the communicator from being freed meanwhile

    def all_done(self, requests: list) -> bool:
        """Return True once all requests are complete. Does not wait."""
        return type(requests[0]).Testall(requests)

    def give_up(self, requests: list) -> None:
        """Do nothing: these requests cannot be cancelled safely."""
