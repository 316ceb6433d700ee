# %% [markdown]
# # 11b Faults: exercises
#
# Three exercises: *predict* (three minutes), *fix* a recovery (five minutes), *build* one (thirty minutes). A check
# looks at your answer on all ranks and says what is wrong; check again for the next hint.
#
# **You need** the lecture [11b Faults](../lectures/11b_faults.ipynb). Answers:
# [solutions](../solutions/11b_faults_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
import torch._dynamo  # takes seconds, which the first optimizer would take within a check
from dtlib.lessons.l11b.simulated_death import shrunk
from dtlib.recovery.shrink import failure_of_a_rank
from torch import distributed as dist
from torch.nn.functional import cross_entropy

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# Seventeen steps are done on all ranks. In the next step a rank is killed before it sends its gradients. How many of
# the seventeen steps are done again: by shrinking, with a commit every 5 steps, with a checkpoint every 10? And a step
# has 50 samples; rank r takes the samples from 50 r // N to 50 (r + 1) // N. How many samples does each of the three
# surviving ranks have?

# %% tags=["stub"]
lab.predict("done-once-more", {
    "shrink": None, "a commit every 5 steps": None, "a checkpoint every 10 steps": None,
})
lab.predict("slices-of-three", {0: None, 1: None, 2: None})

# %% tags=["solution"]
lab.predict("done-once-more", {
    "shrink": 0, "a commit every 5 steps": 2, "a checkpoint every 10 steps": 7,
})
lab.predict("slices-of-three", {0: 16, 1: 17, 2: 17})

# %% [markdown]
# ## What is given
#
# In the exercises a death is SIMULATED, because the engines must survive. In some step an all-reduce raises MPI's own
# error on the ranks that notice the death; some others still get the result. From then on every call on that
# communicator fails. `shrunk(comm)` returns the communicator of the surviving ranks, and all of them have to call it.
# On this communicator another rank may die in a later step. These errors mean that a rank has died:

# %%
from dtlib.recovery.shrink import failure_of_a_rank

# %%
lab.read(failure_of_a_rank)

# %%
# %%px
def step_on(comm, model, optimizer, batch):
    """A step on the batch of all ranks; where all_reduce raises, nothing has changed."""
    x, y = batch
    mine = slice(len(x) * comm.rank // comm.size, len(x) * (comm.rank + 1) // comm.size)
    optimizer.zero_grad()
    loss = cross_entropy(model(x[mine]), y[mine]) * len(x[mine]) / len(x)
    loss.backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat, group=comm.group)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    optimizer.step()

# %% [markdown]
# ## Fix: one step too late on one rank
#
# This recovery is right in most runs: they continue, and the loss falls. Sometimes one rank continues with another step
# than the other ranks, and its gradients are those of another batch. Fix it. (`dist.broadcast_object_list` fills a list
# with the Python objects of another rank.)

# %% tags=["stub"]
# %%px
def train_after_deaths(comm, model, optimizer, batch_of, steps):
    step, failed = 0, False
    while True:
        try:
            if failed:
                state = [model.state_dict(), optimizer.state_dict()]
                dist.broadcast_object_list(state, group_src=0, group=comm.group)
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            while step < steps:
                step_on(comm, model, optimizer, batch_of(step))
                step += 1
            return comm.barrier()
        except Exception as error:
            if not failure_of_a_rank(error):
                raise
            comm, failed = shrunk(comm), True

# %% tags=["solution"]
# %%px
def train_after_deaths(comm, model, optimizer, batch_of, steps):
    step, failed = 0, False
    while True:
        try:
            if failed:
                state = [model.state_dict(), optimizer.state_dict(), step]
                dist.broadcast_object_list(state, group_src=0, group=comm.group)
                step = state[2]
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            while step < steps:
                step_on(comm, model, optimizer, batch_of(step))
                step += 1
            return comm.barrier()
        except Exception as error:
            if not failure_of_a_rank(error):
                raise
            comm, failed = shrunk(comm), True

# %%
lab.check("resume-fix")

# %% [markdown]
# ## Build: shrink and continue
#
# Write `shrink_and_go_on(comm, model, optimizer, batch_of, steps)`: data parallelism from step 0 to the end, on the
# surviving ranks.
#
# - `batch_of(step)` is the batch of *all* ranks together: `x, y`. Each rank computes its part of the batch. The
#   gradient of a step is the mean over the whole batch, for any number of ranks. The number of samples need not be a
#   multiple of the number of ranks.
# - Model and optimizer are the same on all ranks at the beginning. The optimizer has momentum.
# - After one death, or more, training continues with the step that failed. Do not repeat a step that all ranks have
#   done.
# - When it returns, every surviving rank has the parameters of an undisturbed training.
# - Any other error ends the training.
# - Send with `torch.distributed` on `comm.group`, or with `comm` itself.

# %% tags=["stub"]
# %%px
def shrink_and_go_on(comm, model, optimizer, batch_of, steps):
    ...

# %% tags=["solution"]
# %%px
def shrink_and_go_on(comm, model, optimizer, batch_of, steps):
    step = 0
    while True:
        try:
            state = [model.state_dict(), optimizer.state_dict(), step]
            dist.broadcast_object_list(state, group_src=0, group=comm.group)
            of_model, of_optimizer, step = state
            model.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
            while step < steps:
                x, y = batch_of(step)
                mine = slice(comm.rank, None, comm.size)
                optimizer.zero_grad()
                loss = cross_entropy(model(x[mine]), y[mine], reduction="sum") / len(x)
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=comm.group)
                optimizer.step()
                step += 1
            return comm.barrier()
        except Exception as error:
            if not failure_of_a_rank(error):
                raise
            comm = shrunk(comm)

# %%
lab.check("shrink-build")

# %% [markdown]
# ## If you have time
#
# - Kill two ranks at once in the fault lab of the lecture, or one while the others recover.
# - Where must you add a line so that dropout draws the same random numbers after a death? Is that possible with fewer
#   ranks?
# - Design a buddy scheme: each rank keeps a copy of its neighbour's shard. Which pairs of deaths does it not survive?
