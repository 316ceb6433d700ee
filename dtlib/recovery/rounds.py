"""Local SGD and DiLoCo where ranks die: each has a whole model, and a round needs whoever is there.

    rank 0   . . . .|. . . .| revoked   Shrink -> 0 of 2   what it had changed, sent again |. . . .|
    rank 1   . . . .|. . . .| revoked   Shrink -> 1 of 2   what it had changed, sent again |. . . .|
    rank 2   . . . .|. . killed

A rank that dies between two rounds costs its own steps since the last one, and nothing else: the others have taken
theirs alone, and still have them. Start the ranks with ``mpiexec --with-ft ulfm``, as for shrink.py.
"""

from collections.abc import Callable

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.parallel.local import DiLoCo
from dtlib.recovery.replica import Tell, nobody
from dtlib.recovery.shrink import failure_of_a_rank, shrunk
from dtlib.world.launch import survives


def train_in_rounds(
    local: DiLoCo,
    one_step: Callable[[int], object],
    steps: int,
    tell: Tell = nobody,
) -> Communicator:
    """Train until ``local.steps == steps``, on the ranks that are left; returns their communicator.

    Args:
        local: ``dtlib.parallel.local``'s ``DiLoCo`` or ``LocalSGD``.
        one_step: ``one_step(local.steps)`` computes gradients, without other ranks; then ``local.step()`` is called.
        tell: is told ("step") of each step, and ("lost", ranks=[2]) of ranks that have died, as the world counts them.
    """
    if not survives():
        raise DtlibError("Where a rank dies, this job ends: start the ranks with mpiexec --with-ft ulfm to go on.")
    fewer = None
    while True:
        try:
            if fewer is not None:
                local.recover(fewer)
                fewer = None
            while local.steps < steps:
                one_step(local.steps)
                local.step()
                tell("step", local=local)
            local.comm.barrier()  # nobody leaves as long as another one may need it
            return local.comm
        except Exception as error:
            if not failure_of_a_rank(error):
                raise
            fewer = shrunk(local.comm, tell)
