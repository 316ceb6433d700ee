"""Restart all ranks from the checkpoint. This needs no support from MPI, and works for every strategy.

    4 ranks   step 1 ... step 10  save  step 11 ... step 17   rank 2 is killed, and mpiexec ends the others
    3 ranks                       load  step 11 ... step 17   step 18 ...

If one rank dies, all processes of the job end. A program outside must start them again: a scheduler, or ``supervise``.
Steps since the last checkpoint are repeated. Any number of ranks can load the checkpoint, also of sharded states
(dtlib.checkpoint).
"""

from pathlib import Path

from dtlib import checkpoint
from dtlib.checkpoint.folder import INDEX
from dtlib.comm import Communicator
from dtlib.recovery.rank_status import EndRequested
from dtlib.recovery.replica import OnEvent, Replica, ignore


def train_and_save(
    replica: Replica, comm: Communicator, steps: int, folder: str | Path, every: int = 10, on_event: OnEvent = ignore
) -> Communicator:
    """Train until ``replica.steps == steps``, from the checkpoint in ``folder`` if there is one; return ``comm``.

    It saves a checkpoint after each ``every`` steps, at the end, and when a signal requests the end (rank_status.py).

    Raises:
        EndRequested: after a signal, when the checkpoint is saved.
    """
    folder = Path(folder)

    def save():
        state = {"steps": replica.steps, "losses": replica.losses}
        checkpoint.save(folder, replica.model, replica.optimizer, comm, extra=state)

    replica.check_same(comm)
    if comm.broadcast_object((folder / INDEX).exists()):
        extra = checkpoint.load(folder, replica.model, replica.optimizer, comm)
        replica.steps, replica.losses = extra["steps"], extra["losses"]
    else:
        replica.load(comm.broadcast_object(replica.state()))
    while replica.steps < steps:
        try:
            replica.step(comm)
        except EndRequested as asked:
            save()
            raise EndRequested(f"{asked} They are saved: start it again to go on.") from asked
        on_event("step", replica=replica, comm=comm)
        if replica.steps % every == 0 or replica.steps == steps:
            save()
    return comm
