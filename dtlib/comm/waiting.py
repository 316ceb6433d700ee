"""The messages of an operation, and the one place where a rank waits for other ranks.

A blocking MPI call cannot be interrupted: it does not notice Ctrl-C, and it spins on a core until its peers arrive. So
every operation uses non-blocking sends and receives. Waiting means polling: first without a pause, then with sleeps
that leave the core to other processes.

    Link        the sends and receives of one operation: starts them, and polls whether they are complete
    Operation   an algorithm's generator, which yields requests of its link; also the handle on which the caller waits
    Queue       the collectives of one communicator, in their order

Collectives of one communicator run one at a time, in the order of their start. Any wait polls all pending operations,
even if no rank waits for them. The board (watch/board.py) publishes each rank's last operation in shared memory.
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
from weakref import ref

from dtlib.comm.call import callers_line
from dtlib.comm.watch import board, deadlock, recorder
from dtlib.errors import RESET, CommunicationError, DtlibError, PeerFailed, WaitTimeout

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from dtlib.comm.call import Call
    from dtlib.comm.link_types import Request

SPIN_SECONDS = 0.0005  # poll without a pause: small collectives finish within this time
YIELD_SECONDS = 0.02  # then yield the core between polls: most large collectives finish within this time
# A yield that takes over LONG_YIELD_SECONDS gave the core to a process that computes and does not yield back. For the
# next NO_YIELD_SECONDS, sleep for SHORTEST_SLEEP instead of yielding: a process that wakes up gets the core at once.
LONG_YIELD_SECONDS = 0.001
NO_YIELD_SECONDS = 0.2
SHORTEST_SLEEP = 0.00005
SLEEP_FACTOR = 0.1  # then sleep SLEEP_FACTOR * (seconds waited so far)**2 seconds, such as 1 ms after 0.1 s,
LONGEST_SLEEP = 0.05  # but at most this long
POLLS_PER_CALL = 10  # polls in one call of `poll_pending`
SCRATCH_BYTES = 2**14  # bytes of the largest scratch buffer that is kept between calls
V = TypeVar("V")  # result of an operation
CHECK_SECONDS = 0.25  # between two checks of the board
LARGEST = 2**30  # bytes per piece of a longer message, because MPI counts in 31 bits

oversubscribed = False  # True if ranks outnumber cores: then a rank that spins delays the rank that it waits for
_sleeps_until = 0.0  # until then sleep instead of yielding, because other processes compute on this core
# Shows a long wait in a notebook: called with a sentence, and with None once the wait is over. lab/engines/cells.py
# sets it; a script has watch/on_stderr.py instead.
notice: Callable[[str | None], object] | None = None
# Interrupted operations: MPI may still write into their buffers, which stay alive until their requests are complete.
_abandoned: list[Operation] = []
_active: dict[Queue, None] = {}  # queues with pending collectives, in order of start
_posted: dict[Operation, Queue] = {}  # pending sends and receives; kept here because a program may drop its handle
_lock = threading.RLock()  # needed with a progress thread; otherwise never contended


class Link:
    """Messages with one tag. ``messages`` and ``bytes`` count what this rank has sent through it."""

    def __init__(self, mpi: MPI.Comm, rank: int, size: int, tag: int, buffers: Scratch):
        self.mpi = mpi
        self.rank = rank
        self.size = size
        self.messages = 0
        self.bytes = 0
        self._tag = tag
        self._buffers = buffers
        self._cut = False  # True once a message was in pieces

    def send(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a contiguous array; return a request."""
        self.messages += 1
        self.bytes += array.nbytes
        return self._start(self.mpi.Isend, array, dest)

    def recv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive into a contiguous array; return a request."""
        return self._start(self.mpi.Irecv, array, source)

    def _start(self, begin, array: np.ndarray, other: int):
        if array.nbytes < LARGEST:
            return begin(array, other, self._tag)
        from dtlib.comm.pieces import Pieces

        self._cut = True
        return Pieces(lambda piece: begin(piece, other, self._tag), array, LARGEST)

    def all_done(self, requests: list) -> bool:
        """Return True once all requests are complete. Does not wait."""
        if self._cut:
            return all([request.Test() for request in requests])  # test all of them: pieces progress only when tested
        return type(requests[0]).Testall(requests)  # `Testall` of the class, MPI.Request

    def give_up(self, requests: list) -> None:
        """Cancel the requests. This ends receives that no message has matched. Open MPI cannot cancel sends."""
        for request in requests:
            if request:
                request.Cancel()

    def nothing(self) -> np.ndarray:
        """Return an empty array, for a message without content."""
        import numpy as np

        return np.zeros(0, dtype=np.uint8)

    def scratch(self, like: np.ndarray, number: int = 0) -> np.ndarray:
        """Return scratch memory for an array like this; each ``number`` has its own memory."""
        return self._buffers.like(like, number)


class Scratch:
    """Receive buffers that a communicator's operations use in turn.

    Up to SCRATCH_BYTES are kept between calls. A larger buffer lives only as long as an operation uses it, so it does
    not add to the memory of an optimizer's step.
    """

    def __init__(self):
        self._large: dict[tuple, tuple[ref[np.ndarray], int]] = {}
        self._kept: dict[tuple, np.ndarray] = {}

    def like(self, array: np.ndarray, number: int) -> np.ndarray:
        """Return a buffer for an array like this one; each ``number`` has its own buffer."""
        key, nbytes = (array.dtype, number), array.nbytes
        if nbytes <= SCRATCH_BYTES:
            buffer = self._kept.get(key)
            if buffer is None or buffer.nbytes < nbytes:
                buffer = self._kept[key] = _empty(nbytes)[0].view(array.dtype)
            return buffer[: array.size]
        large, start = self._large.get(key, (lambda: None, 0))
        if (buffer := large()) is None or buffer.nbytes < start + nbytes:
            buffer, start = _empty(nbytes, mmap.PAGESIZE)
            self._large[key] = ref(buffer), start
        return buffer[start : start + nbytes].view(array.dtype)

    def tensors(self) -> list:
        """Return the kept buffers, as tensors."""
        arrays = [buffer.base for buffer in self._kept.values()]
        return [array.base for array in arrays if array is not None and array.base is not None]


def _empty(size: int, boundary: int = 1) -> tuple[np.ndarray, int]:
    """Return an array in which ``size`` bytes begin at a ``boundary``, and their start.

    torch allocates it, if torch is loaded, so that dtlib.memory counts it.
    """
    if (torch := sys.modules.get("torch")) is not None:
        tensor = torch.empty(size + boundary - 1, dtype=torch.uint8)
        return tensor.numpy(), -tensor.data_ptr() % boundary
    import numpy as np

    array = np.empty(size + boundary - 1, dtype=np.uint8)
    return array, -array.ctypes.data % boundary


class IncomingLink(Link):
    """The receiving end of one message; it knows the length of the message."""

    _too_long = False

    def recv(self, array: np.ndarray, source: int) -> Request:
        """Start to receive into a contiguous array; return a request."""
        from mpi4py import MPI

        self._mpi, self._status = MPI, MPI.Status()
        self._arriving = super().recv(array, source)
        return self._arriving

    def all_done(self, requests: list) -> bool:
        """Return True once the message is complete, or was too long for the array. Does not wait."""
        try:
            return requests[0].Test(self._status)
        except self._mpi.Exception as error:
            self._too_long = error.Get_error_class() == self._mpi.ERR_TRUNCATE
            if self._too_long:
                return True
            raise

    def length(self) -> int | None:
        """Return the bytes of the last message; None if it was longer than the array."""
        return None if self._too_long else self._status.Get_count(self._mpi.BYTE) + getattr(self._arriving, "nbytes", 0)


class Operation(Generic[V]):
    """One run of an operation, from arguments to result; with ``async_op=True`` the caller gets it as a handle.

    ``steps`` yields lists of requests of ``link``. ``finish()`` stores the result and returns it. ``keep`` are the
    buffers that MPI reads or writes meanwhile.
    """

    __slots__ = (
        "_blocking", "_finish", "_keep", "_link", "_queue", "_requests", "_steps", "_time_limit", "call", "complete",
        "error", "event", "rounds", "tensor", "value",
    )  # fmt: skip

    def __init__(self, call: Call, link: object, steps: Iterator[list], finish: Callable[[], V], keep: object = None):
        self.call = call
        self.complete = False  # True after success and after an error
        self.error: BaseException | None = None
        self.event: recorder.Event | None = None  # the recorder's entry
        self.rounds = 0  # how many lists of requests have completed
        self._link: Any = link
        self._steps: Any = steps
        self._finish = finish
        self._keep = keep
        self._requests: Any = []  # None while unknown
        self.value: Any = None

    def start(self, owner: object, async_op: bool = False, in_turn: bool = True) -> V | Operation[V]:
        """Start on communicator ``owner``, ``in_turn`` after other collectives; return the result or this handle."""
        comm: Any = owner
        self._queue: Queue = comm._queue
        self._time_limit = comm.time_limit
        self._blocking = not async_op
        if broken := self._queue.broken:
            raise CommunicationError(f"This communicator {broken}, so ranks are out of step. {RESET}")
        # Finding the caller's line costs time. Only a recording and the comparison of calls need it at once.
        call, call.hidden = self.call, not comm.on_board
        if recorder.recordings or comm.verify:
            call.where = callers_line()
        if recorder.recordings:
            self.event = recorder.event_of(call, lane="background" if async_op else "main")
            self.event.emulated, self.event.simulated = comm.wire is not None, comm.simulated
        if comm.on_board:
            board.last = call
        # If nothing else is pending, poll for a moment: most small operations finish here, without the queue.
        if async_op or not idle() or not self._finish_soon():
            (self._queue.append if in_turn else self._queue.post)(self)
        return self if async_op else self.wait()

    def fail(self, error: BaseException) -> None:
        """End with an error, which ``wait`` raises."""
        self.error = error
        self.complete = True
        with suppress(Exception):
            self._link.give_up(self._requests)
        drop_abandoned()
        # MPI may still use the buffers, so keep this operation until its requests are complete.
        _abandoned.append(self)

    def requests_complete(self) -> bool:
        """Return True if an operation that was given up has no pending requests any more."""
        try:
            return self._requests is not None and (not self._requests or self._link.all_done(self._requests))
        except Exception:
            return False  # one message failed, and others may still be pending: ask again later

    def advance(self) -> bool:
        """Do everything that needs no waiting; return True once the operation is complete or has failed."""
        try:
            while not self.complete:
                if self._requests and not self._link.all_done(self._requests):
                    return False
                self.rounds += 1
                self._requests = None  # unknown while the generator starts new ones
                self._requests = next(self._steps, None)
                if self._requests is None:
                    self._requests = []
                    self.value = self._finish()
                    self.complete = True
                    self._steps = self._keep = None
        except BaseException as error:
            # Store the error for the caller of `wait`; the current caller may poll for another operation.
            if isinstance(error, DtlibError):
                self._requests = []  # dtlib raises its own errors only when nothing is pending
            elif isinstance(error, Exception):
                error.add_note(f"In {self.call}: all ranks need the same shape and dtype. {RESET}")
            # After an interrupt the generator would look finished, so the operation must be marked as failed.
            stopped = not isinstance(error, Exception)
            self.fail(CommunicationError(f"{self.call} was interrupted. {RESET}") if stopped else error)
            if stopped:
                raise
        if self.event is not None and self.event.end is None:
            self.event.end = time.monotonic()
            self.event.messages, self.event.bytes = self._link.messages, self._link.bytes
        return True

    def done(self) -> bool:
        """Return True once the operation is complete on this rank; raise its error. Does not wait."""
        advance_all()
        if self.error:
            self.wait()  # raises it
        return self.complete

    def _finish_soon(self) -> bool:
        """Poll for as long as a small message takes; return True if the operation is complete."""
        deadline = time.monotonic() + SPIN_SECONDS
        try:
            while not self.advance():
                if time.monotonic() > deadline:
                    return False
                if oversubscribed:
                    yield_core()
        except BaseException:
            self._give_up()
            raise
        return True

    def wait(self) -> V:
        """Wait until the operation is complete, and return its result.

        Raises ``WaitTimeout`` after the communicator's ``time_limit``; Ctrl-C or Stop ends the wait at once. Then the
        communicator is broken, and ``dtlib.reset()`` on all ranks creates a new one.
        """
        if self.complete and not (self.error or recorder.recordings):
            return self.value
        waits = recorder.event_of(self.call, "wait") if recorder.recordings and not self._blocking else None
        if not self.complete:
            self._wait()
        if self.error:
            self._queue.abandon(f"failed in {self.call}")
            raise self.error
        if waits is not None:
            waits.end = time.monotonic()
        return self.value

    def _wait(self) -> None:
        call, limit, state = self.call, self._time_limit, "was interrupted"
        started = last_round = notified = checked = time.monotonic()
        # `ended_since`: when this rank first saw that a rank it waits for has ended its cell or program; or inf.
        rounds, ended_since = self.rounds, inf
        try:
            while True:
                advance_all()
                if self.complete:
                    state = f"raised {type(self.error).__name__}" if self.error else "finished"
                    return
                now = time.monotonic()
                if limit is not None and now - started > limit:
                    self._show()
                    raise WaitTimeout(deadlock.sentence(call, limit))
                if self.rounds != rounds:
                    rounds, last_round, ended_since = self.rounds, now, inf
                # Measure from the last progress: an operation with many rounds polls quickly while messages arrive.
                waited = now - last_round
                if waited < YIELD_SECONDS:
                    if waited > SPIN_SECONDS or oversubscribed:
                        yield_core()
                    continue
                # A long wait appears on the board, and this rank checks whether it can still end.
                if now - max(checked, last_round) > CHECK_SECONDS and not call.hidden:
                    checked = now
                    self._show()
                    ended_since = min(ended_since, now) if deadlock.check_peers(call, now - ended_since) else inf
                if notice is not None and now - max(notified, started + board.NOTICE_SECONDS - 1) > 1:
                    notified = now
                    notice(f"{now - started:.0f} s in {call}: {deadlock.describe_missing()}")
                time.sleep(min(LONGEST_SLEEP, SLEEP_FACTOR * waited**2))
        except BaseException as error:
            if isinstance(error, WaitTimeout | PeerFailed):
                state = "timed out"
            if not call.hidden:
                board.last = call  # the rank stopped here, although it may have started later operations
            self._give_up()
            raise
        finally:
            if board.waits is call:
                board.waits = None
                board.publish(state, call)
            if notified > started and notice is not None:
                notice(None)

    def _show(self) -> None:
        call = self.call
        if not call.hidden:
            call.where = call.where or callers_line()
            board.waits = call
            board.publish("waits", call)

    def _give_up(self) -> None:
        with _lock:  # the progress thread may be advancing this operation
            if not self.complete:
                self.fail(CommunicationError(f"{self.call} was interrupted. {RESET}"))
            _posted.pop(self, None)
            self._queue.abandon(f"was interrupted in {self.call}")


class Queue:
    """The pending collectives of one communicator."""

    def __init__(self):
        self._tasks: deque[Operation] = deque()
        self.broken = None  # the reason why this communicator cannot be used any more

    def append(self, task: Operation) -> None:
        """Start a collective, or queue it behind earlier ones."""
        with _lock:
            self._tasks.append(task)
            _active[self] = None
            if len(self._tasks) == 1:
                self.advance()

    def post(self, task: Operation) -> None:
        """Start a send or a receive, which is not queued."""
        with _lock:
            if not task.advance():
                _posted[task] = self

    def advance(self) -> None:
        """Advance the first collective, and the next ones as each completes."""
        while self._tasks and self._tasks[0].advance():
            ended = self._tasks.popleft()
            if ended.error:
                self.abandon(f"failed in {ended.call}")
        if not self._tasks:
            _active.pop(self, None)

    def abandon(self, why: str) -> None:
        """Give up all pending operations and refuse new ones: this rank is out of step with the others."""
        with _lock:
            # Old messages of other ranks must not match new operations.
            for task in [*self._tasks, *(task for task, queue in _posted.items() if queue is self)]:
                _posted.pop(task, None)
                if not task.complete:
                    task.fail(CommunicationError(f"{task.call} was cancelled: this communicator {why}. {RESET}"))
            self._tasks.clear()
            _active.pop(self, None)
            self.broken = self.broken or why


def yield_core() -> None:
    """Give up the core for a moment: yield, or sleep if a recent yield took long (LONG_YIELD_SECONDS)."""
    global _sleeps_until
    now = time.monotonic()
    if now < _sleeps_until:
        time.sleep(SHORTEST_SLEEP)
        return
    os.sched_yield()
    if time.monotonic() - now > LONG_YIELD_SECONDS:
        _sleeps_until = now + NO_YIELD_SECONDS


def drop_abandoned() -> None:
    """Forget abandoned operations that MPI has completed."""
    with _lock:
        _abandoned[:] = [task for task in _abandoned if not task.requests_complete()]


def advance_all() -> None:
    """Advance all pending operations."""
    with _lock:
        for queue in list(_active):
            queue.advance()
        for task in list(_posted):
            if task.advance():
                _posted.pop(task, None)


def poll_pending() -> None:
    """Poll pending operations a few times, between two pieces of computing: one message needs several polls."""
    for _ in range(POLLS_PER_CALL):
        advance_all()
        if idle():
            return
        # The other ranks need a core to send and to receive.
        os.sched_yield()


def idle() -> bool:
    """Return True if no operation is pending."""
    return not (_active or _posted)


@contextmanager
def progress_thread(every: float = 0.0002) -> Iterator[None]:
    """Poll pending operations in a thread, once in ``every`` seconds.

    This pays if the core of this rank is otherwise idle (an accelerator computes, or the network is slow). If the core
    computes, the thread costs as much as it saves; polling between the computations is enough.
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
