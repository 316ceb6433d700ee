"""Check that an answer waits for its asynchronous operations, especially sends.

MPI may read the tensor until ``wait()`` returns. If the answer changes the tensor earlier, wrong values are sent. Short
messages leave at once, so neither values nor messages reveal a missing wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from dtlib.lab.foreign import Communicator


class _Watched:
    """A handle that records whether its completion was seen."""

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
    """Yield a list that collects the handles of all sends, or of another operation, on ``comm`` in this block.

    These are operations with ``async_op=True``, or started by torch. Requests of mpi4py are not included, because its
    ``Waitall`` could not be observed.
    """
    call, handles = getattr(comm, operation), []

    def watched(*arguments, **named):
        got = call(*arguments, **named)
        if not hasattr(got, "wait"):
            return got
        handles.append(_Watched(got))
        return handles[-1]

    with patch.object(comm, operation, watched):
        yield handles


def count_unfinished(handles: list[_Watched]) -> tuple[int, int]:
    """Return how many operations were never seen to complete, and the number of all."""
    return sum(not handle.seen for handle in handles), len(handles)
