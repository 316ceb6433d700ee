# %% [markdown]
# # 11b Faults: a rank dies, and training goes on
#
# Forty-five minutes. On 16,384 GPUs, Llama 3's training had 419 unplanned interruptions in 54 days: one every three
# hours (Llama team, below). You kill ranks of a training with `kill -9`, read the error message that names them, and
# compare three ways to continue.
#
# **Questions.** Which data are lost when a rank dies? Who notices the death, and how do the other ranks learn of it?
# How long does a recovery take, and which steps are done twice?
#
# **Afterwards you can** name for each strategy the data that are lost with a rank; choose between a checkpoint, a
# commit in memory and shrinking; read and write a recovery with ULFM, an extension of MPI for surviving failures.
#
# **You need** lesson 04, and the checkpoints of lesson 06 for one section.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
from dtlib.lessons.l11b import fault_lab, figures
from dtlib.lessons.l11b.training import alone
from dtlib.recovery import rank_status, replica, restart, shrink
from dtlib.recovery import commit as memory_commit

# %% [markdown]
# ## The fault lab
#
# Choose a recovery, start a training on four ranks, and kill one of them while it runs. The ranks of the lab are
# separate processes, so this notebook does not die with them. Each step has 0.05 s of EMULATED computing, so that you
# have time to kill a rank.

# %% tags=["nbval-ignore-output"]
fault_lab.fault_lab(4)

# %% [markdown]
# The grey line is an undisturbed training in one process. The dots should lie on this line, whichever rank you killed.
#
# Now we do the same without buttons, to compare the results below. Steps count from 0. Rank 2 is killed at the
# beginning of step 25, so 25 steps are done.

# %% [markdown]
# ## One: restart all ranks from the checkpoint
#
# By default MPI ends the whole job when a rank dies. An outside program, such as a scheduler, starts the job again, and
# the job loads the last checkpoint. Here a checkpoint is saved after every 10 steps.
#
# **Predict.** Rank 2 dies when 25 steps are done. How many steps are done twice?

# %% tags=["stub"]
lab.predict("steps-done-twice", None)

# %% tags=["solution"]
lab.predict("steps-done-twice", 5)

# %% tags=["nbval-ignore-output"]
of_checkpoint = fault_lab.run("checkpoint")
histories = {"checkpoint": of_checkpoint}

# %% [markdown]
# The error message is written outside of the job: `mpiexec` reports which rank ended on which signal, and
# `dtlib.recovery.supervise` starts the job again. This is the core of the recovery:

# %%
lab.read(restart.train_and_save)

# %% [markdown]
# This works for every strategy, and on any number of ranks, because a checkpoint stores to which parameter each shard
# belongs. Most of the time until the next good step is spent on starting four processes that import torch. On a cluster
# you also wait in the queue.
#
# ## Two: shrink and continue
#
# `mpiexec --with-ft ulfm` starts ranks that survive the death of others (ULFM is user-level failure mitigation). Then a
# call that exchanges messages with a dead rank raises an error. Now three things remain to do:
#
# 1. `Revoke` the communicator, the group of ranks: ranks that wait for another living rank get an error too.
# 2. `Shrink` it: this makes a new communicator of the surviving ranks, in their old order.
# 3. Agree on the step to continue with: here the lowest rank broadcasts its state, with the step.
#
# **Discuss.** Rank 2 dies in an all-reduce. Why can rank 3 have the result, and rank 0 not?
#
# **Predict.** On how many ranks does the training end?

# %% tags=["stub"]
lab.predict("ranks-left", None)

# %% tags=["solution"]
lab.predict("ranks-left", 3)

# %% tags=["nbval-ignore-output"]
of_shrink = fault_lab.run("shrink")
histories["shrink"] = of_shrink

# %%
lab.read(shrink.train_and_shrink, shrink.shrunk)

# %% [markdown]
# Survivors may be one step apart: therefore the step is broadcast with the state. Two things keep this code short. The
# *batch belongs to the step*, not to a rank: each rank takes its slice, and with three ranks the slices are larger. And
# a *step is done as a whole or not at all*: an error is raised before anything has changed.

# %%
lab.read(replica.Replica.step)

