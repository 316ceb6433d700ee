# %% [markdown]
# # 03 Collectives: exercises
#
# Four exercises: *predict* (two minutes), *fix* a ring (five minutes), *build* a ring (thirty minutes), and five
# *hangs* to explain (twenty minutes). A check looks at your answer on all ranks and says what is wrong; check again for
# the next hint.
#
# **You need** the lecture [03 Collectives](../lectures/03_collectives.ipynb). Answers:
# [solutions](../solutions/03_collectives_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %% [markdown]
# We use three ranks: three is not a power of two. On two ranks the left and the right neighbour would be the same,
# which hides mistakes.

# %%
# %%px
import dtlib
import torch

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# - A tree broadcasts an array on eight ranks. How many messages are sent in all, and in how many rounds?
# - Three ranks sum arrays of 1,200,000 bytes with a ring all-reduce. How many bytes does each rank send?
#
# Replace each `None`.

# %% tags=["stub"]
lab.predict("tree-broadcast", {"messages": None, "rounds": None})
lab.predict("bytes-of-a-ring", None)

# %% tags=["solution"]
lab.predict("tree-broadcast", {"messages": 7, "rounds": 3})
lab.predict("bytes-of-a-ring", 1_600_000)

# %%
# %%px
with dtlib.trace() as trace:
    world.comm.all_reduce(torch.ones(300_000), algorithm="ring")
sent_bytes = trace.sent()[1]

# %% [markdown]
# ## Fix: a ring with one wrong index
#
# This ring all-reduce sends its messages with mpi4py. The code runs to its end and sends the right number of messages,
# but its sums are wrong. One index is wrong. Fix it. `Sendrecv` sends to the right and receives from the left at the
# same time.
#
# `torch.tensor_split` cuts an array into `size` chunks; the chunks are views, so changing a chunk changes the array.
# When the second half begins, which chunk is complete on a rank?
#
# `ring.show_all(3)` draws what should happen.

# %% tags=["stub"]
# %%px
def ring_all_reduce(comm, array):
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = torch.tensor_split(array, size)
    for step in range(size - 1):  # reduce-scatter: add the received chunk
        outgoing, incoming = chunks[(rank - step - 1) % size], chunks[(rank - step - 2) % size]
        received = torch.empty_like(incoming)
        comm.mpi.Sendrecv(outgoing, right, recvbuf=received, source=left)
        incoming += received
    for step in range(size - 1):  # all-gather: send complete chunks to the right
        outgoing, incoming = chunks[(rank - step - 1) % size], chunks[(rank - step - 1) % size]
        comm.mpi.Sendrecv(outgoing.clone(), right, recvbuf=incoming, source=left)
    return array

# %% tags=["solution"]
# %%px
def ring_all_reduce(comm, array):
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = torch.tensor_split(array, size)
    for step in range(size - 1):  # reduce-scatter: add the received chunk
        outgoing, incoming = chunks[(rank - step - 1) % size], chunks[(rank - step - 2) % size]
        received = torch.empty_like(incoming)
        comm.mpi.Sendrecv(outgoing, right, recvbuf=received, source=left)
        incoming += received
    for step in range(size - 1):  # all-gather: send complete chunks to the right
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        comm.mpi.Sendrecv(outgoing.clone(), right, recvbuf=incoming, source=left)
    return array

# %%
lab.check("ring-fix")

# %% tags=["nbval-ignore-output"]
from dtlib.lab import ring

ring.show_all(3)

# %% [markdown]
# ## Build: an all-reduce of your own
#
# Write `my_all_reduce(comm, tensor)`: every rank's one-dimensional `tensor` becomes the sum over all ranks, *in place*.
# Use `comm.send`, `comm.recv`, `comm.rank` and `comm.size`, and no collective. Each rank may exchange messages with its
# two neighbours only.
#
# 1. Cut the tensor into `comm.size` chunks that are views of it.
# 2. In N - 1 steps: start to send a chunk to the right (`async_op=True`), receive one from the left into a new tensor,
#    wait for the send, add the received chunk.
# 3. In N - 1 more steps send complete chunks to the right; receive each directly into its place.
#
# The result must be right in float32 and in float64, and for every length:
#
# - a length that does not divide evenly by the number of ranks, a length below the number of ranks, and zero;
# - a length so large that `comm.send` waits until the other rank receives.
#
# The check looks at the values and at the messages that each rank *sends*: as many as in a ring, with no more bytes.
# Try to write it without looking at the ring above. You choose the direction, and which chunk goes first.

# %% tags=["stub"]
# %%px
def my_all_reduce(comm, tensor):
    ...

# %% tags=["solution"]
# %%px
def my_all_reduce(comm, tensor):
    rank, size = comm.rank, comm.size
    chunks = torch.tensor_split(tensor, size)
    for step in range(2 * (size - 1)):
        adds = step < size - 1
        outgoing = rank - step - 1 if adds else rank - step + size - 1
        incoming = chunks[(outgoing - 1) % size]
        received = torch.empty_like(incoming)
        sending = comm.send(chunks[outgoing % size], (rank + 1) % size, async_op=True)
        comm.recv(received, (rank - 1) % size)
        sending.wait()
        incoming.copy_(incoming + received if adds else received)
    return tensor

