# %% [markdown]
# # 03 Collectives
#
# Sixty minutes. You see what each collective does, count messages and bytes, step through the ring all-reduce, measure
# what it costs, and make ranks hang.
#
# **Questions.** How do many ranks add up an array, and what does it cost? What is a hang?
#
# **Afterwards you can** name the collectives and the data that each sends; choose an all-reduce by size and by links;
# predict its cost; understand the error message that ends a hang.
#
# **You need** [00 Start here](00_start_here.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch

world = dtlib.init()
comm = world.comm

# %% [markdown] tags=["half-day"]
# ## The collectives
#
# A *collective* is an operation that all ranks call together, in the same order and with the same shapes. (`send` and
# `recv` connect two ranks.) All are methods of a *communicator*, such as `comm`: a group of ranks.
#
# Some collectives move whole values, often to or from one rank, the *root*. Others move *chunks*: an array is cut into
# as many equal chunks as there are ranks. In the next cell, rank r begins with 10 r, or with the four numbers from 10 r
# to 10 r + 3. **Predict** before you run: what does each rank hold after `broadcast`, `reduce` and `all_reduce`?

# %% tags=["half-day"]
# %%px
def one():
    return torch.tensor([10 * world.rank])


def four():
    return torch.arange(4) + 10 * world.rank


def room(size=1):
    return torch.zeros(size, dtype=torch.int64)


shown = [
    ("broadcast from 0", one(), comm.broadcast(one(), root=0)),
    ("reduce to 0", one(), comm.reduce(one(), root=0)),
    ("all_reduce", one(), comm.all_reduce(one())),
    ("all_gather", one(), comm.all_gather(room(4), one())),
    ("scatter from 0", four(), comm.scatter(room(), four(), root=0)),
    ("reduce_scatter", four(), comm.reduce_scatter(room(), four())),
    ("all_to_all", four(), comm.all_to_all(room(4), four())),
]

# %% tags=["half-day"]
rows = []
for on_ranks in zip(*lab.values("shown"), strict=True):
    for when in (1, 2):
        held = [" ".join(str(int(x)) for x in on_rank[when]) for on_rank in on_ranks]
        name, time = (on_ranks[0][0], "before") if when == 1 else ("", "after")
        rows.append((name, time, *held))
headers = ("collective", "", *(f"rank {rank}" for rank in range(4)))
lab.table(rows, headers, align="llrrrr")

# %%
from dtlib.lessons.l03 import figures

figures.collectives()

# %% tags=["statement"]
# "rank r sends its chunk s to rank s"
before, after = row("all_to_all"), rows("after", under="all_to_all")[6]
assert after == [before[4 * s + r] for r in range(4) for s in range(4)]

# %% [markdown] tags=["half-day"]
# White cells have no value, or an unused one. With `all_to_all` rank r sends its chunk s to rank s. Names elsewhere:
#
# | here | `torch.distributed` | mpi4py |
# |---|---|---|
# | `broadcast` | `broadcast` | `Bcast` |
# | `all_reduce` | `all_reduce` | `Allreduce` |
# | `reduce_scatter` | `reduce_scatter_single` | `Reduce_scatter_block` |
# | `all_gather` | `all_gather_single` | `Allgather` |
# | `all_to_all` | `all_to_all_single` | `Alltoall` |
# | `send`, `recv` | `send`, `recv` | `Send`, `Recv` |
#
# Before torch 2.13 two names were `reduce_scatter_tensor` and `all_gather_into_tensor`.

# %% tags=["half-day", "statement"]
# "`reduce` leaves the values of the other ranks as they were; `all_reduce` gives the result to all."
before, after = row("reduce to 0"), rows("after")[1]
assert after == [60, *before[1:]] and rows("after")[2] == [60] * 4
# the sum of every rank's chunk r
chunks = row("reduce_scatter", under="all_to_all")
assert rows("after", under="all_to_all")[5] == [sum(chunks[r::4]) for r in range(4)]

# %% [markdown] tags=["half-day"]
# `reduce` leaves the values of the other ranks as they were; `all_reduce` gives the result to all. With
# `reduce_scatter` rank r gets the sum of every rank's chunk r. A further `all_gather` gives every rank all sums: **a
# reduce-scatter and an all-gather make an all-reduce.** The ring uses this, and ZeRO uses it to save memory.
#
# **Predict.** Two ranks hold (1, 2) and (3, 4). What does rank 1 hold after a `reduce_scatter`?

