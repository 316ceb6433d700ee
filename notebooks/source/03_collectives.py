# %% [markdown] tags=["two-hours", "half-day"]
# # 03 Collectives
#
# Ninety minutes; fifteen in the two-hour workshop, which takes the ring alone. You see what each collective does, count
# messages and bytes, step through the ring all-reduce, measure what it costs, and bring ranks to a halt on purpose.
#
# **Questions.** How do many ranks add up an array? Why is there more than one way? What does it cost? What is a hang,
# and who is to blame?
#
# **Afterwards you can** name the collectives and say what each sends; choose between tree, doubling and ring by size;
# predict a cost from latency and bandwidth; read the sentence with which a hang ends.
#
# **You need** [00 Start here](00_start_here.ipynb).

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% tags=["two-hours", "half-day"]
import numpy as np

from dtlib.theory import collectives as theory
from dtlib.comm import algorithms, selection
from dtlib.lab import ring

# %% tags=["two-hours", "half-day"]
# %%px
import time

import dtlib
import numpy as np
import torch

world = dtlib.init()
comm = world.comm

# %% [markdown] tags=["half-day"]
# ## The collectives
#
# A *collective* is an operation that all ranks call together, in the same order and with the same shapes;
# there is no rank that serves the others. (`send` and `recv` are the other kind: one rank to one rank.)
#
# First the collectives that move one value to or from a *root*. Rank r begins with 10 r.
#
# **Predict** before you run: what does each rank hold after `broadcast`, after `reduce`, after `all_reduce`?

# %% tags=["half-day"]
# %%px
def one():
    return torch.tensor([10 * world.rank])


shown = [
    ("broadcast from 0", one(), comm.broadcast(one(), root=0)),
    ("reduce to 0", one(), comm.reduce(one(), root=0)),
    ("all_reduce", one(), comm.all_reduce(one())),
    ("all_gather", one(), comm.all_gather(torch.zeros(4, dtype=torch.int64), one())),
]

# %% tags=["half-day"]
def table_of(shown):
    """What each rank has before and after each collective; ``shown`` is from the ranks."""
    rows = []
    for collective in zip(*shown, strict=True):
        for when in (1, 2):
            held = [" ".join(str(int(x)) for x in on_rank[when]) for on_rank in collective]
            name, time = (collective[0][0], "before") if when == 1 else ("", "after")
            rows.append((name, time, *held))
    headers = ("collective", "", *(f"rank {rank}" for rank in range(len(shown))))
    lab.table(rows, headers, align="ll" + "r" * len(shown))


table_of(lab.values("shown"))

# %% [markdown] tags=["half-day"]
# `reduce` leaves the others as they were; `all_reduce` gives the result to all. Now the collectives that deal in *chunks*:
# an array has as many equal chunks as there are ranks. Rank r begins with four numbers, 10 r to 10 r + 3.

# %% tags=["half-day"]
# %%px
def four():
    return torch.arange(4) + 10 * world.rank


def room(size=1):
    return torch.zeros(size, dtype=torch.int64)


shown = [
    ("scatter from 0", four(), comm.scatter(room(), four(), root=0)),
    ("reduce_scatter", four(), comm.reduce_scatter(room(), four())),
    ("all_to_all", four(), comm.all_to_all(room(4), four())),
]

# %% tags=["half-day"]
table_of(lab.values("shown"))

# %% [markdown] tags=["half-day"]
# Look at `reduce_scatter`: rank r has the sum of everybody's chunk r, and nothing else. Put `all_gather` after it, and
# every rank has all sums: **a reduce-scatter and an all-gather make an all-reduce.** Keep that in mind: it is how the ring
# works, and later how ZeRO saves memory.
#
# **Your turn.** Two ranks hold (1, 2) and (3, 4). What has rank 1 after a `reduce_scatter`? Replace `None` by a number.

# %% tags=["half-day", "stub"]
lab.predict("chunk-of-rank-1", None)

