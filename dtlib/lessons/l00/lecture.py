# %% [markdown]
# # 00 Start here
#
# Twenty-five minutes. You start four processes and run a line of Python on all of them. They add numbers, hang,
# recover, and throw darts at a circle.
#
# **Questions.** What is a rank? Where does a cell run? How do ranks work together?
#
# Run a cell with Shift+Enter. The cells build on each other: go from top to bottom.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Start the ranks
#
# The next cell starts four processes on this computer: a *world* of four *ranks*. They exchange messages through MPI,
# the Message Passing Interface, as programs on clusters do.

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [markdown]
# Each row is a rank. Each rank has its own process id: ranks share no memory. The last column says whether torch has
# been imported; you need not wait for it. (torch, or PyTorch, is the deep-learning library of this course.) Ranks that
# share cores take turns.

# %% [markdown] tags=["two-hours", "half-day"]
# This notebook is a fifth process. A plain cell runs here; a cell that starts with `%%px` runs on every rank instead.
# **Predict:** each rank prints its own number. Which numbers will you see?

# %% tags=["two-hours", "half-day"]
# %%px
import dtlib

world = dtlib.init()
print("I am rank", world.rank, "of", world.size)

# %% tags=["statement"]
# "Ranks are numbered from 0."
assert [row(f"I am rank {number} of") for number in range(4)] == [[4]] * 4

# %% [markdown] tags=["two-hours", "half-day"]
# Ranks are numbered from 0. All four ran the same lines. Only `world.rank` differs, and the values computed from it.
#
# **Predict.** Now `x` gets a value on every rank, and then another value in the notebook. What will the second cell
# show?

# %% tags=["two-hours", "half-day"]
# %%px
x = 10 * world.rank
print(x)

# %% tags=["two-hours", "half-day"]
x = "I live in the notebook"
print(x)
lab.values("x")

# %% tags=["statement"]
# "One name, five values."
assert len(found(r"I live in the notebook \[0, 10, 20, 30\]")) + 1 == 5

# %% [markdown] tags=["two-hours", "half-day"]
# One name, five values. `lab.values` copies the ranks' values into the notebook, in rank order.

# %% [markdown]
# One program, many ranks, different data: this style is called SPMD (*single program, multiple data*). If a name exists
# only on the ranks, or only in the notebook, the error message says where. Try it later: print `world` without `%%px`.
# (`%%px --local` runs a cell in both places.)

# %% [markdown] tags=["two-hours", "half-day"]
# ## Add together
#
# `world.comm` is a *communicator*: a rank uses it to exchange messages with the others. A *collective* is an operation
# that all ranks do together. One is `all_reduce`: it adds the numbers of all ranks, and *every* rank receives the sum.