# %% tags=["half-day", "stub"]
lab.predict("chunk-of-rank-1", None)

# %% tags=["half-day", "solution"]
lab.predict("chunk-of-rank-1", 6)

# %% [markdown]
# ## Everybody to rank 0, and back
#
# In the simplest way all ranks send to rank 0. Rank 0 adds, and sends the sum back, one message at a time. In each
# round of a tree, half of the ranks with a partial sum send it to the other half. This is the library's own source;
# `link` sends and receives, `yield` waits.

# %%
from dtlib.comm import algorithms

lab.read(algorithms.naive_all_reduce, algorithms.tree_reduce)

# %% [markdown]
# **Predict.** On eight ranks: how many *messages* does each way send in all? In how many *rounds*, if a rank handles one
# message per round?

# %% tags=["stub"]
lab.predict("naive-and-tree", {
    "messages, naive": None,
    "messages, tree": None,
    "rounds, naive": None,
    "rounds, tree": None,
})

# %% tags=["solution"]
lab.predict("naive-and-tree", {
    "messages, naive": 14,
    "messages, tree": 14,
    "rounds, naive": 14,
    "rounds, tree": 6,
})

# %% tags=["statement"]
# "Both send equally many messages, but the tree sends several at a time."
said = {way: found(f"messages, {way}: you predicted (\\d+)") for way in ("naive", "tree")}
assert said["naive"] == said["tree"] and found(r"rounds, tree: you predicted (\d+)") < said["tree"]

# %% [markdown]
# Both send equally many messages, but the tree sends several at a time. `dtlib.trace()` records a rank's calls and
# messages:

# %%
# %%px
for name in ("naive", "tree"):
    with dtlib.trace() as trace:
        comm.all_reduce(torch.ones(1000), algorithm=name)
    messages, sent_bytes = trace.sent()
    print(f"{name}: sent {messages} messages, {sent_bytes:,} bytes")

# %% [markdown] tags=["two-hours", "half-day"]
# ## The ring
#
# In the ring all ranks send all the time. Cut the array into as many chunks as there are ranks. In every step each rank
# sends one chunk to its right neighbour and receives one from its left.
#
# - **Reduce-scatter**, N - 1 steps on N ranks: add the arriving chunk to your own, and send the sum next. Then each
#   rank has one complete chunk.
# - **All-gather**, N - 1 steps: send complete chunks to the right.
#
# Drag the slider. Each row is a rank, each column a chunk; colours and numbers show which ranks' values it contains. A
# frame marks the chunk to send next.

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
from dtlib.lab import ring

ring.explore(4)

# %% [markdown]
# All steps of four ranks:

# %% tags=["nbval-ignore-output"]
ring.show_all(4)

# %% tags=["statement"]
# "Chunk 0 starts at rank 1, grows at ranks 2 and 3, and is complete at rank 0."
steps = ("1  [1]", "2  [1+2]", "3  [1+2+3]", "step 3: all-gather           0  [0+1+2+3]")
assert all(count(f"{step}".replace("[", r"\[").replace("]", r"\]").replace("+", r"\+")) for step in steps)

# %% [markdown]
# Chunk 0 starts at rank 1, grows at ranks 2 and 3, and is complete at rank 0. The code:

# %%
from dtlib.comm import algorithms

lab.read(
    algorithms.ring_reduce_scatter_in_place, algorithms.ring_all_gather, algorithms.ring_all_reduce
)

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** An array of 120 MB on four ranks: how many MB does each rank *send* in a ring all-reduce? And on a
# thousand ranks?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("megabytes-of-a-ring", {4: None, 1000: None})

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("megabytes-of-a-ring", {4: 180, 1000: 240})

# %% tags=["two-hours", "half-day"]
# %%px
gradient = torch.full((300_000,), float(world.rank))  # 1.2 MB
with dtlib.trace() as trace:
    comm.all_reduce(gradient, algorithm="ring")
messages, sent_bytes = trace.sent("all_reduce")
print(f"{messages} messages, {sent_bytes:,} bytes; every element is {gradient[0]:g}")

# %% [markdown] tags=["two-hours", "half-day"]
# Never more than twice the array, for any number of ranks.

# %% tags=["statement"]
# "Never more than twice the array, for any number of ranks."
assert found(r"1000: you predicted \d+, and it came out as ([\d.]+)")[0] < 2 * 120
assert found(r"6 messages, ([\d,]+) bytes")[0] == 2 * 1_200_000 * 3 / 4

