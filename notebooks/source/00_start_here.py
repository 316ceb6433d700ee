# %% [markdown] tags=["two-hours", "half-day"]
# # 00 Start here
#
# Ten minutes. You start four processes, run a line of Python on all of them, let them add a number together, bring
# them to a halt and back, and throw darts at a circle with them.
#
# **Questions.** What is a rank? Where does a cell run? How do ranks work together?
#
# Run a cell with Shift+Enter. The cells build on each other: go from top to bottom.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Start the ranks
#
# The next cell starts four processes on this computer. Together they form one *world*; each is a *rank* and has a
# number. They are real MPI processes: MPI, the Message Passing Interface, is how programs on clusters exchange
# messages. It takes a few seconds.

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [markdown] tags=["two-hours", "half-day"]
# A row is a rank. All have process ids of their own: they share no memory. The last column says when torch (PyTorch,
# the library for deep learning that this course uses) has been imported; you can go on meanwhile.
#
# This notebook is one more process. So there are five Pythons: one here, four there.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Here and there
#
# A cell runs here, in the notebook. A cell that starts with `%%px` runs on every rank, and not here. Its output
# carries the number of the rank that said it.

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** Each rank will print its own number. Which numbers will you see: 1 to 4, or others? Decide, then run.

# %% tags=["two-hours", "half-day"]
# %%px
import dtlib

world = dtlib.init()
print("I am rank", world.rank, "of", world.size)

# %% [markdown] tags=["two-hours", "half-day"]
# `dtlib.init()` answers the question *who am I?* Ranks count from 0, as Python does.
#
# All four ran the same line. What differs is `world.rank`, and everything that is computed from it. One program,
# many ranks, different data: this style is called SPMD (single program, multiple data), and all of this course is
# written in it.

# %% [markdown] tags=["two-hours", "half-day"]
# ## One name, five values
#
# The name `x` can live in the notebook and on every rank, with different values.

# %% tags=["two-hours", "half-day"]
x = "I live in the notebook"

# %% tags=["two-hours", "half-day"]
# %%px
x = 10 * world.rank

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** What does the next cell print? And the one after it?

# %% tags=["two-hours", "half-day"]
print(x)

# %% tags=["two-hours", "half-day"]
# %%px
print(x)

# %% [markdown] tags=["two-hours", "half-day"]
# `lab.values` brings a name's values from the ranks to the notebook, in rank order.

# %% tags=["two-hours", "half-day"]
lab.values("x")

