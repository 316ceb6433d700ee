"""Shrink and go on, by MPI's ULFM (user-level failure mitigation); to be read from top to bottom.

    rank 0   step 7   a rank has failed    Revoke   Shrink -> 0 of 3   state of rank 0   step 7   step 8
    rank 1   step 7   revoked              Revoke   Shrink -> 1 of 3   state of rank 0   step 7   step 8
    rank 2   killed
    rank 3   step 7   step 8   revoked     Revoke   Shrink -> 2 of 3   state of rank 0   step 7   step 8

Only a rank that talks with the dead one notices. Revoke tells the others, whatever they wait for. Shrink gives those
who live a new communicator, in their old order. They may stand one step apart, as rank 3 had what it needed of step 7:
so the lowest one says where they go on. It has a whole state, for a step is done as a whole or not at all.

Start the ranks with ``mpiexec --with-ft ulfm``. Revoke, Shrink and their errors are extensions of Open MPI and MPICH;
they are not in the MPI standard yet.
"""

import os
import sys
from contextlib import suppress

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.recovery.replica import Replica, Tell, nobody
from dtlib.world.launch import survives


def train_and_shrink(replica: Replica, comm: Communicator, steps: int, tell: Tell = nobody) -> Communicator:
    """Train until ``replica.steps == steps``, on the ranks that are left; returns their communicator.

    Contract: what is trained is whole on every rank (replica.py). Rank 0's values hold at the beginning. Rank 0 may
    die, and several at once, also while the others recover: as long as one lives, it goes on.

    Args:
        comm: dtlib's communicator over all ranks.
        tell: is told ("step") of each step, and ("lost", ranks=[2]) of ranks that have died, as the world counts them.
    """
    if not survives():
        raise DtlibError("Where a rank dies, this job ends: start the ranks with mpiexec --with-ft ulfm to go on.")
    while True:
        try:
            replica.check_same(comm)
            replica.load(comm.broadcast_object(replica.state()))
            while replica.steps < steps:
                replica.step(comm)
                tell("step", replica=replica, comm=comm)
            comm.barrier()  # nobody leaves as long as another one may need it
            return comm
        except Exception as error:
            if not failure_of_a_rank(error):
                raise
            comm = shrunk(comm, tell)


def failure_of_a_rank(error: Exception) -> bool:
    """Whether MPI says by ``error`` that a rank has died; otherwise it is a mistake, and no reason to go on."""
    from mpi4py import MPI

    known = MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS  # the last: one of several requests has failed
    return isinstance(error, MPI.Exception) and error.Get_error_class() in known


def shrunk(comm: Communicator, tell: Tell = nobody) -> Communicator:
    """A communicator of those who live, in their old order; all of them call it."""
    comm.mpi.Revoke()
    rest = Communicator(comm.mpi.Shrink(), comm.time_limit, name=f"{comm.name}-")
    if lost := sorted(set(comm.members) - set(rest.members)):
        tell("lost", ranks=lost, comm=rest)
    return rest


def leave(comm: Communicator) -> None:
    """End this process, when all are here. After a failure MPI_Finalize may wait for the dead for ever.

    Without ULFM it does nothing: there the process ends as usual.
    """
    if not survives():
        return
    with suppress(Exception):  # whoever is missing has left, or died when all was done
        comm.barrier()
    sys.stdout.flush()
    os._exit(0)


# memory.py does the same with a copy of the last good step, so that a step may also fail in the middle; restart.py
# works for what is cut into shards, and without ULFM: all start again, from the checkpoint.
