"""When a communicator of MPI is freed: once none of its members has any use for it.

MPI has room for some thousands of them, and frees one only if all its members do, in the same order. Python forgets
things at another time on every rank. So a communicator that is garbage here is noted, and whenever ranks meet to make
another one they tell one another what they have noted, and free what all of its members have.

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

_members: dict[tuple, frozenset[int]] = {}  # of each communicator that has not been freed, by key
_handles: dict[tuple, MPI.Comm] = {}  # the same communicators, for whoever frees them
_garbage: set[tuple] = set()  # keys of those that nobody here can use any more
_arriving: dict[tuple, list] = {}  # by key: receives of messages that nobody here asked for
_drawn = itertools.count(1)


def draw(rank: int) -> tuple[int, int]:
    """A key that no other communicator has; ``rank`` is this rank's in the world."""
    return rank, next(_drawn)


def look_after(mpi: MPI.Comm, key: tuple, members: Iterable[int]) -> None:
    """Have ``mpi`` freed after this object is gone, which all its users hold: the communicator, and what is under way.

    ``key`` is the same on all its members, who are ranks of the world.
    """
    _members[key], _handles[key] = frozenset(members), type(mpi)(mpi)
    weakref.finalize(mpi, _garbage.add, key).atexit = False


def garbage_among(ranks: Iterable[int]) -> list[tuple]:
    """Keys of what is garbage here and whose members are all among ``ranks``, which are about to meet."""
    waiting.drop_abandoned()
    ranks = frozenset(ranks)
    found = [key for key in list(_garbage) if _members[key] <= ranks]
    # What others still send there is received, so that it ends for them too.
    return [key for key in found if not _receive_strays(key)]


def free(said: dict[int, list[tuple]]) -> None:
    """Free what is garbage on all its members: ``said`` maps ranks of the world to what is garbage there."""
    everywhere = set.union(set(), *said.values())
    for key in sorted(key for key in everywhere if key in _members and all(key in said[r] for r in _members[key])):
        while _receive_strays(key):
            pass  # its sender is done with it, so it is here
        _handles.pop(key).Free()
        del _members[key]
        _garbage.discard(key)
        _arriving.pop(key, None)


def _receive_strays(key) -> bool:
    """Take in what nobody will ask for; True while some of it is still on its way.

    Of a communicator that was revoked, as one of its ranks has died, nothing more comes: it is never freed.
    """
    from mpi4py import MPI

    status, handle, under_way = MPI.Status(), _handles[key], _arriving.setdefault(key, [])
    with suppress(MPI.Exception):
        while message := handle.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            under_way.append(message.Irecv(np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)))
        under_way[:] = [request for request in under_way if not request.Test()]
        return bool(under_way)
    return True


def exchange(link: Link, said: list[bytes]) -> Iterator[list]:
    """A generator like those of the collectives: every rank's bytes, of which ``said`` holds this rank's, for all.

    Each rank tells each other itself, and not by way of a third: so what one had sent before has arrived before.
    """
    others = [rank for rank in range(link.size) if rank != link.rank]
    mine = np.frombuffer(said[link.rank], dtype=np.uint8)
    lengths = np.full(link.size, mine.size)
    length = lengths[link.rank : link.rank + 1].copy()
    yield [link.recv(lengths[rank : rank + 1], rank) for rank in others] + [link.send(length, rank) for rank in others]
    rooms = {rank: np.empty(lengths[rank], dtype=np.uint8) for rank in others}
    yield [link.recv(room, rank) for rank, room in rooms.items()] + [link.send(mine, rank) for rank in others]
    for rank, room in rooms.items():
        said[rank] = room.tobytes()


class Awaited:
    """Requests that somebody else has started: they are not counted, and cannot always be cancelled."""

    messages = bytes = 0

    def __init__(self, mpi: MPI.Comm):
        self._mpi = mpi  # held: it is in use

    def all_done(self, requests: list) -> bool:
        return type(requests[0]).Testall(requests)

    def give_up(self, requests: list) -> None:
        pass
