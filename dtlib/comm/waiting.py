"""The messages of an operation, and the one place where a rank waits for others.

A blocking MPI call cannot be interrupted: it does not see Ctrl-C, and it spins on a core until its peers come. So every
operation is made of non-blocking sends and receives, and waiting means asking again and again whether they are done:
first quickly, then with naps that leave the core to others.

    Link        the sends and receives of one operation: they are started, and asked whether they are done
    Operation   an algorithm's generator, which yields requests of its link; the caller's handle, with which it waits
    Queue       the collectives of one communicator, in their order

Collectives of one communicator run one after the other, in the order in which they were started. Whoever waits, for
whatever, drives all of them: an operation that nobody waits for yet goes on meanwhile.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from dtlib.comm.call import callers_line
from dtlib.comm.watch import board, in_vain, recorder
from dtlib.errors import RESET, CommunicationError, DtlibError, PeerFailed, WaitTimeout

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from dtlib.comm.call import Call
    from dtlib.comm.link_types import Request

SPIN_SECONDS = 0.0005  # small collectives finish within this
YIELD_SECONDS = 0.02  # and most large ones within this: until then others get the core only if they want it
ELBOWED_SECONDS = 0.001  # a yield that takes longer met somebody who computes, and is not asked to yield back:
AVOID_SECONDS = 0.2  # for so long naps of SHORTEST_NAP instead, as who wakes up gets the core before who computes
SHORTEST_NAP = 0.00005
NAPS = 0.1  # from then on naps: this times the square of the wait so far, so 1 % of it after a tenth of a second,
LONGEST_NAP = 0.05  # and never more than this
LOOKS = 10  # between two pieces of computing
KEPT = 2**14  # bytes of scratch memory
NOTICE_SECONDS = 3.0  # until a notebook shows whom everybody waits for
V = TypeVar("V")  # what an operation returns
LOOK_SECONDS = 0.25  # from one look at the others to the next

LARGEST = 2**30  # bytes: from here on messages are cut, as MPI counts what it sends in 31 bits

crowded = False  # True where ranks outnumber cores: then whoever spins holds up the rank that it waits for
_naps_until = 0.0  # while others compute on this rank's core, which yielding does not get back
# How a notebook is told of a long wait: a function of one sentence, or of None once it is over.
notice: Callable[[str | None], object] | None = None

# Of a task that was interrupted, MPI may still write into the buffers: they are kept until it says that it is done.
_abandoned: list[Operation] = []
_active: dict[Queue, None] = {}  # queues with tasks, in the order in which they got them
_posted: dict[Operation, Queue] = {}  # sends and receives under way; here, because a handle may be thrown away unused
_lock = threading.RLock()  # for the progress thread; without one nobody contends for it


class Link:
    """Messages under one tag. ``messages`` and ``bytes`` count what this rank has sent through it."""

    def __init__(self, mpi: MPI.Comm, rank: int, size: int, tag: int, buffers: Scratch):
        self.mpi = mpi
        self.rank = rank
        self.size = size
        self.messages = 0
        self.bytes = 0
        self._tag = tag
        self._buffers = buffers
        self._cut = False  # has it had messages that were cut?

    def send(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a contiguous array; returns a request."""
        self.messages += 1
        self.bytes += array.nbytes
        return self._start(self.mpi.Isend, array, dest)

    def recv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive into a contiguous array; returns a request."""
        return self._start(self.mpi.Irecv, array, source)

    def _start(self, begin, array: np.ndarray, other: int):
        if array.nbytes < LARGEST:
            return begin(array, other, self._tag)
        from dtlib.comm.pieces import Pieces

        self._cut = True
        return Pieces(lambda piece: begin(piece, other, self._tag), array, LARGEST)

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
        import numpy as np

        return np.zeros(0, dtype=np.uint8)

    def scratch(self, like: np.ndarray, number: int = 0) -> np.ndarray:
        return self._buffers.like(like, number)


class Scratch:
    """Memory that the operations of a communicator receive into, one after the other.

    Up to KEPT bytes are kept from call to call. More lives as long as an operation uses it, and is not there beside
    the temporaries of an optimizer's step.
    """

    def __init__(self):
        self._rooms: WeakValueDictionary[tuple, np.ndarray] = WeakValueDictionary()
        self._kept: dict[tuple, np.ndarray] = {}

    def like(self, array: np.ndarray, number: int) -> np.ndarray:
        """Room for an array like this one, and for each number another one."""
        key, nbytes = (array.dtype, number), array.nbytes
        if nbytes <= KEPT:
            room = self._kept.get(key)
            if room is None or room.nbytes < nbytes:
                room = self._kept[key] = _empty(nbytes).view(array.dtype)
            return room[: array.size]
        # From page to page processors copy fastest, and large torch tensors begin on one.
        room, page = self._rooms.get(key), mmap.PAGESIZE
        if room is None or room.nbytes < nbytes + page - 1:
            room = self._rooms[key] = _empty(nbytes + page - 1)
        start = -room.ctypes.data % page
        return room[start : start + nbytes].view(array.dtype)

    def held(self) -> list:
        """What is kept, as tensors."""
        arrays = [room.base for room in self._kept.values()]
        return [array.base for array in arrays if array is not None and array.base is not None]


def _empty(size: int) -> np.ndarray:
    """Bytes from torch, if it is there, so that dtlib.memory counts them like all others."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.empty(size, dtype=torch.uint8).numpy()
    import numpy as np

    return np.empty(size, dtype=np.uint8)


