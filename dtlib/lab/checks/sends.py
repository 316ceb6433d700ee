"""Asynchronous operations of an answer, sends above all: does it ever ask whether they are over?

Until ``wait()`` returns, MPI may still read the tensor; whoever changes it before, sends what nobody meant. Short
messages leave at once, so that neither values nor messages show a wait that is missing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from dtlib.lab.foreign import Communicator


class _Watched:
    """A handle that remembers whether its end was seen."""

    def __init__(self, handle):
        self._handle, self.seen = handle, False

    def wait(self):
        value = self._handle.wait()
        self.seen = True
        return value

    def done(self) -> bool:
        self.seen = self._handle.done() or self.seen
        return self.seen


@contextmanager
def watched_handles(comm: Communicator, operation: str = "send") -> Iterator[list]:
    """The handles of all sends, or of another operation, that are started on ``comm`` meanwhile, with ``async_op=True``
    or by torch; yields them as a list. Those of mpi4py are not among them, as ``Waitall`` would not be seen."""
    call, handles = getattr(comm, operation), []

    def watched(*arguments, **named):
        got = call(*arguments, **named)
        if not hasattr(got, "wait"):
            return got
        handles.append(_Watched(got))
        return handles[-1]

    vars(comm)[operation] = watched
    try:
        yield handles
    finally:
        del vars(comm)[operation]


def not_waited_for(handles: list[_Watched]) -> tuple[int, int]:
    """How many of these operations nobody has seen the end of, and how many there are."""
    return sum(not handle.seen for handle in handles), len(handles)
