"""Several trainings, one after the other, in one start of ranks: ``python -m tests.spare_ranks RUNS FOLDER``, on ranks.

    training 0   ranks 0 1 2 3    rank 2 is killed    ranks 4 5 6 wait
    training 1   ranks 0 1 3 4    rank 0 is killed    ranks 5 6 wait
    training 2   ranks 1 3 4 5    ...

RUNS is JSON: for each training the options of lesson 11b's, with the number of its ``ranks``, as which its faults count
them. A start of ranks takes seconds, and a training of thirty steps a third of one.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

from mpi4py import MPI
from safetensors.torch import save_file

import dtlib
from dtlib import recovery
from dtlib.lessons.l11b.training import OPTIONS, PARAMETERS, PlannedFaults, make, with_accidents
from dtlib.recovery.shrink import shrunk

WAYS = {"memory": recovery.train_and_commit, "shrink": recovery.train_and_shrink}


def train(options: dict, team, rank: int, folder: Path, journal) -> None:
    folder.mkdir(exist_ok=True)
    faults = [fault | {"rank": rank if fault["rank"] == team.rank else -1} for fault in options["faults"]]
    replica = with_accidents(recovery.Replica(*make(options)), options, PlannedFaults(faults, rank, folder, journal))
    team = WAYS[options["by"]](replica, team, options["steps"], on_event=journal)
    if team.rank == 0:
        save_file(dict(replica.model.state_dict()), folder / PARAMETERS, {"losses": json.dumps(replica.losses)})


def main() -> None:
    folder, world = Path(sys.argv[2]), dtlib.init()
    everybody, journal = world.comm, recovery.Journal(folder, world)
    with journal.log_outcome():
        for number, options in enumerate(json.loads(sys.argv[1])):
            takes_part = everybody.rank < options["ranks"]
            team = everybody.split(int(takes_part))
            team.time_limit = options["time_limit"]
            if takes_part:
                train(OPTIONS | options, team, world.rank, folder / f"{number}", journal)
            else:
                with suppress(MPI.Exception):  # somebody has died, or all is done: who is through revokes it
                    everybody.barrier()
            everybody = shrunk(everybody)
    recovery.leave(everybody)


if __name__ == "__main__":
    main()