class IncomingLink:
    """The receiving end of one message: it knows how long the message was."""

    def __init__(self, link: Link):
        from mpi4py import MPI

        self.messages = self.bytes = 0
        self._link = link
        self._mpi, self._status = MPI, MPI.Status()
        self._too_long = False

    def recv(self, array: np.ndarray, source: int) -> Request:
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
        """Bytes of the last message; None where it was longer than there was room for."""
        return None if self._too_long else self._status.Get_count(self._mpi.BYTE) + getattr(self._arriving, "come", 0)


class Operation(Generic[V]):
    """A use of an operation, from its arguments to its result; with ``async_op=True`` its caller gets it as a handle.

    ``steps`` yields lists of requests of ``link``; ``finish()`` brings home and returns the result; ``keep`` are
    buffers that MPI reads or writes meanwhile.
    """

    __slots__ = (
        "_blocking", "_finish", "_keep", "_link", "_queue", "_requests", "_steps", "_time_limit", "call", "complete",
        "error", "event", "rounds", "value",
    )  # fmt: skip

    def __init__(self, call: Call, link: object, steps: Iterator[list], finish: Callable[[], V], keep: object = None):
        self.call = call
        self.complete = False  # well, or with an error
        self.error: BaseException | None = None
        self.event: recorder.Event | None = None  # what the recorder keeps of it
        self.rounds = 0  # how often what it waited for has arrived
        self._link: Any = link
        self._steps: Any = steps
        self._finish = finish
        self._keep = keep
        self._requests: Any = []  # None: not known
        self.value: Any = None

    def start(self, owner: object, async_op: bool = False, in_turn: bool = True) -> V | Operation[V]:
        """Start on a communicator, and wait for the result unless it is asynchronous: then return this handle.

        ``in_turn``: after all that this communicator has started so, as a collective.
        """
        comm: Any = owner
        self._queue: Queue = comm._queue
        self._time_limit = comm.time_limit
        self._blocking = not async_op
        if broken := self._queue.broken:
            raise CommunicationError(f"This communicator {broken}, so ranks are out of step. {RESET}")
        # The board, a recording and a comparison of calls want the caller's line; without them nobody looks for it.
        call, on_board = self.call, comm.on_board
        call.hidden = not on_board
        call.watched = watched = on_board and self._time_limit is not None
        if watched or recorder.recordings or comm.verify:
            call.where = callers_line()
        if recorder.recordings:
            self.event = recorder.event_of(call, lane="background" if async_op else "main")
            self.event.emulated, self.event.simulated = comm.wire is not None, comm.simulated
        if on_board:
            board.last = call.operation, call.op, call.peer, call.algorithm, call.group, call.number, watched
        if watched:
            board.publish("started", call)
        # What is short and alone ends here, without a turn in the queue and a look at what else is under way.
        if async_op or not idle() or not self._finish_soon():
            (self._queue.append if in_turn else self._queue.post)(self)
        return self if async_op else self.wait()

    def fail(self, error: BaseException) -> None:
        """End without a result; whoever waits for it gets the error."""
        self.error = error
        self.complete = True
        with suppress(Exception):
            self._link.give_up(self._requests)
        drop_abandoned()
        _abandoned.append(self)

    def over(self) -> bool:
        """True if what was given up has nothing under way any more."""
        try:
            return self._requests is not None and (not self._requests or self._link.all_done(self._requests))
        except Exception:
            return False  # one of its messages failed: ask again for the others

    def advance(self) -> bool:
        """Do what can be done without waiting; True once all is done, or has failed."""
        try:
            while not self.complete:
                if self._requests and not self._link.all_done(self._requests):
                    return False
                self.rounds += 1
                self._requests = None  # not known while it starts some
                self._requests = next(self._steps, None)
                if self._requests is None:
                    self._requests = []
                    self.value = self._finish()
                    self.complete = True
                    self._steps = self._keep = None
        except BaseException as error:  # whoever waits for it is told, and not who happens to drive it
            if isinstance(error, DtlibError):
                self._requests = []  # our own are raised where nothing is under way
            elif isinstance(error, Exception):
                error.add_note(f"In {self.call}: all ranks need the same shape and dtype. {RESET}")
            stopped = not isinstance(error, Exception)  # a generator that was interrupted would look finished
            self.fail(CommunicationError(f"{self.call} was interrupted. {RESET}") if stopped else error)
            if stopped:
                raise
        if self.event is not None and self.event.end is None:
            self.event.end = time.monotonic()
            self.event.messages, self.event.bytes = self._link.messages, self._link.bytes
        return True

    def done(self) -> bool:
        """True once the operation is complete on this rank. Does not wait."""
        advance_all()
        return self.complete

    def _finish_soon(self) -> bool:
        """Drive it for as long as a small message takes; True if it is complete."""
        deadline = time.monotonic() + SPIN_SECONDS
        try:
            while not self.advance():
                if time.monotonic() > deadline:
                    return False
                if crowded:
                    let_go()
        except BaseException:
            self._give_up("was interrupted")
            raise
        return True

    def wait(self) -> V:
        """Wait for the end and return what the operation returns.

        Raises ``WaitTimeout`` after the communicator's ``time_limit``; Ctrl-C or Stop ends it at once. After either
        the communicator is broken, and ``dtlib.reset()`` on all ranks gives a new one.
        """
        if self.complete and not (self.error or self.call.watched or recorder.recordings):
            return self.value
        waits = recorder.event_of(self.call, "wait") if recorder.recordings and not self._blocking else None
        if not self.complete:
            self._wait()
        if self.error:
            self._publish(f"raised {type(self.error).__name__}")
            self._queue.abandon(f"failed in {self.call}")
            raise self.error
        self._publish("finished")
        if waits is not None:
            waits.end = time.monotonic()
        return self.value

    def _wait(self) -> None:
        self._publish("waits")
        call, limit = self.call, self._time_limit
        started = last_round = told = looked = time.monotonic()
        rounds, over = self.rounds, inf  # since when a rank has been over that this one waits for
        try:
            while True:
                advance_all()
                if self.complete:
                    return
                now = time.monotonic()
                if limit is not None and now - started > limit:
                    raise WaitTimeout(in_vain.sentence(call, limit))
                if self.rounds != rounds:
                    rounds, last_round, over = self.rounds, now, inf
                waited = now - last_round
                if waited < YIELD_SECONDS:
                    if waited > SPIN_SECONDS or crowded:
                        let_go()
                    continue
                if now - max(looked, last_round) > LOOK_SECONDS and not call.hidden:
                    looked = now
                    self._show()
                    over = min(over, now) if in_vain.look(call, now - over) else inf
                if notice is not None and now - max(told, started + NOTICE_SECONDS - 1) > 1:
                    told = now
                    notice(f"{now - started:.0f} s in {call}: {in_vain.whom()}")
                time.sleep(min(LONGEST_NAP, NAPS * waited**2))
        except BaseException as error:
            self._give_up("timed out" if isinstance(error, WaitTimeout | PeerFailed) else "was interrupted")
            raise
        finally:
            board.waits = None
            if told > started and notice is not None:
                notice(None)

    def _show(self) -> None:
        """Let the others see a wait that takes long, whether its operation is watched from its start or not."""
        call = self.call
        if board.current is not None:
            call.where = call.where or callers_line()
            call.watched, board.waits = True, call
            self._publish("waits")

    def _publish(self, state: str) -> None:
        if self.call.watched:
            board.publish(state, self.call)

    def _give_up(self, how: str) -> None:
        self._publish(how)
        with _lock:  # a progress thread may be driving it
            if not self.complete:
                self.fail(CommunicationError(f"{self.call} was interrupted. {RESET}"))
            _posted.pop(self, None)
            self._queue.abandon(f"was interrupted in {self.call}")


