"""Three ways to continue training after a rank has died.

                                    needs               continues with    repeats                cost without failure
    restart.py   restart all ranks  nothing             any number        steps since the save   checkpoints
    commit.py    commit, restore    ULFM                remaining ranks   steps since a commit   copies in memory
    shrink.py    shrink             ULFM, atomic steps  remaining ranks   the current step       nothing

The last two need the whole model on every rank. With shards (ZeRO) or stages (pipelines), the state of a dead rank is
lost, so training must restart from a checkpoint. Two files work from outside the ranks: run.py reports why a training
run ended, and supervisor.py restarts it.
"""

from dtlib.recovery.commit import train_and_commit
from dtlib.recovery.journal import Journal
from dtlib.recovery.rank_status import EndRequested, NotFinite
from dtlib.recovery.replica import Replica
from dtlib.recovery.restart import train_and_save
from dtlib.recovery.run import Run
from dtlib.recovery.shrink import leave, train_and_shrink
from dtlib.recovery.supervisor import supervise

__all__ = [
    "EndRequested", "Journal", "NotFinite", "Replica", "Run", "leave", "supervise",
    "train_and_commit", "train_and_save", "train_and_shrink",
]  # fmt: skip