# %% [markdown] tags=["two-hours", "half-day"]
# If a name is missing on one side, the error tells you on which side it is. Try it later: print `world` without
# `%%px`.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Add together
#
# `world.comm` is a rank's line to the others. What it can do are *operations*. Those for which all ranks meet are *collectives*; one of them is `all_reduce`.
#
# Each rank holds a number, its own rank. `all_reduce` adds the numbers of all ranks and gives *every* rank the sum.
# Data parallelism, the commonest way to train on many GPUs, lives on it: there, the numbers are gradients.
#
#     rank 0   0 \                  / 6   rank 0
#     rank 1   1  \                /  6   rank 1
#                   all_reduce (+)
#     rank 2   2  /                \  6   rank 2
#     rank 3   3 /                  \ 6   rank 3

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** The drawing has told you the sum for four ranks. What would it be for eight? Replace `None`.

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("sum-for-eight", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("sum-for-eight", 28)

# %% [markdown] tags=["two-hours", "half-day"]
# **Your turn.** Let the ranks do it for four: after `total` is made, call `world.comm.all_reduce(total)`. Then run
# the check.

# %% tags=["two-hours", "half-day", "stub"]
# %%px
import torch

total = torch.tensor(world.rank)
# your line here
print(total)

# %% tags=["two-hours", "half-day", "solution"]
# %%px
import torch

total = torch.tensor(world.rank)
world.comm.all_reduce(total)
print(total)

# %% tags=["two-hours", "half-day"]
lab.check("first-sum")

# %% [markdown] tags=["two-hours", "half-day"]
# The check looked at `total` on all ranks. If it said *not yet*, it also said on which rank, what it expected and
# what came. Mend the cell and check again.

# %% [markdown] tags=["two-hours", "half-day"]
# ## When ranks hang
#
# A collective such as `all_reduce` needs all ranks. What if one does not come? Then the others wait. No line of code is wrong
# in itself, and nothing is printed: it *hangs*. It will happen to you; so try it now.
#
# `barrier` only waits until every rank is there. To the second one rank 2 will not come. **Predict**: which ranks hang? Run
# the cell, wait until a line below it says whom everybody waits for (three seconds), then press **Stop**, the square
# above. (If you do not, it ends by itself after ten seconds.)

# %% tags=["two-hours", "half-day", "stub", "raises-exception"]
# %%px
world.comm.barrier()  # all four come
if world.rank != 2:
    world.comm.barrier()  # press Stop

# %% tags=["two-hours", "half-day", "solution"]
# %%px
world.comm.time_limit = 1  # seconds, so that this stored notebook needs nobody to press Stop
world.comm.barrier()  # all four come
try:
    if world.rank != 2:
        world.comm.barrier()
except dtlib.DtlibError as error:
    print(error)
world.comm.time_limit = 30

# %% [markdown] tags=["two-hours", "half-day"]
# Each rank notes where it is, so the others can say whom they wait for, and in which line it was last. Whoever was
# interrupted is out of step with the others. `dtlib.reset()` on **all** ranks gives them a clean start. `%px`
# with one percent sign runs a single line on the ranks.

# %% tags=["two-hours", "half-day"]
# %px dtlib.reset();

# %% tags=["two-hours", "half-day"]
# %%px
print(world.comm.all_reduce(torch.tensor(world.rank)))

# %% [markdown] tags=["two-hours", "half-day"]
# All four are back, and the sum is right.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Darts
#
# Throw darts at a square: the fraction that lands in the quarter circle is about pi/4. Four ranks share 600 darts. Each takes
# a slice of its own, so that no dart is thrown twice.

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib import pi

start, stop = pi.slice_of(600, world.rank, world.size)
darts = pi.points_numpy(start, stop, seed=2)
print("darts", start, "to", stop - 1)

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
lab.pictures.darts(lab.values("darts"))

# %% [markdown] tags=["two-hours", "half-day"]
# Each rank's 150 darts give a poor estimate of pi, all 600 a better one. Now ten million: each rank counts its slice, and
# one `all_reduce` adds the counts.

# %% tags=["two-hours", "half-day"]
# %%px
inside = pi.count_on_ranks(10**7, world.comm)
estimate = pi.Estimate(10**7, inside)
if world.rank == 0:
    print(f"pi = {estimate.pi:.5f}, give or take {estimate.standard_error:.5f}")

# %% [markdown]
# ## For the curious: a rank dies
#
# Processes die: somebody kills them, a machine fails, memory is full. Here rank 2 kills itself as `kill -9` would, while
# the others wait for it. **Predict**: what becomes of ranks 0, 1 and 3? Then run the cell and read the sentence.

# %% tags=["raises-exception", "nbval-ignore-output"]
# %%px
import os
import signal

if world.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
world.comm.barrier()

# %% [markdown]
# MPI ends all ranks of a world in which one dies. The new ones know none of the names that the old ones had, so what you need
# is run again. Go on:

# %%
# %%px
import dtlib
import torch

world = dtlib.init()
print(world.comm.all_reduce(torch.tensor(world.rank)))

# %% [markdown]
# Training can go on after a death, too, even without those that are dead: [lesson 11b](11b_faults.ipynb) has a button for it.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Summary
#
# - A *rank* is a process with a number; a *world* is all of them.
# - `%%px` runs a cell on every rank; without it a cell runs in the notebook. Names are separate.
# - Ranks share no memory. They work together through collectives such as `all_reduce`.
# - The ranks end by themselves when you shut down the last notebook that uses them (Kernel > Shut Down Kernel);
#   closing its tab is not enough.
#
# **If something hangs:** press Stop (the square above), then run `%px dtlib.reset()`. If that does not help:
# `lab.engines(restart=True)`, then the cells from the top, as names on the ranks are gone. `lab.panel()` opens a panel on
# the right that shows what each rank does, with a Reset button.