class Queue:
    """The collectives of one communicator that are under way."""

    def __init__(self):
        self._tasks: deque[Operation] = deque()
        self.broken = None  # why this communicator cannot be used any more

    def append(self, task: Operation) -> None:
        """Start a collective, or let it wait for its turn."""
        with _lock:
            self._tasks.append(task)
            _active[self] = None
            if len(self._tasks) == 1:
                self.advance()

    def post(self, task: Operation) -> None:
        """Start a task that waits for no turn: a send or a receive."""
        with _lock:
            if not task.advance():
                _posted[task] = self

    def advance(self) -> None:
        while self._tasks and self._tasks[0].advance():
            ended = self._tasks.popleft()
            if ended.error:
                self.abandon(f"failed in {ended.call}")
        if not self._tasks:
            _active.pop(self, None)

    def abandon(self, why: str) -> None:
        """Give up all tasks: this rank is out of step with the others, and what they send must meet nothing new."""
        with _lock:
            for task in [*self._tasks, *(task for task, queue in _posted.items() if queue is self)]:
                _posted.pop(task, None)
                if not task.complete:
                    task.fail(CommunicationError(f"{task.call} was given up, as this communicator {why}. {RESET}"))
            self._tasks.clear()
            _active.pop(self, None)
            self.broken = self.broken or why


