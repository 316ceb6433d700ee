"""Commit each step in memory, and go back to it: what Elastic Horovod calls a state with ``commit`` and ``restore``.

    rank 0   step 7   commit   step 8   revoked           Shrink -> 0 of 3   restore   rank 0's commit   step 8
    rank 1   step 7   commit   step 8   revoked           Shrink -> 1 of 3   restore   rank 0's commit   step 8
    rank 2   step 7   commit   killed
    rank 3   step 7   commit   step 8   commit   revoked  Shrink -> 2 of 3   restore   rank 0's commit   step 8

It costs a copy of parameters and optimizer states a commit, in memory as well as in time. What it buys beside
shrink.py: the step may fail anywhere, in the middle of the optimizer too, and it need not be a rank that dies. A step
that failed for another reason, such as NaN or an error on one rank, is undone on all and tried once more.
"""

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.recovery.replica import Replica, Tell, nobody
from dtlib.recovery.shrink import failure_of_a_rank, shrunk
from dtlib.recovery.signs import AskedToEnd
from dtlib.world.launch import survives


def train_and_commit(
    replica: Replica,
    comm: Communicator,
    steps: int,
    every: int = 1,
    tell: Tell = nobody,
) -> Communicator:
    """Train until ``replica.steps == steps``, on the ranks that are left; returns their communicator.

    Contract and arguments as in ``train_and_shrink``. With a commit ``every`` k steps, up to k - 1 are done once more.
    A step that fails twice without a rank having died ends the training with its error.
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
                tell("step", replica=replica, comm=comm)
            comm.barrier()  # nobody leaves as long as another one may need it
            return comm
        except Exception as error:
            if not failure_of_a_rank(error):
                if replica.steps in tried or isinstance(error, AskedToEnd):
                    raise
                tried.add(replica.steps)
                tell("undone", error=error, comm=comm)
            comm = shrunk(comm, tell)