# %% [markdown]
# `Revoke` and `Shrink` are extensions of Open MPI and MPICH. They are *not in the MPI standard* (5.0, 2025). There are
# known open bugs: `Agree` across nodes may hang, so the code above does not call it. `MPI_Finalize` after a failure may
# hang too, so each rank ends by `os._exit` after a barrier.
#
# ## Three: commit in memory
#
# What if a step fails in the middle, or fails although no rank has died? Elastic Horovod keeps a copy of the last good
# state in memory, and restores it. A copy takes time, so here it copies after every 5 steps.
#
# **Predict.** Rank 2 dies when 27 steps are done. How many steps are done twice?

# %% tags=["stub"]
lab.predict("twice-after-a-commit", None)

# %% tags=["solution"]
lab.predict("twice-after-a-commit", 2)

# %% tags=["nbval-ignore-output"]
of_memory = fault_lab.run("memory", step=27, commit=5)
histories["memory"] = of_memory

# %%
lab.read(memory_commit.train_and_commit)

# %% [markdown]
# ## Side by side

# %% tags=["nbval-ignore-output"]
undisturbed = alone({"steps": fault_lab.STEPS})[1]
figures.compare(histories, undisturbed)

# %% tags=["statement"]
# "The lower picture shows the price in seconds."
from_disk, again = found(r"restart all ranks from the ([\d.]+) 4 -> 4 (\d+)")
shrunk, none = found(r"shrink and continue ([\d.]+) 4 -> 3 (\d+)")
restored, twice = found(r"commit and restore in memory ([\d.]+) 4 -> 3 (\d+)")
assert from_disk > 5 * max(shrunk, restored) and (again, none, twice) == (5, 0, 2)

# %% [markdown]
# In the upper picture all three lie on the undisturbed curve: the global batch stays the same on three ranks, and a
# checkpoint is a point of that curve. The lower picture shows the price in seconds. Are the losses really equal?

# %%
def furthest_off(events):
    """The largest distance of a loss from the one of the same step in one process."""
    return max(abs(e["loss"] - undisturbed[e["step"] - 1]) for e in figures.steps_of(events))

for name, events in histories.items():
    verdict = "equal to 1e-9" if furthest_off(events) < 1e-9 else "not equal"
    print(f"{figures.NAMES[name]:38} {verdict}")

# %% tags=["statement"]
# "In the upper picture all three lie on the undisturbed curve"
assert count(r"(?m)equal to 1e-9$|equal to 1e-9\n") == 3 and not count("not equal")

# %% [markdown]
# ## What is lost with a rank
#
# Shrinking needs a copy of all data on the surviving ranks. **Predict** for each strategy what is lost for good when
# one rank dies: "nothing", "optimizer states", or "parameters and optimizer states".

# %% tags=["stub"]
lab.predict("lost-with-a-rank", {
    "data parallelism": None, "ZeRO stage 1": None, "ZeRO stage 3": None, "pipeline": None,
})

# %% tags=["solution"]
lab.predict("lost-with-a-rank", {
    "data parallelism": "nothing",
    "ZeRO stage 1": "optimizer states",
    "ZeRO stage 3": "parameters and optimizer states",
    "pipeline": "parameters and optimizer states",
})

# %% [markdown]
# So ZeRO and pipelines must use the checkpoint, and their error message says so:

# %% tags=["raises-exception"]
# %%px
import dtlib
import torch
from dtlib.errors import DtlibError
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.recovery import Replica

world = dtlib.init()
model = torch.nn.Linear(4, 2)
zero = ZeroOptimizer(model.parameters(), torch.optim.AdamW, world.comm, stage=1)
if world.rank == 0:
    try:
        Replica(model, zero, torch.nn.functional.cross_entropy, batch_of=None)
    except DtlibError as refused:
        print(refused)