# %% [markdown]
# In data parallelism, the most common way to train on many GPUs, those numbers are gradients.
#
#     rank 0   0 \                  / 6   rank 0
#     rank 1   1  \                /  6   rank 1
#                   all_reduce (+)
#     rank 2   2  /                \  6   rank 2
#     rank 3   3 /                  \ 6   rank 3

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** Each rank holds its own number. What is the sum over eight ranks? Replace `None`.

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("sum-for-eight", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("sum-for-eight", 28)

# %% [markdown] tags=["two-hours", "half-day"]
# **Your turn.** Replace the comment with `world.comm.all_reduce(total)`. Then run the check, which looks at `total` on
# all ranks.

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

# %% [markdown]
# If the check said *not yet*, it also named the rank, the expected value and the value that it found. Fix the cell and
# check again.

# %% [markdown] tags=["two-hours", "half-day"]
# ## When ranks hang
#
# A collective needs all ranks. If one does not arrive, the others wait: the program *hangs*. Hangs will happen to you,
# so try one. `barrier` only waits until every rank has called it. **Predict** which ranks hang. Run the cell, wait
# until a line below says which rank is missing, then press **Stop**, the square in the bar above the notebook. (Without
# Stop it ends after ten seconds.)

# %% tags=["two-hours", "half-day", "stub", "raises-exception"]
# %%px
world.comm.barrier()  # all four arrive
if world.rank != 2:
    world.comm.barrier()  # press Stop

# %% tags=["two-hours", "half-day", "solution"]
# %%px
world.comm.time_limit = 1  # seconds: this solved notebook runs without anybody who presses Stop
world.comm.barrier()  # all four arrive
try:
    if world.rank != 2:
        world.comm.barrier()
except dtlib.DtlibError as error:
    print(error)
world.comm.time_limit = 30

# %% tags=["statement"]
# "the others can say which rank they wait for"
# "and which line it ran last"
assert found(r"rank \d has finished its cell; its last operation was barrier \(`line \d") == [2, 2]

# %% [markdown]
# No line of this code is wrong in itself. Each rank records its position in the code, so the others can say which rank
# they wait for, and which line it ran last.

# %% [markdown] tags=["two-hours", "half-day"]
# After an interruption, ranks no longer agree on the next collective. `dtlib.reset()` on **all** ranks gives a clean
# start. (`%px` with one percent sign runs a single line on the ranks.)

# %% tags=["two-hours", "half-day"]
# %px dtlib.reset();
# %px print(world.comm.all_reduce(torch.tensor(world.rank)))

# %% [markdown] tags=["two-hours", "half-day"]
# ## Darts
#
# A quarter circle covers pi/4 of its square, so about that fraction of random darts lands in it. Each rank throws its
# own slice of 600 darts.

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib import pi

start, stop = pi.slice_of(600, world.rank, world.size)
darts = pi.points_numpy(start, stop, seed=2)
print("darts", start, "to", stop - 1)

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
lab.pictures.darts(lab.values("darts"))

# %% tags=["statement"]
# "An estimate from 600 darts is typically wrong by 0.07, one from the 150 darts of a rank by 0.13."
# "The estimate in the picture is so near to pi by luck."
off = [abs(row(label, under="estimate of pi")[-1] - 3.14159) for label in ("0", "1", "2", "3", "all")]
assert off[4] < min(off[:4]) and off[4] < 0.1 * 0.067

# %% [markdown] tags=["two-hours", "half-day"]
# An estimate from 600 darts is typically wrong by 0.07, one from the 150 darts of a rank by 0.13. The estimate in the
# picture is so near to pi by luck. Now ten million: each rank counts its slice, and one `all_reduce` adds the counts.

# %% tags=["two-hours", "half-day"]
# %%px
inside = pi.count_on_ranks(10**7, world.comm)
estimate = pi.Estimate(10**7, inside)
if world.rank == 0:
    print(f"pi = {estimate.pi:.5f}, give or take {estimate.standard_error:.5f}")

# %% [markdown]
# ## For the curious: a rank dies
#
# Processes die: somebody kills them, a machine fails, memory is full. Here rank 2 kills itself as `kill -9` would,
# while the others wait for it. **Predict**: what happens to ranks 0, 1 and 3? Then run the cell and read the error
# message.

# %% tags=["raises-exception", "nbval-ignore-output"]
# %%px
import os
import signal

if world.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
world.comm.barrier()

# %% tags=["statement"]
# "If one rank of a world dies, MPI ends all the others."
assert found(r"Rank (\d) was ended by signal (\d+) .* (\d) new ones have been started") == [2, 9, 4]

# %% [markdown]
# If one rank of a world dies, MPI ends all the others. The new ranks have none of the old names, so run these cells
# again:

# %%
# %%px
import dtlib
import torch

world = dtlib.init()
print(world.comm.all_reduce(torch.tensor(world.rank)))

# %% [markdown]
# Training can continue after a death, even without the dead ranks: [lesson 11b](11b_faults.ipynb) has a button for
# that.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Plain MPI
#
# This script computes pi without dtlib: it uses mpi4py, Python's MPI, and random points from numpy. In a terminal:
# `mpiexec -n 4 python notebooks/pi_mpi4py.py`.

# %% tags=["two-hours", "half-day"]
lab.mpiexec("pi_mpi4py.py", ranks=4)

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("00")

# %% [markdown]
# ## Summary
#
# - A *rank* is a process with a number; a *world* is all of them.
# - `%%px` runs a cell on every rank; without it a cell runs in the notebook. Each side has its own names.
# - Ranks share no memory. They work together through collectives such as `all_reduce`. If one rank does not arrive, the
#   others hang.
# - The ranks end by themselves when you shut down the last notebook that uses them (Kernel > Shut Down Kernel);
#   closing its tab is not enough.
#
# **If something hangs:** press Stop (the square above), then run `%px dtlib.reset()`. If that does not help:
# `lab.engines(restart=True)`, then run the cells from the top, because all names on the ranks are gone. `lab.panel()`
# opens a panel on the right that shows what each rank does, with a Reset button.
#
# **If the page was closed while a cell ran:** the cell continues. `lab.last()` shows the outputs that the page has missed.
