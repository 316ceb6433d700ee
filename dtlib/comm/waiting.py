"""The one place where a rank waits for others.

A blocking MPI call cannot be interrupted: it does not see Ctrl-C, and it spins on a core until its peers come. So every
verb is a task made of non-blocking sends and receives, and waiting means asking again and again whether they are done:
first quickly, then with naps that leave the core to others.

Collectives of one communicator run one after the other, in the order in which they were started. Whoever waits, for
whatever, drives all of them: a task that nobody waits for yet goes on meanwhile.
"""

import os
import time
from collections import deque

from dtlib.errors import WaitTimeout

SPIN_SECONDS = 0.0005  # small collectives finish within this
YIELD_SECONDS = 0.02  # and most large ones within this: until then others get the core only if they want it
LONGEST_NAP = 0.005

# Of a task that was interrupted, MPI may still write into the buffers: they must outlive it.
_abandoned = []
_active: dict["Queue", None] = {}  # queues with tasks, in the order in which they got them
_posted: dict["Task", None] = {}  # sends and receives under way; here, because a handle may be thrown away unused


class Task:
    """A verb under way: ``steps`` yields lists of requests; ``finish()`` brings the result home and returns it."""

    def __init__(self, steps, link, finish, description: str, keep=None):
        self.description = description
        self.done = False
        self.error = None
        self.value = None
        self._steps = steps
        self._link = link
        self._finish = finish
        self._requests = []
        self._keep = keep  # buffers that MPI reads or writes meanwhile

    def advance(self) -> bool:
        """Do what can be done without waiting; True once all is done, or has failed."""
        try:
            while not self.done:
                if self._requests and not self._link.all_done(self._requests):
                    return False
                self._requests = next(self._steps, None)
                if self._requests is None:
                    self.value = self._finish()
                    self.done = True
                    self._keep = None
        except Exception as error:  # whoever waits for this task is told, and not who happens to drive it
            self.error = error
            self.done = True
        return True


class Queue:
    """The collectives of one communicator that are under way."""

    def __init__(self):
        self._tasks = deque()
        self.broken = None  # why this communicator cannot be used any more

    def append(self, task: Task) -> None:
        self._tasks.append(task)
        _active[self] = None

    def advance(self) -> None:
        while self._tasks and self._tasks[0].advance():
            self._tasks.popleft()
        if not self._tasks:
            _active.pop(self, None)

    def abandon(self, why: str) -> None:
        """Give up all tasks: this rank is out of step with the others, and what they send must meet nothing new."""
        _abandoned.extend(self._tasks)
        self._tasks.clear()
        _active.pop(self, None)
        self.broken = self.broken or why


def post(task: Task) -> None:
    """Start a task that waits for no turn: a send or a receive."""
    _posted[task] = None
    task.advance()


def advance_all() -> None:
    """Let everything that is under way make progress."""
    for queue in list(_active):
        queue.advance()
    for task in list(_posted):
        if task.advance():
            _posted.pop(task, None)


class Handle:
    """A verb that was started with ``async_op=True``."""

    def __init__(self, task: Task, queue: Queue, time_limit: float | None):
        self._task = task
        self._queue = queue
        self._time_limit = time_limit

    def done(self) -> bool:
        """True once the verb is complete on this rank. Does not wait."""
        return self._look()

    def wait(self):
        """Wait for the end and return what the verb returns.

        Raises ``WaitTimeout`` after the communicator's ``time_limit``; Ctrl-C or Stop ends it at once. After either
        the communicator is broken, and ``dtlib.reset()`` on all ranks gives a new one.
        """
        started = time.monotonic()
        nap = 0.0
        try:
            while not self._look():
                waited = time.monotonic() - started
                if waited < SPIN_SECONDS:
                    continue
                if self._time_limit is not None and waited > self._time_limit:
                    raise WaitTimeout(
                        f"{self._task.description} waited {self._time_limit:g} s for the other ranks: one of them "
                        "did not call it, or raised an error. Call dtlib.reset() on all ranks to go on."
                    )
                if waited < YIELD_SECONDS:
                    os.sched_yield()
                    continue
                nap = min(LONGEST_NAP, nap + 0.0002)
                time.sleep(nap)
            if self._task.error:
                raise self._task.error
        except BaseException:
            _abandoned.append(self._task)
            _posted.pop(self._task, None)
            self._queue.abandon(f"was interrupted in {self._task.description}")
            raise
        return self._task.value

    def _look(self) -> bool:
        advance_all()
        return self._task.done
