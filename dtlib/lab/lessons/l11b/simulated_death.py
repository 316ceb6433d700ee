"""A rank that dies without dying: SIMULATED, so that an exercise on engines can lose one and keep it.

    before the step       as always
    its first all_reduce  all ranks take part; then one dies, some get an error, the others what they waited for
    calls after that      an error on all who are left, until they have a new communicator from ``shrunk(comm)``

The error is MPI's own, and ``shrunk`` does what that of dtlib.recovery does: with it an answer runs under ULFM too.
"""

from dtlib.errors import DtlibError

MOST_SHRINKS = 3


class Died(BaseException):
    """Ends this rank's part: nothing in an answer should catch it."""


class Apart(BaseException):
    """Ranks go on with different steps."""


class Endless(BaseException):
    """An answer that goes on for ever."""


class Dying:
    """``comm`` with one death on it: that of ``rank`` in step ``step``, counted from 0, in its first all_reduce; those
    in ``ahead`` still get what that call returns. With ``rank=None`` nobody dies. ``at`` is the step under way."""

    def __init__(self, comm, rank: int | None = None, step: int = 0, ahead=(), shrinks: int = 0):
        self.rank, self.size, self.at = comm.rank, comm.size, None
        self._comm, self._dies, self._step, self._ahead = comm, rank, step, ahead
        self._failed, self._shrinks = False, shrinks

    def all_reduce(self, tensor, op="sum"):
        self._refuse_if_failed()
        before = tensor.clone()
        self._comm.all_reduce(tensor, op)
        if self._dies is not None and self.at == self._step:
            self._failed = True
            if self.rank == self._dies:
                raise Died
            if self.rank not in self._ahead:
                tensor.copy_(before)
                self._refuse_if_failed()
        return tensor

    def broadcast(self, tensor, root=0):
        self._refuse_if_failed()
        return self._comm.broadcast(tensor, root)

    def broadcast_object(self, thing, root=0):
        self._refuse_if_failed()
        return self._comm.broadcast_object(thing, root)

    def all_gather_object(self, thing):
        self._refuse_if_failed()
        return self._comm.all_gather_object(thing)

    def barrier(self):
        self._refuse_if_failed()
        self._comm.barrier()

    def _refuse_if_failed(self):
        from mpi4py import MPI

        if self._failed:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)

    def __getattr__(self, name):
        raise DtlibError(
            f"comm.{name}: here comm has rank, size, all_reduce, broadcast, broadcast_object, all_gather_object and "
            "barrier."
        )

    def leave(self) -> None:
        """What a rank that has died, or is through, does while the others shrink: they are told, and go on without."""
        if self._dies is not None and not self.__dict__.get("shrunk"):
            self._comm.split(None)


def shrunk(comm: Dying) -> Dying:
    """A communicator of those who live, in their old order; all of them call it. SIMULATED: the dead one comes too."""
    if comm._shrinks == MOST_SHRINKS:
        raise Endless
    comm.shrunk = True
    comm.rest = comm._comm.split(0)
    return Dying(comm.rest, shrinks=comm._shrinks + 1)
