"""Copy the state in memory after each step, and restore it after a failure, like Elastic Horovod's state.

    rank 0   step 7   commit   step 8   revoked           Shrink -> 0 of 3   restore   rank 0's commit   step 8
    rank 1   step 7   commit   step 8   revoked           Shrink -> 1 of 3   restore   rank 0's commit   step 8
    rank 2   step 7   commit   killed
    rank 3   step 7   commit   step 8   commit   revoked  Shrink -> 2 of 3   restore   rank 0's commit   step 8

Each commit copies parameters and optimizer states, which costs memory and time. In return a step may fail at any point,
also in the middle of the optimizer's step. With shrink.py it may not. The failure need not be the death of a rank: if a
step fails for another reason, such as NaN or an error on one rank, all ranks undo it and try it again.
"""

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.recovery.rank_status import EndRequested
from dtlib.recovery.replica import OnEvent, Replica, ignore
from dtlib.recovery.shrink import failure_of_a_rank, shrunk
from dtlib.world.launch import survives


def train_and_commit(
    replica: Replica, comm: Communicator, steps: int, every: int = 1, on_event: OnEvent = ignore
) -> Communicator:
    """Train until ``replica.steps == steps``, on the remaining ranks; return their communicator.

    Preconditions and arguments are the same as for ``train_and_shrink``. With a commit ``every`` k steps, up to k - 1
    completed steps are repeated after a failure.

    Raises:
        DtlibError: if ranks were started without ULFM. Any error of a step that fails twice although no rank has died.
    """
    if not survives():
        raise DtlibError("Where a rank dies, this job ends: start the ranks with mpiexec --with-ft ulfm to go on.")
    committed, tried = replica.state(), set()
    while True:
        try:
            replica.check_same(comm)
            committed = comm.broadcast_object(committed)
            replica.load(committed)
            while replica.steps < steps:
                replica.step(comm)
                if replica.steps % every == 0:
                    committed = replica.state()
                on_event("step", replica=replica, comm=comm)
            comm.barrier()  # no rank returns while another one may still fail and need it
            return comm
        except Exception as error:
            # Another error, such as NaN, may pass with the next attempt. If it does not, it is a bug: raise it.
            if not failure_of_a_rank(error):
                if replica.steps in tried or isinstance(error, EndRequested):
                    raise
                tried.add(replica.steps)
                on_event("undone", error=error, comm=comm)
            comm = shrunk(comm, on_event)