# %% tags=["half-day", "solution"]
lab.predict("chunk-of-rank-1", 6)

# %% [markdown] tags=["half-day"]
# ## Everybody to rank 0, and back
#
# How are four arrays added? The simplest way: all send to rank 0, it adds and sends the sum back. This is the
# library's own source; `link` sends and receives, `yield` waits.

# %% tags=["half-day"]
lab.read(algorithms.naive_all_reduce)

# %% [markdown] tags=["half-day"]
# Rank 0 handles the messages one after the other, while the others wait. A tree shares the work: in every round, half
# of those that still have a partial sum give it to the other half.

# %% tags=["half-day"]
lab.read(algorithms.tree_reduce)

# %% [markdown] tags=["half-day"]
# Down again it is a `tree_broadcast`, the same backwards.
#
# **Predict.** On eight ranks: how many *messages* does the naive way send in all, and how many the tree? How many
# messages come one after the other (*rounds*)?

# %% tags=["half-day", "stub"]
lab.predict("naive-and-tree", {
    "messages, naive": None,
    "messages, tree": None,
    "rounds, naive": None,
    "rounds, tree": None,
})

# %% tags=["half-day", "solution"]
lab.predict("naive-and-tree", {
    "messages, naive": 14,
    "messages, tree": 14,
    "rounds, naive": 14,
    "rounds, tree": 6,
})

# %% [markdown] tags=["half-day"]
# The same number of messages, but the tree sends several at a time. `dtlib.theory` has these formulas, and tests
# compare them with what ranks really send. So do we: `dtlib.trace()` records what a rank calls, with the messages and
# the payload bytes that it sent.

# %% tags=["half-day"]
# %%px
sent = {}
for name in ("naive", "tree"):
    with dtlib.trace() as trace:
        comm.all_reduce(torch.ones(1000), algorithm=name)
    sent[name] = trace.sent()

# %% tags=["half-day"]
for name in ("naive", "tree"):
    each = [on_rank[name] for on_rank in lab.values("sent")]
    print(f"{name}: messages and bytes sent by rank 0 to 3: {each}")
    assert sum(messages for messages, _ in each) == theory.messages("all_reduce", name, 4)

# %% tags=["half-day"]
counts = [2, 4, 8, 64, 1024]
rows = [[n, *(theory.rounds("all_reduce", a, n) for a in ("naive", "tree"))] for n in counts]
lab.table(rows, ("ranks", "rounds, naive", "rounds, tree"))

# %% [markdown] tags=["two-hours", "half-day"]
# ## The ring
#
# The gradient of a model may have a billion numbers. Then it is bytes that count: whoever sends or receives whole arrays
# again and again holds up all others. The ring all-reduce lets every rank send all the time, and little.
#
# Cut the array into as many chunks as there are ranks. Every rank sends one chunk to its right neighbour and receives one from
# its left neighbour, in every step, at the same time.
#
#     rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0
#
# **Reduce-scatter.** For N - 1 steps, add what comes to your own chunk and pass on the sum. Then every rank has one chunk
# complete. **All-gather.** For N - 1 steps, pass complete chunks on.