# %%
lab.check("ring-build")

# %% [markdown]
# A ring that is right but sends too much is no faster than other ways: look at the bytes before you look at the clock.
#
# Compare your ring with the library's. Do both send the same number of bytes?

# %%
# %%px
tensor = torch.full((300_000,), float(world.rank))
with dtlib.trace() as mine:
    my_all_reduce(world.comm, tensor)
with dtlib.trace() as library:
    world.comm.all_reduce(torch.ones(300_000), algorithm="ring")
print("bytes sent: mine", mine.sent()[1], "library", library.sent()[1])

# %% tags=["statement"]
# "A ring that is right but sends too much is no faster than other ways"
mine, library = found(r"bytes sent: mine (\d+) library (\d+)")
assert mine == library

# %% [markdown]
# ## Explain: five hangs
#
# Each of these functions makes ranks hang. `watch` runs one of them with a wait of two seconds at most, prints how it
# ended on each rank, and returns the trace; `lab.pictures.timeline` draws it.
#
# For each function, find the rank that the others wait for, and the line that keeps this rank away. If ranks wait for
# one another, name any of them. Write both into `explained` further below: `1: (rank, line)`, the line as text or as
# its number. Lines are numbered as in the error messages: the line below `%%px` is line 1.
#
# First look at the code alone, and guess. Then run it.

# %%
# %%px
def hang_1(comm):
    settings = torch.zeros(2)
    if comm.rank != 2:
        comm.broadcast(settings, root=0)
    return settings

# %%
# %%px
from dtlib.lessons.l03.judge_hangs import watch

trace = watch(hang_1)

# %% tags=["nbval-ignore-output"]
lab.pictures.timeline("trace")

# %% tags=["statement"]
# "Ranks 0 and 1 wait in line 4."
assert count(r"Waited 2 s in broadcast.* \(`line 4:") == 1 and found(r"rank (\d) has finished its cell") == [2]

# %% [markdown]
# Ranks 0 and 1 wait in line 4. The error message names the rank that they wait for. Find the line that keeps this rank
# away yourself. Now the other four:

# %%
# %%px
def hang_2(comm):
    gradient = torch.ones(4)
    batches = 3 if comm.rank == 1 else 4
    for _ in range(batches):
        comm.all_reduce(gradient)

# %%
# %%px
trace = watch(hang_2)

# %% tags=["nbval-ignore-output"]
lab.pictures.timeline("trace")

# %%
# %%px
def hang_3(comm):
    mine, theirs = torch.ones(4), torch.zeros(4)
    if comm.rank < 2:
        other = 1 - comm.rank
        comm.recv(theirs, other)
        comm.send(mine, other)

# %%
# %%px
trace = watch(hang_3)

# %%
# %%px
def hang_4(comm):
    batch = torch.ones(4)
    if comm.rank == 0:
        comm.send(batch, 1, tag=1)
    if comm.rank == 1:
        comm.recv(batch, 0, tag=2)

# %%
# %%px
trace = watch(hang_4)

# %% tags=["nbval-ignore-output"]
lab.pictures.timeline("trace")

# %%
# %%px
def hang_5(comm):
    percent = torch.zeros(1)
    try:
        percent += 100 // comm.rank
        comm.all_reduce(percent)
    except ZeroDivisionError:
        pass

# %%
# %%px
trace = watch(hang_5)

# %% [markdown]
# Your explanations. Replace each `None` by a pair, such as `(0, "comm.barrier()")` or `(0, 4)`.

# %% tags=["stub"]
# %%px
explained = {
    1: None,
    2: None,
    3: None,
    4: None,
    5: None,
}

# %% tags=["solution"]
# %%px
explained = {
    1: (2, "if comm.rank != 2:"),  # a collective inside an if
    2: (1, "batches = 3 if comm.rank == 1 else 4"),  # one rank has fewer batches
    3: (0, "comm.recv(theirs, other)"),  # both receive first; so does rank 1
    4: (1, "comm.recv(batch, 0, tag=2)"),  # no send has this tag; or rank 0, its send
    5: (0, "percent += 100 // comm.rank"),  # an error that somebody swallows
}

# %%
lab.check("hangs")

# %% [markdown]
# All five are common in real programs. Their causes: logging inside `if rank == 0` that calls a collective, data that
# do not divide evenly, an exchange in which both ranks receive first, tags that do not match, an `except` that is too
# broad. Their cures: call collectives on all ranks; agree on the number of steps beforehand; start sends
# asynchronously; use the same tag on both sides; let errors through.
#
# ## If you have time
#
# - Run `watch(hang_3, seconds=10)` and press Stop. What does the cell print, and how do you recover the ranks?
# - Let `my_all_reduce` send half of the tensor to the right and half to the left at the same time. Does the check still
#   pass?
# - How would your ring compute a *maximum* instead of a sum? And a mean?

# %% [markdown]
# ## The hang detective
#
# You get your own case, made from your name: sixteen ranks hang. Ask up to ten questions: `case.ask(5)` shows
# what rank 5 did last, `case.ask(5, 3)` its third collective. Then accuse a rank and a line: `case.accuse(5, 7)`.

# %%
from dtlib.lessons.l03 import detective

case = detective.case("your name")