def let_go() -> None:
    """Give the core to others for a moment: to those who yield it soon, or compute on it beside this rank."""
    global _naps_until
    now = time.monotonic()
    if now < _naps_until:
        time.sleep(SHORTEST_NAP)
        return
    os.sched_yield()
    if time.monotonic() - now > ELBOWED_SECONDS:
        _naps_until = now + AVOID_SECONDS


def drop_abandoned() -> None:
    """Forget what was given up as far as MPI is done with it."""
    with _lock:
        _abandoned[:] = [task for task in _abandoned if not task.over()]


def advance_all() -> None:
    """Let everything that is under way make progress."""
    with _lock:
        for queue in list(_active):
            queue.advance()
        for task in list(_posted):
            if task.advance():
                _posted.pop(task, None)


def move_on() -> None:
    """Between two pieces of computing: let what is under way go some steps on.

    A message takes several looks, and the ranks that it goes to and comes from need a core meanwhile.
    """
    for _ in range(LOOKS):
        advance_all()
        if idle():
            return
        os.sched_yield()


def idle() -> bool:
    """True if nothing is under way."""
    return not (_active or _posted)


@contextmanager
def progress_thread(every: float = 0.0002) -> Iterator[None]:
    """Let asynchronous operations go on by themselves, in a thread that looks after them ``every`` so many seconds.

    It pays where this rank's core is idle meanwhile (an accelerator computes, or the network is slow). Where the core
    computes, the thread takes away as much as it gives: there, waiting in between is enough.
    """
    ended = threading.Event()

    def work():
        while not ended.wait(every):
            if _active or _posted:
                advance_all()

    thread = threading.Thread(target=work, name="dtlib progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