# %% [markdown] tags=["two-hours", "half-day"]
# Step through it: drag the slider. A row is a rank, a column a chunk of its array; the colours (and numbers) say which ranks'
# values are in it; a frame marks what is sent to the right neighbour next. It is no animation made for this page: the
# library's own code runs in it, over a network that waits for you after each step.

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
ring.explore(4)

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** After how many steps does a rank have a complete chunk for the first time? Count with the slider, or
# think.

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("steps-until-complete", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("steps-until-complete", 3)

# %% [markdown] tags=["two-hours", "half-day"]
# All steps at once, and as text:

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
ring.show_all(4)

# %% [markdown] tags=["two-hours", "half-day"]
# Follow chunk 0. It starts at rank 1, collects at rank 2 and 3, and is complete at rank 0. Here is the code, all of
# it: the ring that the library runs under everything that follows in this course.

# %% tags=["two-hours", "half-day"]
lab.read(algorithms.ring_reduce_scatter_in_place)

# %% tags=["two-hours", "half-day"]
lab.read(algorithms.ring_all_gather, algorithms.ring_all_reduce)

# %% [markdown] tags=["two-hours", "half-day"]
# **Your turn.** An array of 120 MB on four ranks: how many MB does each rank *send* in a ring all-reduce? And
# on a thousand ranks? 1 % off counts as right.

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("megabytes-of-a-ring", {4: None, 1000: None})

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("megabytes-of-a-ring", {4: 180, 1000: 240})

# %% [markdown] tags=["two-hours", "half-day"]
# Twice the array, however many ranks there are: that is why the ring scales. Nobody can do with less: all that a rank has
# must leave it once, and all that it needs must come. Now for real, on our four ranks:

# %% tags=["two-hours", "half-day"]
# %%px
gradient = torch.full((300_000,), float(world.rank))  # 1.2 MB
with dtlib.trace() as trace:
    comm.all_reduce(gradient, algorithm="ring")
messages, sent_bytes = trace.sent("all_reduce")
print(f"{messages} messages, {sent_bytes:,} bytes; every element is {gradient[0]:g}")
assert (messages, sent_bytes) == (6, 2 * 3 * gradient.nbytes // 4)

# %% [markdown] tags=["half-day"]
# ## Recursive doubling
#
# The ring sends few bytes but needs 2 (N-1) rounds, and each round costs a *latency*: the time until even an empty message
# has arrived. For small arrays another way is better: exchange whole arrays with the rank whose number differs in one bit,
# then in the next bit.

# %% tags=["half-day"]
lab.read(algorithms.recursive_doubling_all_reduce)

# %% [markdown] tags=["half-day"]
# Bits need a power of two. Where N is none, the ranks beyond it hand their values to a partner and get the result
# back: two rounds more. Always ask of an algorithm what it does on three ranks.
#
# **Predict.** How many rounds has recursive doubling on 4, on 6 and on 1024 ranks?

# %% tags=["half-day", "stub"]
lab.predict("rounds-of-doubling", {4: None, 6: None, 1024: None})

# %% tags=["half-day", "solution"]
lab.predict("rounds-of-doubling", {4: 2, 6: 4, 1024: 10})

# %% [markdown] tags=["half-day"]
# ## What it costs
#
# The usual model has two numbers. A message of n bytes takes α + n β seconds: α is the latency, 1/β the bandwidth. A
# rank sends one message and receives one at a time. Then on N ranks, without the time to add:
#
# | all-reduce | seconds |
# |---|---|
# | naive | 2 (N-1) (α + n β) |
# | tree | 2 log₂N (α + n β) |
# | recursive doubling | log₂N (α + n β) |
# | ring | 2 (N-1) (α + n/N β) |
#
# Doubling has the fewest α, the ring the fewest bytes. (Thakur, Rabenseifner and Gropp, section 3 and 4; the module
# `dtlib/theory/` has all operations.) Is it true? First on this computer, where messages are copies in memory: we measure.

# %% tags=["half-day"]
# %%px
from dtlib.comm.waiting import progress_thread

SIZES = [4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20]
NAMES = ["naive", "tree", "recursive_doubling", "ring"]


def seconds_of(comm, count, name, repeats=10):
    """The best of a few runs, on the rank that took longest: others use this computer too."""
    array, took = np.ones(count // 4, dtype=np.float32), []
    for _ in range(repeats):
        world.comm.barrier()
        began = time.perf_counter()
        comm.all_reduce(array, op="max", algorithm=name)
        took.append(time.perf_counter() - began)
    return max(world.comm.all_gather_object(min(took)))

# %% tags=["half-day"]
# %%px
measured = {name: {count: seconds_of(comm, count, name) for count in SIZES} for name in NAMES}

# %% tags=["half-day", "nbval-ignore-output"]
lab.pictures.costs(lab.values("measured")[0], title="inside this computer, measured")

# %% [markdown] tags=["half-day"]
# Is one algorithm the best at every size? Run the cell that measures once more: how much of the picture stays? Here four
# ranks share cores and memory, and none has a network card of its own, so chance and copying count as much as the
# algorithm.
#
# So we let the library emulate a network: it holds each message back until its latency and its bytes would have passed. It
# is slow on purpose, so that Python's own time disappears beside it. **What follows is EMULATED**, and says so.

# %% tags=["half-day"]
# %%px
slow = comm.emulate_network(latency=0.005, bandwidth=100e6)  # 5 ms a message, 100 MB/s

# %% [markdown] tags=["half-day"]
# We do as if we did not know α and β, and measure: ranks 0 and 1 send each other a message, there and back (*ping-pong*).
# The time of a short one is α; what a long one takes more gives β. `progress_thread` looks after messages while a
# rank does something else; more of it below.

# %% tags=["half-day", "nbval-ignore-output"]
# %%px
def one_way(comm, count, repeats=5):
    """Seconds of a message between rank 0 and 1: half of the fastest ping-pong."""
    array, took = np.ones(count // 4, dtype=np.float32), []
    for _ in range(repeats):
        world.comm.barrier()
        began = time.perf_counter()
        if world.rank < 2:
            for act in (comm.send, comm.recv) if world.rank == 0 else (comm.recv, comm.send):
                act(array, 1 - world.rank)
        took.append((time.perf_counter() - began) / 2)
    return min(took)


with progress_thread():
    short, long = one_way(slow, 8), one_way(slow, 2**22)
alpha, beta = world.comm.broadcast(np.array([short, (long - short) / 2**22]))
if world.rank == 0:
    print(f"EMULATED network: latency {1e3 * alpha:.1f} ms, bandwidth {1 / beta / 1e6:.0f} MB/s")

# %% tags=["half-day"]
# %%px
with progress_thread():
    measured = {name: {n: seconds_of(slow, n, name, 3) for n in SIZES} for name in NAMES}

# %% tags=["half-day", "nbval-ignore-output"]
measured, alpha, beta = (lab.values(name)[0] for name in ("measured", "alpha", "beta"))
model = {
    name: {n: theory.cost("all_reduce", name, 4, n, alpha, 1 / beta) for n in measured[name]}
    for name in ("naive", "tree", "recursive_doubling", "ring")
}
lab.pictures.costs(measured, model, title="EMULATED network, measured, and the model")
tolerance = 0.4  # Python's own time, and naps of ranks that wait
for name in ("tree", "recursive_doubling", "ring"):
    for n, seconds in measured[name].items():
        assert abs(seconds / model[name][n] - 1) < tolerance, (name, n)
assert all(measured["naive"][n] < model["naive"][n] for n in measured["naive"])
print(f"Tree, doubling and ring are within {tolerance:.0%} of the model.")

# %% [markdown] tags=["half-day"]
# With two numbers, measured on two ranks, the model predicts four ranks and three algorithms. The naive one is faster
# than its model, and the reason is instructive: this emulation charges the *sender*. Three ranks may send to
# rank 0 at the same moment, and nobody stands in line. A real network card receives one message after the other. A
# model and an emulation are both stories about a machine: ask what they leave out.
#
# **Your turn.** Where do doubling and ring cross? Set their formulas equal for N = 4: 2 (α + n β) = 6 (α + n/4 β). Guess
# n in bytes for 5 ms and 100 MB/s; 10 % off counts as right.

# %% tags=["half-day", "stub"]
lab.predict("crossing", None)

# %% tags=["half-day", "solution"]
lab.predict("crossing", 4_000_000)

# %% [markdown] tags=["half-day"]
# ## What the library picks
#
# `all_reduce` without `algorithm=` chooses by size: recursive doubling up to a limit, the ring above. The limit was measured
# inside one machine (by ranks, in bytes):

# %% tags=["half-day"]
print(selection.DOUBLING_UP_TO)

# %% [markdown] tags=["half-day"]
# The number of messages gives it away: on four ranks doubling sends 2 from each rank, the ring 6.

# %% tags=["half-day"]
# %%px
for count in (1000, 100_000, 200_000):
    tensor = torch.ones(count)
    with dtlib.trace() as trace:
        comm.all_reduce(tensor)
    messages = trace.sent()[0]
    if world.rank == 0:
        name = {2: "recursive doubling", 6: "ring"}[messages]
        print(f"{tensor.nbytes:>7,} bytes: {messages} messages from each rank, {name}")

# %% [markdown] tags=["half-day"]
# ## While a message travels
#
# Waiting is a waste if there is something to compute. Every operation takes `async_op=True`: it starts, returns a handle at
# once, and `handle.wait()` ends it. Meanwhile you must not touch the tensor.
#
# Here a rank computes three gradients, and each must be summed over the ranks. `time.sleep` stands for an accelerator that
# computes: it leaves the core free. The network is EMULATED. First one after the other:

# %% tags=["half-day"]
# %%px
slow = comm.emulate_network(latency=0.002, bandwidth=200e6)
gradients = [torch.ones(250_000) for _ in range(3)]
comm.barrier()
with dtlib.trace() as trace:
    for gradient in gradients:
        with dtlib.phase("compute"):
            time.sleep(0.03)
        slow.all_reduce(gradient)

# %% tags=["half-day", "nbval-ignore-output"]
lab.pictures.timeline("trace")
events = lab.values("trace")[0].events
one_after_the_other = max(event.end for event in events) - min(event.start for event in events)
print(f"EMULATED: {1e3 * one_after_the_other:.0f} ms")

# %% [markdown] tags=["half-day"]
# Now each all-reduce starts as soon as its gradient is there, and the next is computed meanwhile. Somebody must look
# after the messages: `progress_thread` does, in a thread beside the main program. It pays here because the core is idle; where
# the core itself computes, thread and computation would take time from one another.
#
# **Predict.** How many of the three all-reduces can be hidden behind computing?

# %% tags=["half-day", "stub"]
lab.predict("hidden-all-reduces", None)

# %% tags=["half-day", "solution"]
lab.predict("hidden-all-reduces", 2)

# %% tags=["half-day"]
# %%px
comm.barrier()
with dtlib.trace() as overlap, progress_thread():
    handles = []
    for gradient in gradients:
        with dtlib.phase("compute"):
            time.sleep(0.03)
        handles.append(slow.all_reduce(gradient, async_op=True))
    for handle in handles:
        handle.wait()

# %% tags=["half-day", "nbval-ignore-output"]
lab.pictures.timeline("overlap")
events = lab.values("overlap")[0].events
overlapped = max(event.end for event in events) - min(event.start for event in events)
print(f"EMULATED: {1e3 * one_after_the_other:.0f} ms before, {1e3 * overlapped:.0f} ms now")
assert overlapped < one_after_the_other

# %% [markdown] tags=["half-day"]
# The lower lane of a rank is the all-reduce in the background. Lesson 04 does this with the gradients of a real model.

# %% [markdown] tags=["half-day"]
# ## What a hang is
#
# Ranks wait for one another. If one does not come, the others wait for ever; nothing is broken, nothing is printed, and a
# cluster burns its hours. Most bugs of distributed programs look like that. There are three kinds.
#
# In these cells the wait has a short limit, and an error is printed as a sentence (`tells_how_it_ended`).
#
# **One: a rank that does not come.** Who, according to the sentence, and where was it last?

# %% tags=["half-day"]
# %%px
from dtlib.lab.lessons.l03.judge_hangs import tells_how_it_ended

comm.time_limit = 2  # seconds
with tells_how_it_ended():
    if world.rank != 2:
        comm.barrier()

# %% [markdown] tags=["half-day"]
# The sentence gives the line in which the rank waits, and whom it waits for. MPI cannot ask a rank that is stuck, so
# every rank writes down its last operation and line where the others can read it.
#
# A communicator in which an operation was interrupted is out of step and refuses to go on. `dtlib.reset()`, on all ranks, gives
# a clean one.

# %% tags=["half-day"]
# %%px
with tells_how_it_ended():
    if world.rank != 2:
        comm.barrier()

# %% tags=["half-day"]
# %%px
comm = dtlib.reset().comm
print(comm.all_reduce(torch.tensor(1)))

# %% [markdown] tags=["half-day"]
# **Two: ranks that disagree.** Everybody comes, but not to the same. In a notebook ranks compare what they call before
# each collective, so it ends at once.

# %% tags=["half-day"]
# %%px
with tells_how_it_ended():
    if world.rank == 0:
        comm.all_reduce(torch.ones(2))
        comm.broadcast(torch.ones(2))
    else:
        comm.broadcast(torch.ones(2))
        comm.all_reduce(torch.ones(2))

# %% [markdown] tags=["half-day"]
# Without that comparison the first all-reduce would have met a broadcast: a hang, or worse, a wrong sum.
#
# **Three: ranks that wait for one another.** Two ranks want to swap values. Both receive first.

# %% tags=["half-day"]
# %%px
comm = dtlib.reset().comm
theirs = torch.zeros(3)
with tells_how_it_ended():
    if world.rank < 2:
        comm.recv(theirs, 1 - world.rank)
        comm.send(torch.ones(3), 1 - world.rank)

# %% [markdown] tags=["half-day"]
# Nobody is absent: they wait in a circle. The cure is to start the send first and wait for it afterwards
# (`async_op=True`), as every step of the ring does.
#
# **Your turn.** Mend it: change the order so that both ranks get the other's number.

# %% tags=["half-day", "stub"]
# %%px
comm = dtlib.reset().comm
theirs = torch.zeros(1)
with tells_how_it_ended():
    if world.rank < 2:
        comm.recv(theirs, 1 - world.rank)
        comm.send(torch.ones(1) * world.rank, 1 - world.rank)
print(theirs)

# %% tags=["half-day", "solution"]
# %%px
comm = dtlib.reset().comm
theirs = torch.zeros(1)
with tells_how_it_ended():
    if world.rank < 2:
        sending = comm.send(torch.ones(1) * world.rank, 1 - world.rank, async_op=True)
        comm.recv(theirs, 1 - world.rank)
        sending.wait()
print(theirs)

# %% tags=["half-day"]
# %%px
comm.time_limit = 30  # as before
comm = dtlib.reset().comm

# %% [markdown] tags=["half-day"]
# Without a limit as short as ours, a line below the cell says after three seconds whom everybody waits for; **Stop** ends
# the wait on all ranks, and `%px dtlib.reset()` brings them back into step. After thirty seconds a wait ends by itself.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Summary
#
# - A collective is called by all ranks, in the same order. An all-reduce is a reduce-scatter and an all-gather.
# - Small arrays: the number of rounds counts (recursive doubling). Large ones: bytes count (ring: twice the array,
#   whatever the number of ranks).
# - α + n β, with two numbers measured on two ranks, predicts the cost; it leaves things out, and so does an emulation.
# - `async_op=True` hides communication behind computing where the core is free for it.
# - A hang is a rank that does not come, ranks that disagree, or ranks that wait in a circle. Read the sentence; Stop;
#   `%px dtlib.reset()`.
#
# Now the [exercises](../exercises/03_collectives_exercises.ipynb): mend a ring, build one, and explain five hangs.
#
# ## References
#
# - R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH. IJHPCA 19(1), 2005.
# - P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. JPDC 69(2), 2009.
# - A. Sergeev, M. Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow. arXiv:1802.05799, 2018.
# - D. Hensgen, R. Finkel, U. Manber: Two algorithms for barrier synchronization. IJPP 17(1), 1988.