# %% [markdown]
# ## Who says what
#
# A dead rank is the simple case. Other faults are harder, because no rank dies:
#
# | fault | who notices | what happens |
# |---|---|---|
# | a rank is killed, or crashes | mpiexec; with ULFM each rank that communicates with it | as above |
# | an error on one rank | a journal, which stores the rank's last message | all end with this error message; with commits, the step is tried again |
# | NaN on one rank | a flag that travels with the gradients | all ranks raise the same error, before any parameter changes |
# | a straggler, a slow rank | the seconds of each rank, which travel too | a warning; training continues, at this rank's speed |
# | a rank is stopped (SIGSTOP) | nobody in MPI: it counts as alive | an error message from outside; once killed, it counts as dead |
# | a node is cut off | mpiexec, by its daemon there | the job ends with status 0: trust the last messages, not the status |
# | the disk is full | the rank that saves | all raise the same error; the previous checkpoint is whole |
# | the scheduler's time limit | a handler of SIGTERM and SIGUSR1 | all save after the same step, and end |
#
# Take NaN (not a number). A mean with one NaN in it is NaN on every rank, and then no rank knows where it began. So
# each rank also sends a flag, in its own place of an array:

# %%
lab.read(rank_status.RankStatus.of_this_rank)

# %% tags=["nbval-ignore-output"]
nan = {"kind": "nan", "rank": 1, "step": 12, "at": "nan"}
training = fault_lab.Training("memory", ranks=2, steps=20, faults=[nan]).go()
training.end()

# %% tags=["statement"]
# "So each rank also sends a flag, in its own place of an array:"
assert found(r"The gradient of rank (\d) is not finite in step (\d+)") == [1, 12]

# %% [markdown]
# A rank that is stopped is the hardest to see: for MPI it is alive, but it does not arrive. The only help is a limit on
# waiting (`comm.time_limit`), or a look at the processes from outside.

# %% tags=["nbval-ignore-output"]
stop = {"kind": "stop", "rank": 1, "step": 12, "at": "begin"}
training = fault_lab.Training("shrink", ranks=2, steps=20, time_limit=3, faults=[stop]).go()
training.end()

# %% tags=["statement"]
# "A rank that is stopped is the hardest to see"
assert count("is stopped, by SIGSTOP") == 1 and count("rank 1 has not arrived") == 1

# %% [markdown]
# ## Which one?
#
# | | needs | loses | costs meanwhile |
# |---|---|---|---|
# | checkpoint | a disk that all ranks can read | steps since the checkpoint, and the start of the job | regular saves |
# | commit in memory | ULFM or something similar; whole copies | steps since the commit | a copy of model and optimizer states per commit |
# | shrink | ULFM, whole copies, and all-or-nothing steps | the current step | a whole copy on every rank |
#
# How often should you save? If a save takes C and there is one failure every M, save every √(2 C M) (J. W. Young,
# 1974).
#
# **Compute.** Llama 3's training failed every 3.1 hours. If a save takes one minute, how often should you save, and how
# much is lost in a failure?
#
# <details><summary>Answer</summary>√(2 · 60 · 11,160) = 1,157 s, every 19 minutes. Half an interval is lost on average, ten
# minutes.</details>
#
# Large trainings use checkpoints, with copies of shards in a neighbour's memory, and spare nodes instead of shrinking.
# In practice, `torchrun --max-restarts=3 --nnodes=2:4` starts ranks again, as our `supervise` does;
# `torch.distributed.checkpoint` saves shards; the `timeout` of `init_process_group` ends a wait for a stopped rank.

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("11b")

# %% [markdown]
# ## Summary
#
# - Data on only one rank are lost with it: nothing in data parallelism, shards in ZeRO, a stage in a pipeline.
# - Ranks that communicate with the dead rank notice its death; revoking informs the others.
# - Survivors may be one step apart, so a rank broadcasts the state together with its step.
# - The batch belongs to the step, so the curve continues without a kink.
# - Only a checkpoint survives the death of all ranks.
#
# Now the [exercises](../exercises/11b_faults_exercises.ipynb).
#
# ## References
#
# - W. Bland et al.: Post-failure recovery of MPI communication capability. IJHPCA 27, 2013.
# - Elastic Horovod, horovod.readthedocs.io/en/stable/elastic_include.html.
# - Z. Wang et al.: GEMINI: fast failure recovery in distributed training with in-memory checkpoints. SOSP 2023.
# - J. W. Young: A first order approximation to the optimum checkpoint interval. CACM 17, 1974.
# - Llama team: The Llama 3 herd of models. arXiv:2407.21783, section 3.3.4 (419 interruptions).
