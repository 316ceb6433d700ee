"""A board in shared memory that shows each rank's last operation: a rank that hangs cannot answer over MPI.

The ranks of a node map one small file with a slot per rank. The file is deleted as
soon as all ranks have opened it, so nothing is left over, however the ranks end. With several nodes, a thread on one
rank of each node copies the slots to a store.

    rank 0   waits in all_reduce ...   |   rank 1   waits in all_reduce ...   |   rank 2   finished barrier ...
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

    from dtlib.comm.call import Call


SLOT = 16384  # bytes of a slot; the longest entry fits, even if JSON writes each character as twelve bytes
# Characters of a call and of a communicator's name. All ranks cut at the same length, because ranks compare them.
LONGEST = 80
LONGEST_LINE = 200  # characters
MOST_PEERS = 256  # an entry without peers counts as waiting for all ranks
COPY_SECONDS = 0.5

PROGRAM = "program"
NOTICE_SECONDS = 3.0  # until a message shows which rank is missing

# The board of this process, or None before `dtlib.init()` has created one.
current: Board | None = None
# The notebook cell that this rank runs, if the notebook has set it; PROGRAM in a script.
cell = ""
# This rank's last operation. `Operation.start` in waiting.py sets it. A thread publishes it, and the line that the rank
# runs, if the rank stays there; so an operation that ends at once costs nothing here.
last: Call | None = None
# The operation in which this rank waits. `Operation._wait` sets it once the wait has lasted longer than usual.
waits: Call | None = None


@dataclass
class BoardEntry:
    """The last entry of a rank on the board.

    ``state`` is ``waits``, ``finished``, ``elsewhere`` (the rank is in the line ``where``, and the operation was its
    last), or the end of a sentence such as ``raised ValueError: ...``.
    ``over`` names the cell or program that this rank finished, with or without an error. The other fields describe the
    operation (call.py).
    """

    state: str
    operation: str = ""
    what: str = ""
    where: str = ""
    group: str = ""
    number: int = 0
    peers: tuple = ()
    over: str = ""
    called: int = 0


def folder_in_memory() -> str | None:
    """Return a folder in memory for small files, or None: then ``tempfile`` uses its default folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Board:
    """The board of one node: a slot per rank in a file that all ``members`` map. Ranks are world ranks."""

    def __init__(self, file: str, rank: int, members: Iterable[int]):
        self.rank = rank
        self.members = list(members)
        self._mine = self.members.index(rank)
        self.over, self._lock = "", threading.Lock()
        with open(file, "r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), SLOT * len(self.members))

    @staticmethod
    def make_file(size: int) -> str:
        """Create a file for the slots of ``size`` ranks, in memory if possible; return its path."""
        handle, name = tempfile.mkstemp(prefix="dtlib-board-", dir=folder_in_memory())
        os.truncate(handle, SLOT * size)
        os.close(handle)
        return name

    def publish(self, state: str, call: Call | None = None, where: str = "", over: str = "") -> None:
        """Publish this rank's state in ``call``, or after its last operation, and the line ``where`` it is.

        ``over`` names the cell or program that has ended with it. After that, only a new cell or a wait is published,
        because a thread that follows the rank may be late.
        """
        entry, is_wait = BoardEntry(state[:LONGEST], where=where[:LONGEST_LINE], over=over), call is not None
        if (call := call or last) is not None:
            entry.operation, entry.what, entry.number = call.operation[:LONGEST], str(call)[:LONGEST], call.number
            entry.called = call.called
            entry.where, entry.group = (where or call.where)[:LONGEST_LINE], call.group[-LONGEST:]
            entry.peers = tuple(call.peers) if len(call.peers) <= MOST_PEERS else ()
        # No other rank locks the slot: `seen` skips an entry that was read in the middle of writing.
        words = json.dumps(vars(entry)).encode() + b"\0"
        start = SLOT * self._mine
        with self._lock:
            if over or is_wait or not self.over:
                self.over = over
                self._memory[start : start + len(words)] = words

    def seen(self) -> dict[int, BoardEntry]:
        """Return what each rank did last. Ranks with an empty slot, or in the middle of writing, are left out."""
        found = {}
        for slot, rank in enumerate(self.members):
            with suppress(ValueError):
                found[rank] = _read(self._memory[SLOT * slot : self._memory.find(b"\0", SLOT * slot)])
        return found


class ClusterBoard(Board):
    """The board of several nodes: the first rank of each node copies its node's slots to torch's ``store``.

    ``node`` is this node's index, ``nodes`` the number of nodes. Entries of other nodes are up to half a second old.
    """

    def __init__(self, file: str, rank: int, members: Iterable[int], node: int, nodes: int, store: Store):
        super().__init__(file, rank, members)
        self._node, self._nodes, self._store = node, nodes, store
        if self._mine == 0:
            threading.Thread(target=self._copy_to_store, name="dtlib board", daemon=True).start()

    def _copy_to_store(self) -> None:
        # The store ends with the job.
        with suppress(RuntimeError):
            while True:
                seen = {rank: asdict(entry) for rank, entry in super().seen().items()}
                self._store.set(f"node {self._node}", json.dumps(seen))
                time.sleep(COPY_SECONDS)

    def seen(self) -> dict[int, BoardEntry]:
        """Return what each rank did last; of all nodes while there is a store, which ends with rank 0."""
        found = super().seen()
        with suppress(RuntimeError):
            for node in range(self._nodes):
                key = f"node {node}"
                if node != self._node and self._store.check([key]):
                    others = json.loads(self._store.get(key))
                    found.update({int(rank): _entry(content) for rank, content in others.items()})
        return found


@lru_cache(maxsize=1024)  # a rank that waits looks four times a second, and most entries stay as they are
def _read(words: bytes) -> BoardEntry:
    return _entry(json.loads(words))


def _entry(content: dict) -> BoardEntry:
    return BoardEntry(**{**content, "peers": tuple(content["peers"])})


def publish(state: str, call: Call | None = None, where: str = "", over: str = "") -> None:
    """Publish this rank's state on the board, if there is one."""
    if current is not None:
        current.publish(state, call, where, over)


def begin_cell(name: str) -> None:
    """Publish that this rank begins a cell of the notebook, or with "" a function that the notebook sends."""
    global cell, waits
    cell, waits = name[:LONGEST], None
    if current is not None:
        current.over = ""
        current.publish("finished")


def end_cell(state: str) -> None:
    """Publish how the notebook's cell ended on this rank; it calls no further operation in this cell."""
    global cell
    publish(state, over=cell)
    cell = ""
