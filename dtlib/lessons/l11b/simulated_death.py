"""SIMULATED deaths of ranks, so that an exercise on engines loses no engine.

    before the step       all calls work
    an all_reduce of it   all ranks take part; then one dies, the ranks ahead get the result, the others an error
    calls after that      an error on all survivors, until they have a new communicator from ``shrunk(comm)``

The error is MPI's own, and ``shrunk`` works like the function of dtlib.recovery. So an answer also runs under ULFM.
"""

from functools import cached_property
from typing import NamedTuple

from dtlib.errors import DtlibError
from dtlib.lab.checks.world_guard import WorldCommUsed

MOST_SHRINKS = 3


class Died(BaseException):
    """Ends a rank; an answer must not catch it."""


class Apart(BaseException):
    """Raised if ranks continue with different steps."""


class Endless(BaseException):
    """Raised if an answer runs forever."""


class NoSuchRoot(BaseException):
    """Raised for a broadcast from a rank that the communicator does not have."""


class Death(NamedTuple):
    """A death of ``rank`` in ``step``, counted from 0, in this ``call`` of all_reduce.

    The ranks ``ahead`` still get the result of that call. A negative rank counts from the last one.
    """

    rank: int
    step: int
    ahead: tuple = ()
    call: int = 0


class FaultyCommunicator:
    """A communicator on which the first of ``deaths`` happens.

    Further deaths happen on the communicators after it. ``at`` is the current step, ``calls`` counts its all_reduces,
    and ``shrinks`` counts survived deaths.
    """

    def __init__(self, comm, deaths=(), shrinks: int = 0):
        self.rank, self.size, self.members, self.at, self.calls = comm.rank, comm.size, comm.members, None, 0
        self.shrinks, self.failed, self.next = shrinks, False, None
        self._comm, self._death, self._later = comm, deaths[0] if deaths else None, deaths[1:]
        self._dead = False

    def all_reduce(self, tensor, op="sum"):
        """Reduce in place; this call may kill this rank, or raise because another rank died."""
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
        """Broadcast, or raise if a rank has died."""
        self._refuse_if_failed(root)
        return self._comm.broadcast(tensor, root)

    def broadcast_object(self, thing, root=0):
        """Broadcast an object, or raise if a rank has died."""
        self._refuse_if_failed(root)
        return self._comm.broadcast_object(thing, root)

    def all_gather_object(self, thing):
        """All-gather an object, or raise if a rank has died."""
        self._refuse_if_failed()
        return self._comm.all_gather_object(thing)

    @cached_property
    def group(self):
        """A process group of torch, whose collectives call the methods above."""
        from dtlib.comm.torch.group_on_communicator import group_over

        return group_over(self)

    def barrier(self):
        """Wait for all ranks, or raise if a rank has died."""
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

    def last(self) -> "FaultyCommunicator":
        """Return the current communicator of the survivors."""
        return self.next.last() if self.next else self

    def same_on_all(self, thing) -> bool:
        """Return whether all survivors of a death pass the same; True before a death and during one."""
        return not self.shrinks or self.failed or len(set(self._comm.all_gather_object(thing))) == 1

    def leave(self) -> None:
        """Take part in the next shrink as a rank that leaves, because a split needs all ranks."""
        last = self.last()
        if last._death is not None:
            last._comm.split(None)


def shrunk(comm: FaultyCommunicator) -> FaultyCommunicator:
    """Return a communicator of the survivors in their old order; all of them call it. SIMULATED, the dead rank too."""
    if not isinstance(comm, FaultyCommunicator):
        raise WorldCommUsed("shrunk(world.comm)")
    if comm._dead:
        raise Died
    if comm.shrinks == MOST_SHRINKS:
        raise Endless
    comm.next = FaultyCommunicator(comm._comm.split(0), comm._later, comm.shrinks + 1)
    return comm.next