# %% [markdown]
# No algorithm needs fewer bytes (Patarasuk, Yuan). But the ring needs many *rounds*: 2 (N-1).
#
# ## Recursive doubling
#
# Each round costs a *latency*, the time until an empty message has arrived. So small arrays need few rounds. Each rank
# exchanges its whole array with the rank that differs in the lowest bit of its number, then in the next bit, and so on.

# %%
lab.read(algorithms.recursive_doubling_all_reduce)

# %% tags=["statement"]
# "On 1,024 ranks (5 µs, 25 GB/s, 4 MB) the ring pays 2,046 latencies and takes 10.5 ms, Rabenseifner's 0.42 ms."
from dtlib.theory.collectives import cost

ring, halving = (1e3 * cost("all_reduce", way, 1024, 4e6, 5e-6, 25e9) for way in ("ring", "rabenseifner"))
assert int(10 * ring) == 105 and round(halving, 2) == 0.42 and 2 * 1023 == 2046

# %% [markdown]
# ## What it costs
#
# A message of n bytes takes α + n β seconds: α is the latency, 1/β the bandwidth. A rank sends one message and receives
# one at a time. Without the time to add, N ranks need:
#
# | all-reduce | seconds |
# |---|---|
# | naive | 2 (N-1) (α + n β) |
# | tree | 2 log₂N (α + n β) |
# | recursive doubling | log₂N (α + n β) |
# | ring | 2 (N-1) (α + n/N β) |
# | Rabenseifner's | 2 log₂N α + 2 (N-1)/N n β |
#
# Doubling pays the fewest latencies, the ring sends the fewest bytes. Rabenseifner's algorithm halves its messages from
# round to round, and is good at both. On 1,024 ranks (5 µs, 25 GB/s, 4 MB) the ring pays 2,046 latencies and takes 10.5
# ms, Rabenseifner's 0.42 ms.
#
# **Predict.** For how many bytes n do doubling and ring take equally long? Set their formulas equal for N = 4, 5 ms and
# 100 MB/s.

# %% tags=["stub"]
lab.predict("crossing", None)

# %% tags=["solution"]
lab.predict("crossing", 4_000_000)

# %% [markdown]
# Is the model right? Inside one computer a message is a copy in memory. So the library emulates a network: it delays
# each message by α + n β. **The following network is EMULATED**, and so slow that Python's own time hardly matters.
#
# We measure α and β. Ranks 0 and 1 send a message back and forth (*ping-pong*). A short message gives α, a long one β.

# %% tags=["nbval-ignore-output"]
# %%px
import time
from functools import partial

import numpy as np
from dtlib.comm import progress_thread

slow = comm.emulate_network(latency=0.005, bandwidth=100e6)  # 5 ms per message, 100 MB/s


