"""Where each rank was last seen, outside MPI: MPI cannot ask a rank that is stuck.

The ranks of a node share one small file, a slot a rank: what is new with each operation and state, then the call, which
is the same again and again and is put into words once. Its name is removed as soon as all have opened it, so that
nothing is left over, however the ranks end. Across nodes a thread on one rank of each carries the slots to a store.

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

from dtlib.comm.call import in_short

if TYPE_CHECKING:
    from torch.distributed import Store

    from dtlib.comm.call import Call


SLOT, HEAD = 640, 160  # bytes, and those of them that hold number, state and cell
LONGEST = 80  # characters of a call or a communicator's name, on every rank alike, as ranks compare them
CARRY_SECONDS = 0.5

PROGRAM = "program"

current: Board | None = None  # the board of this process, once the world has put one up
cell = ""  # which of the notebook's cells this rank runs, if a notebook has said so; PROGRAM in a script
# Of this rank's last operation: operation, op, peer, algorithm, group, number, and if others saw it from its start.
last: tuple = ("", "", None, "", "", 0, False)
waits: Call | None = None  # the operation in which this rank waits, once it has waited longer than most take


@dataclass
class Sighting:
    """What a rank did last. ``state`` is ``waits``, ``started`` (it computes meanwhile), ``finished``, ``elsewhere``
    (in the line ``where``, and the operation was its last), or a sentence's end such as ``raised ValueError: ...``;
    ``over`` is the notebook's cell or the program that it has come to the end of, well or not; the rest is that of the
    operation (call.py)."""

    state: str
    operation: str = ""
    what: str = ""
    where: str = ""
    group: str = ""
    number: int = 0
    peers: tuple = ()
    over: str = ""


def folder_in_memory() -> str | None:
    """Where small files of this machine lie in memory; None, as ``tempfile`` takes it, for where others lie."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Board:
    """One slot a rank in a file that all ``members`` of a node have open. Ranks count here as they do in the world."""

    def __init__(self, file: str, rank: int, members: Iterable[int]):
        self.rank = rank
        self.members = list(members)
        self._mine = self.members.index(rank)
        self._number, self._call = 0, _in_words()
        with open(file, "r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), SLOT * len(self.members))

    @staticmethod
    def make_file(size: int) -> str:
        """A file for the slots of ``size`` ranks, in memory where the system can do that."""
        handle, name = tempfile.mkstemp(prefix="dtlib-board-", dir=folder_in_memory())
        os.truncate(handle, SLOT * size)
        os.close(handle)
        return name

    def publish(self, state: str, call: Call | None = None) -> None:
        """Say what this rank does; without a call it is about the last one."""
        if call is not None:
            words = _in_words(call.operation, str(call)[:LONGEST], call.where, call.group[-LONGEST:], tuple(call.peers))
            self._number, self._call = call.number, words
        self._write(state)

    def publish_place(self, state: str, where: str = "", over: str = "") -> None:
        """Say where this rank is outside operations, and which one was its last."""
        operation, op, peer, algorithm, group, self._number, _ = last
        self._call = _in_words(operation, in_short(operation, op, peer, algorithm), where, group[-LONGEST:])
        self._write(state, over)

    def end_cell(self, state: str) -> None:
        """Say how the cell ended on this rank, which calls nothing more in it."""
        self._write(state, over=cell)

    def _write(self, state: str, over: str = "") -> None:
        head = b"%d %b" % (self._number, _state_in_words(state, over))
        start = SLOT * self._mine
        self._memory[start : start + SLOT] = head.ljust(HEAD) + self._call

    def clear(self, state: str) -> None:
        """Forget the last call: what was before concerns nobody any more."""
        self._number, self._call = 0, _in_words()
        self._write(state)

    def seen(self) -> dict[int, Sighting]:
        """What each rank did last; a rank is missing if it has not said anything yet, or is writing just now."""
        found = {}
        for slot, rank in enumerate(self.members):
            with suppress(ValueError):
                found[rank] = _read(self._memory[SLOT * slot : SLOT * (slot + 1)])
        return found


class ClusterBoard(Board):
    """The boards of several nodes: each node's first rank carries its own to ``store`` (torch's), again and again.

    ``node`` is this node's index and ``nodes`` says how many there are. What is seen of other nodes is half a second
    old.
    """

    def __init__(self, file: str, rank: int, members: Iterable[int], node: int, nodes: int, store: Store):
        super().__init__(file, rank, members)
        self._node, self._nodes, self._store = node, nodes, store
        if self._mine == 0:
            threading.Thread(target=self._carry, name="dtlib board", daemon=True).start()

    def _carry(self) -> None:
        with suppress(RuntimeError):  # the store has ended: so has the job
            while True:
                seen = {rank: asdict(sighting) for rank, sighting in super().seen().items()}
                self._store.set(f"node {self._node}", json.dumps(seen))
                time.sleep(CARRY_SECONDS)

    def seen(self) -> dict[int, Sighting]:
        found = super().seen()
        for node in range(self._nodes):
            key = f"node {node}"
            if node != self._node and self._store.check([key]):
                others = json.loads(self._store.get(key))
                found.update({int(rank): _sighting(**content) for rank, content in others.items()})
        return found


@lru_cache(maxsize=1024)
def _in_words(operation="", what="", where="", group="", peers=()) -> bytes:
    """A call as JSON that fits into its part of a slot: what is least needed is cut first. Without its peers, a rank
    waits for all."""
    content = {"operation": operation, "what": what, "where": where, "group": group, "peers": peers}
    for name, length in (
        ("where", 200), ("where", 40), ("peers", 0), ("where", 0), ("what", 20), ("group", 0), ("operation", 20)
    ):  # fmt: skip
        content[name] = content[name][:length]
        text = json.dumps(content, ensure_ascii=False).encode(errors="replace")
        if len(text) <= SLOT - HEAD:
            break
    return text.ljust(SLOT - HEAD)


@lru_cache(maxsize=256)
def _state_in_words(state: str, over: str) -> bytes:
    for length in (80, 40, 20, 0):
        text = json.dumps([state[:length], over], ensure_ascii=False).encode(errors="replace")
        if len(text) <= HEAD - 20:  # beside the number
            return text
    return json.dumps(["", ""]).encode()


def _read(slot) -> Sighting:
    number, _, state = slot[:HEAD].partition(b" ")
    state, over = json.loads(state)
    return _sighting(state, number=int(number), over=over, **json.loads(slot[HEAD:]))


def _sighting(state, peers=(), **facts) -> Sighting:
    return Sighting(state, peers=tuple(peers), **facts)


def publish(state: str, call: Call | None = None) -> None:
    """Say on the board, if there is one, what this rank does."""
    if current is not None:
        current.publish(state, call)


def end_cell(state: str) -> None:
    """Say on the board, if there is one, how the notebook's cell ended on this rank."""
    global cell
    if current is not None:
        current.end_cell(state)
    cell = ""
