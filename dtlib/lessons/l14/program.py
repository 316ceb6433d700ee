"""`dtlib train decoder` with a rank that is killed: ``python -m dtlib.lessons.l14.program OPTIONS FOLDER``, on ranks.

OPTIONS is JSON with ``config``, and ``rank``, which is killed once after step ``after`` (null for never). FOLDER gets
the journal and the checkpoints. If it has a checkpoint, training resumes from it.
"""

import json
import os
import signal
import sys
from pathlib import Path

import dtlib
from dtlib.recovery import Journal
from dtlib.training.run import train


def main() -> None:
    """Run the training of the command line."""
    options, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    world = dtlib.init()
    journal, mark = Journal(folder, world), folder / "died"

    def after_step(step: int, loss: float) -> None:
        if world.rank == 0:
            journal.write("step", ranks=world.size, step=step, loss=loss)
        world.comm.barrier()  # the step is in the journal before a rank dies
        if (world.rank, step) == (options["rank"], options["after"]) and not mark.exists():
            mark.touch()
            journal.write("fault", kind="kill", step=step)
            os.kill(os.getpid(), signal.SIGKILL)

    with journal.log_outcome():
        train("decoder", options["config"], save=folder / "checkpoint", resume=True, after_step=after_step)


if __name__ == "__main__":
    main()