def seconds_of(act, count, repeats):
    """Return the slowest rank's best time. One run is not enough: others use this computer too."""
    array, took = np.ones(count // 4, dtype=np.float32), []
    for _ in range(repeats):
        comm.barrier()
        began = time.perf_counter()
        act(array)
        took.append(time.perf_counter() - began)
    return max(comm.all_gather_object(min(took)))


def ping_pong(array):
    if world.rank < 2:
        for act in (slow.send, slow.recv) if world.rank == 0 else (slow.recv, slow.send):
            act(array, 1 - world.rank)


with progress_thread():
    short, long = (seconds_of(ping_pong, count, repeats=5) / 2 for count in (8, 2**22))
alpha, beta = short, (long - short) / 2**22
if world.rank == 0:
    print(f"EMULATED network: latency {1e3 * alpha:.1f} ms, bandwidth {1 / beta / 1e6:.0f} MB/s")

# %%
# %%px
measured = {"naive": {}, "tree": {}, "recursive_doubling": {}, "ring": {}}
with progress_thread():
    for name, seconds in measured.items():
        for count in (4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20):
            act = partial(slow.all_reduce, op="max", algorithm=name)
            seconds[count] = seconds_of(act, count, repeats=3)

# %% tags=["nbval-ignore-output"]
from dtlib.theory import collectives as theory

measured, alpha, beta = (lab.values(name)[0] for name in ("measured", "alpha", "beta"))
model = {
    name: {n: theory.cost("all_reduce", name, 4, n, alpha, 1 / beta) for n in seconds}
    for name, seconds in measured.items()
}
lab.pictures.costs(measured, model, title="EMULATED network: measured, and by the model")
off = max(
    abs(seconds / model[name][n] - 1)
    for name in ("tree", "recursive_doubling", "ring") for n, seconds in measured[name].items()
)
print(f"Tree, doubling and ring are within {off:.0%} of the model.")

# %% tags=["claim"]
# "predict three algorithms on four ranks"
# "The naive one is faster than its model"
assert off < 0.4  # Python's own time, and naps of ranks that wait
assert all(measured["naive"][n] < model["naive"][n] for n in measured["naive"])

# %% [markdown]
# Two numbers, measured on two ranks, predict three algorithms on four ranks. The naive one is faster than its model:
# here rank 0 receives three messages at once. No real network card does that. Doubling and ring take equally long near
# 4 MB, as you predicted. (Without `algorithm=` the library chooses by size.) **Discuss:** what else do model and
# emulation leave out?

# %% [markdown]
# ## Machines and links
#
# Bandwidth in one direction, for one GPU:
#
# | link | GB/s |
# |---|---|
# | NVLink 4, inside a machine of 8 H100 | 450 |
# | InfiniBand NDR, a card of 400 Gb/s | 50 |
# | the emulated network above | 0.1 |
#
# **Question 1.** Gradients of 7 billion parameters have 14 GB in 16 bits. How long does a ring of eight GPUs take over
# NVLink, and how long over InfiniBand?
#
# <details><summary>Answer 1</summary>Each sends 2 x 7/8 x 14 = 24.5 GB: 54 ms and 490 ms.</details>
#
# A *hierarchical* all-reduce sends little over the slow link: a reduce-scatter inside each machine, an all-reduce of
# each chunk between machines, and an all-gather inside. We use torch's calls; `comm.group` is torch's `ProcessGroup` of
# `comm`. Let our four ranks be two machines of two.
#
# **Predict.** The array has 1.2 MB. How many MB does each *machine* send to the other, with a ring over all four ranks and
# with the hierarchy?

# %% tags=["claim"]
# "Each sends 2 x 7/8 x 14 = 24.5 GB: 54 ms and 490 ms."
assert 2 * 7 / 8 * 14 == 24.5 and round(24.5e3 / 450) == 54 and 24.5e3 / 50 == 490

# %% tags=["stub"]
lab.predict("between-machines", {"ring": None, "hierarchical": None})

# %% tags=["solution"]
lab.predict("between-machines", {"ring": 1.8, "hierarchical": 1.2})

# %%
# %%px
from torch import distributed as dist

machine, across = comm.split(world.rank // 2), comm.split(world.rank % 2)  # 0 1, 2 3; 0 2, 1 3


def hierarchical(tensor):
    part = torch.empty(len(tensor) // machine.size)
    dist.reduce_scatter_single(part, tensor, group=machine.group)
    dist.all_reduce(part, group=across.group)
    dist.all_gather_single(tensor, part, group=machine.group)


with dtlib.trace() as in_steps:
    hierarchical(gradient := torch.full((300_000,), float(world.rank)))
with dtlib.trace() as flat:
    comm.all_reduce(torch.ones(300_000), algorithm="ring")
inside = sum(in_steps.sent(name)[1] for name in ("reduce_scatter", "all_gather"))
sent_bytes = inside, in_steps.sent("all_reduce")[1], flat.sent("all_reduce")[1]
print(f"every element is {gradient[0]:g}")

# %%
sent_by = lab.values("sent_bytes")
rows = [(rank, *sent) for rank, sent in enumerate(sent_by)]
lab.table(rows, ("rank", "hierarchy: bytes inside", "hierarchy: bytes across", "ring: bytes"))
between = {"ring": sent_by[1][2] / 1e6, "hierarchical": (sent_by[0][1] + sent_by[1][1]) / 1e6}

# %% tags=["statement"]
# "In the ring only ranks 1 and 3 send to the other machine: 1.8 MB. In the hierarchy each rank sends 0.6 MB."
assert [row(f"{rank}", "hierarchy: bytes inside") for rank in range(4)] == [[1_200_000, 600_000, 1_800_000]] * 4
assert count("every element is 6")

# %% [markdown]
# In the ring only ranks 1 and 3 send to the other machine: 1.8 MB. In the hierarchy each rank sends 0.6 MB. With 128
# machines of eight GPUs, each machine sends nearly 2 n bytes in both algorithms. But the hierarchy uses eight cards at
# once, in 268 rounds instead of 2,046.

# %% tags=["claim"]
# "in 268 rounds instead of 2,046"
assert 2 * 7 + 2 * 127 == 268 and 2 * 1023 == 2046

# %% [markdown]
# ## What a hang is
#
# If one rank does not arrive, the others wait forever: they *hang*. There are three causes. Here a wait has a short
# limit, and ends with an error message.
#
# **One: a rank that does not arrive**, or that died. Which rank is missing? What did it do last?

# %%
# %%px
from dtlib.lessons.l03.judge_hangs import print_error

comm.time_limit = 2  # seconds
with print_error():
    if world.rank != 2:
        comm.barrier()
comm.time_limit = 30  # as before

# %% tags=["statement"]
# "Which rank is missing? What did it do last?"
assert found(r"Waited (\d) s in barrier .*: rank (\d) has finished its cell; its last operation was all_reduce") == [2, 2]

# %% [markdown]
# After an interrupted operation a communicator is out of step. All calls fail until all ranks call `dtlib.reset()`:

# %%
# %%px
with print_error():
    if world.rank != 2:
        comm.barrier()
comm = dtlib.reset().comm
print(comm.all_reduce(torch.tensor(1)))

# %% [markdown]
# **Two: ranks that disagree.** All arrive, but at different operations. In a notebook, ranks compare their calls before
# each collective. Otherwise an all-reduce could receive a broadcast's messages, which causes a hang or, worse, a wrong
# sum.

# %%
# %%px
comm = dtlib.reset().comm
with print_error():
    if world.rank == 0:
        comm.all_reduce(torch.ones(2))
        comm.broadcast(torch.ones(2))
    else:
        comm.broadcast(torch.ones(2))
        comm.all_reduce(torch.ones(2))

# %% [markdown]
# **Three: ranks that wait for one another.** Two ranks want to swap values. Both receive first:

# %%
# %%px
comm, theirs = dtlib.reset().comm, torch.zeros(3)
comm.time_limit = 2
with print_error():
    if world.rank < 2:
        comm.recv(theirs, 1 - world.rank)
        comm.send(torch.ones(3), 1 - world.rank)
comm.time_limit = 30

# %% tags=["statement"]
# "No rank is absent: they wait in a circle."
assert count("they wait for one another") == 2

# %% [markdown]
# No rank is absent: they wait in a circle. With `async_op=True` an operation returns a handle at once; until
# `handle.wait()` you must not touch the tensor.
#
# **Your turn.** Fix it, so that ranks 0 and 1 receive each other's number.

# %% tags=["stub"]
# %%px
comm, theirs = dtlib.reset().comm, torch.zeros(1)
comm.time_limit = 2
with print_error():
    if world.rank < 2:
        comm.recv(theirs, 1 - world.rank)
        comm.send(torch.ones(1) * world.rank, 1 - world.rank)
print(theirs)
comm.time_limit = 30

# %% tags=["solution"]
# %%px
comm, theirs = dtlib.reset().comm, torch.zeros(1)
comm.time_limit = 2
with print_error():
    if world.rank < 2:
        sending = comm.send(torch.ones(1) * world.rank, 1 - world.rank, async_op=True)
        comm.recv(theirs, 1 - world.rank)
        sending.wait()
print(theirs)
comm.time_limit = 30

# %% [markdown]
# The cure: start the send, receive, then wait for the send, as every step of the ring does.
#
# With the default limit, 30 s, a line below the cell says after three seconds which rank is missing; **Stop** ends the
# wait, and `%px dtlib.reset()` brings the ranks back into step. In torch, `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares
# calls, and `init_process_group(timeout=...)` sets the limit (with NCCL ten minutes).

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("03")

# %% [markdown]
# ## Summary
#
# - All ranks call a collective, in the same order. An all-reduce is a reduce-scatter and an all-gather.
# - Small arrays: rounds count (doubling). Large ones: bytes count (ring: less than twice the array).
# - α + n β predicts the cost from two numbers. Between machines, a hierarchy uses all cards at once.
# - A hang: a rank does not arrive, ranks disagree, or ranks wait in a circle. Read the error message; Stop; `%px
#   dtlib.reset()`.
#
# Now the [exercises](../exercises/03_collectives_exercises.ipynb): fix a ring, build one, and explain five hangs.
#
# ## References
#
# - R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH. IJHPCA 19(1), 2005.
# - P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. JPDC 69(2), 2009.
# - Links: NVIDIA's system descriptions in MLPerf Inference 4.1, 2024 (900 GB/s, both ways).
