"""Continue on the remaining ranks, with MPI's ULFM (user-level failure mitigation). Read from top to bottom.

    rank 0   step 7   a rank has failed    Revoke   Shrink -> 0 of 3   state of rank 0   step 7   step 8
    rank 1   step 7   revoked              Revoke   Shrink -> 1 of 3   state of rank 0   step 7   step 8
    rank 2   killed
    rank 3   step 7   step 8   revoked     Revoke   Shrink -> 2 of 3   state of rank 0   step 7   step 8

Only a rank that communicates with the dead rank notices its death. Revoke makes all pending operations of the other
ranks raise an error. Shrink returns a new communicator of the live ranks, in their old order. Live ranks may differ by
one step: here rank 3 had received all messages of step 7. So all ranks continue with the state of the lowest live rank.
This state is consistent, because a step is completed or has no effect.

Start the ranks with ``mpiexec --with-ft ulfm``. Revoke, Shrink and their errors are extensions of Open MPI and MPICH;
they are not in the MPI standard yet.
"""

import os
import sys
from contextlib import suppress

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.recovery.replica import OnEvent, Replica, ignore
from dtlib.world.launch import survives


def train_and_shrink(replica: Replica, comm: Communicator, steps: int, on_event: OnEvent = ignore) -> Communicator:
    """Train until ``replica.steps == steps``, on the remaining ranks; return their communicator.

    Every rank must have the whole model (replica.py). Training starts with rank 0's values. Any rank may die, also rank
    0, several ranks at once, and ranks during recovery. Training continues as long as one rank lives.

    Args:
        replica: the model, its optimizer and its batches.
        comm: dtlib's communicator of all ranks.
        steps: the number of steps at which training ends.
        on_event: is called with "step" after each step, and with "lost" and ``ranks``, the world ranks that have died.

    Raises:
        DtlibError: if ranks were started without ULFM.
    """
    if not survives():
        raise DtlibError("Where a rank dies, this job ends: start the ranks with mpiexec --with-ft ulfm to go on.")
    while True:
        try:
            # After a failure, start again here: the new rank 0 broadcasts its state to the other live ranks.
            replica.check_same(comm)
            replica.load(comm.broadcast_object(replica.state()))
            while replica.steps < steps:
                replica.step(comm)
                on_event("step", replica=replica, comm=comm)
            comm.barrier()  # no rank returns while another one may still fail and need it
            return comm
        except Exception as error:
            if not failure_of_a_rank(error):
                raise
            comm = shrunk(comm, on_event)


def failure_of_a_rank(error: Exception) -> bool:
    """Return whether ``error`` is MPI's report that a rank has died; any other error is a bug and ends training."""
    from mpi4py import MPI

    # ERR_IN_STATUS: one of several requests has failed.
    known = MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS
    return isinstance(error, MPI.Exception) and error.Get_error_class() in known


def shrunk(comm: Communicator, on_event: OnEvent = ignore) -> Communicator:
    """Return a communicator of the live ranks, in their old order; all of them call it."""
    comm.mpi.Revoke()
    rest = Communicator(comm.mpi.Shrink(), comm.time_limit, name=f"{comm.name}-")
    if lost := sorted(set(comm.members) - set(rest.members)):
        on_event("lost", ranks=lost, comm=rest)
    return rest


def leave(comm: Communicator) -> None:
    """Wait for all ranks, then exit this process without MPI_Finalize, which may hang after a failure.

    Without ULFM it does nothing, and the process ends as usual.
    """
    if not survives():
        return
    with suppress(Exception):  # a missing rank has exited already, or has died after the work was done
        comm.barrier()
    sys.stdout.flush()
    os._exit(0)


# Alternatives: commit.py keeps a copy of the last completed step, so a step may also fail in the middle. restart.py
# restarts all ranks from the checkpoint; this works with sharded states, and without ULFM.
