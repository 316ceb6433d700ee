"""A rank dies: what is lost, and three ways to go on.

                                  needs               goes on with   does again             costs meanwhile
    restart.py   start all again  nothing             any number     steps since it saved   a checkpoint now and then
    memory.py    commit, restore  ULFM                those left     steps since a commit   a copy in memory a commit
    shrink.py    shrink, go on    ULFM, whole steps   those left     the step under way     nothing

The last two need all of the model on every rank. What is in shards (ZeRO) or in stages (pipelines) is lost with its
rank, and goes back to the checkpoint. From outside, run.py says in a sentence why a training ended, and supervisor.py
starts it again.
"""

from dtlib.recovery.journal import Journal
from dtlib.recovery.memory import train_and_commit
from dtlib.recovery.replica import Replica
from dtlib.recovery.restart import train_and_save
from dtlib.recovery.run import Run
from dtlib.recovery.shrink import leave, train_and_shrink
from dtlib.recovery.signs import AskedToEnd, NotFinite
from dtlib.recovery.supervisor import supervise

__all__ = [
    "AskedToEnd", "Journal", "NotFinite", "Replica", "Run", "leave", "supervise", "train_and_commit", "train_and_save",
    "train_and_shrink",
]  # fmt: skip
