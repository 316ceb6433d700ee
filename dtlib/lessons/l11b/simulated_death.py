"""A rank that dies without dying: SIMULATED, so that an exercise on engines can lose one and keep it.

    before the step       as always
    an all_reduce of it   all ranks take part; then one dies, some get an error, the others what they waited for
    calls after that      an error on all who are left, until they have a new communicator from ``shrunk(comm)``

The error is MPI's own, and ``shrunk`` does what that of dtlib.recovery does: with it an answer runs under ULFM too.
"""

from functools import cached_property
from typing import NamedTuple

from dtlib.errors import DtlibError
from dtlib.lab.checks.given import OfTheWorld

MOST_SHRINKS = 3


class Died(BaseException):
    """Ends this rank's part: nothing in an answer should catch it."""


class Apart(BaseException):
    """Ranks go on with different steps."""


class Endless(BaseException):
    """An answer that goes on for ever."""


class NoSuchRoot(BaseException):
    """A broadcast from a rank that the communicator does not have."""


class Death(NamedTuple):
    """``rank`` dies in ``step``, counted from 0, in this ``call`` of all_reduce; those ``ahead`` get what it returns.

    A negative rank counts from the last one."""

    rank: int
    step: int
    ahead: tuple = ()
    call: int = 0


class Dying:
    """``comm`` with the first of these ``deaths`` on it; the next one is on the communicator of those who are left.

    ``at`` is the step under way, and ``calls`` those of all_reduce in it; ``shrinks`` is how many deaths it has met
    through."""

    def __init__(self, comm, deaths=(), shrinks: int = 0):
        self.rank, self.size, self.members, self.at, self.calls = comm.rank, comm.size, comm.members, None, 0
        self.shrinks, self.failed, self.next = shrinks, False, None
        self._comm, self._death, self._later = comm, deaths[0] if deaths else None, deaths[1:]
        self._dead = False

    def all_reduce(self, tensor, op="sum"):
        self._refuse_if_failed()
        before = tensor.clone()
        self._comm.all_reduce(tensor, op)
        self.calls += 1
        if self._death is not None and self.at == self._death.step and self.calls > self._death.call:
            self.failed = True
            if self.rank == self._death.rank % self.size:
                self._dead = True
                raise Died
            if self.rank not in self._death.ahead:
                tensor.copy_(before)
                self._refuse_if_failed()
        return tensor

    def broadcast(self, tensor, root=0):
        self._refuse_if_failed(root)
        return self._comm.broadcast(tensor, root)

    def broadcast_object(self, thing, root=0):
        self._refuse_if_failed(root)
        return self._comm.broadcast_object(thing, root)

    def all_gather_object(self, thing):
        self._refuse_if_failed()
        return self._comm.all_gather_object(thing)

    @cached_property
    def group(self):
        """For ``torch.distributed``, whose calls become those above."""
        from dtlib.comm.torch.backend_group import group_over

        return group_over(self)

    def barrier(self):
        self._refuse_if_failed()
        self._comm.barrier()

    def _refuse_if_failed(self, root: int = 0):
        from mpi4py import MPI

        if self.failed:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        if root not in range(self.size):
            raise NoSuchRoot(f"root={root} of {self.size}")

    def __getattr__(self, name):
        raise DtlibError(
            f"comm.{name}: here comm has rank, size, group, all_reduce, broadcast, broadcast_object, all_gather_object "
            "and barrier."
        )

    def last(self) -> "Dying":
        """The communicator of those who are left now."""
        return self.next.last() if self.next else self

    def same_on_all(self, thing) -> bool:
        """Whether the survivors of a death have the same; before one, and during one, they are not asked."""
        return not self.shrinks or self.failed or len(set(self._comm.all_gather_object(thing))) == 1

    def leave(self) -> None:
        """What a rank that has died, or is through, does while the others shrink: they are told, and go on without."""
        last = self.last()
        if last._death is not None:
            last._comm.split(None)


def shrunk(comm: Dying) -> Dying:
    """A communicator of those who live, in their old order; all of them call it. SIMULATED: the dead one, too."""
    if not isinstance(comm, Dying):
        raise OfTheWorld("shrunk(world.comm)")
    if comm._dead:
        raise Died
    if comm.shrinks == MOST_SHRINKS:
        raise Endless
    comm.next = Dying(comm._comm.split(0), comm._later, comm.shrinks + 1)
    return comm.next
