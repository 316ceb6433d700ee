"""Asynchronous sends of an answer: does it ever ask whether they are over?

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
def watched_sends(comm: Communicator) -> Iterator[list]:
    """The handles of all sends that are started on ``comm`` meanwhile, with ``async_op=True`` or by ``dist.isend``;
    yields them as a list. Those of mpi4py are not among them, as ``Waitall`` would not be seen."""
    send, handles = comm.send, []

    def watched(tensor, dest, tag=0, async_op=False):
        got = send(tensor, dest, tag, async_op)
        if not async_op:
            return got
        handles.append(_Watched(got))
        return handles[-1]

    vars(comm)["send"] = watched
    try:
        yield handles
    finally:
        del vars(comm)["send"]


def not_waited_for(handles: list[_Watched]) -> tuple[int, int]:
    """How many of these sends nobody has seen the end of, and how many there are."""
    return sum(not handle.seen for handle in handles), len(handles)
