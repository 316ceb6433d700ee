# %% [markdown]
# # 04 Data parallelism
#
# Ninety minutes. You train one small net on handwritten digits in several ways: with averaged gradients, a parameter
# server, Horovod, torch's DDP, a config. The result is always the same, up to rounding. The ways differ in which rank
# sends which data, and when.
#
# **Questions.** Why did all-reduce replace parameter servers? What are hooks and buckets good for? What changes in a
# script when it runs on many processes?
#
# **Afterwards you can** predict the bytes of a step; average gradients, and check the result; turn a serial script into
# one for Horovod or DDP; read a timeline; write a config.
#
# **You need** [03 Collectives](03_collectives.ipynb): send, recv, the ring. Odd batches and the size of buckets are in the
# appendix, [04b](04b_data_parallel_appendix.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch

world = dtlib.init()
comm = world.comm

# %% [markdown] tags=["two-hours", "half-day"]
# ## One step, many ranks
#
# A training step computes the gradient of the mean loss over a batch, and moves the weights. A mean can be computed in
# parts: if every rank has an equal slice, the mean of the ranks' gradients is the gradient of the batch. **That is data
# parallelism: every rank has the whole model and a slice of the batch.** Only gradients travel.

# %%
from dtlib.lessons.l04 import figures

figures.data_parallelism()

# %% [markdown] tags=["two-hours", "half-day"]
# Our net reads handwritten digits, in float64, so that rounding hides no mistake.

# %% tags=["two-hours", "half-day"]
# %%px
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from dtlib.lab import digits

(x, y), test = digits.load(torch.float64)
BATCH, RATE = 96, 0.2
batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


def fresh_net(seed=0):
    torch.manual_seed(seed)
    return digits.net(dtype=torch.float64)


P = sum(parameter.nbytes for parameter in fresh_net().parameters())
if world.rank == 0:
    print(f"{len(x)} images, {len(batches)} batches of {BATCH}; P = {P:,} bytes of parameters")

# %% [markdown] tags=["two-hours", "half-day"]
# ## Averaging gradients
#
# This is the library's own code, written with `torch.distributed`: `comm.group` is torch's process group of these
# ranks. All ranks begin with rank 0's parameters and buffers; after the backward pass every gradient is averaged.

# %% tags=["two-hours", "half-day"]
from dtlib.parallel.data import plain

lab.read(plain.DataParallelNaive)

# %% [markdown] tags=["two-hours", "half-day"]
# The loop is the serial loop with one new line. We compare with one process, on whole batches:

# %% tags=["two-hours", "half-day"]
# %%px
MINE = slice(world.rank, None, comm.size)  # every fourth image


def train(model, average=lambda: None, mine=MINE, rate=RATE, momentum=0.9, steps=15):
    """Train on this rank's slice of each batch; returns the losses, averaged over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    losses = []
    for x, y in batches[:steps]:
        optimizer.zero_grad()
        loss = cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        average()  # the new line
        optimizer.step()
        losses.append(loss.detach())
    dist.all_reduce(losses := torch.stack(losses) / comm.size, group=comm.group)
    return losses


alone = fresh_net()
losses = train(alone, mine=slice(None))
if world.rank == 0:
    print(f"In one process the loss falls from {losses[0]:.2f} to {losses[-1]:.2f};")
    print(f"{digits.accuracy(alone, test):.0%} of the test images are right.")

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** Now each rank's seed is its number, so weights differ at first. How far apart are the ranks after one
# epoch? And how far are they from one process?

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib.parallel.data.plain import DataParallelNaive


def distance(one, other):
    """The largest difference between two models' parameters."""
    one, other = (parameters_to_vector(model.parameters()).detach() for model in (one, other))
    return (one - other).abs().max().item()


model = DataParallelNaive(fresh_net(seed=world.rank), comm.group)
losses = train(model, model.average_gradients)
ours = parameters_to_vector(model.parameters()).detach()
dist.broadcast(rank_0 := ours.clone(), group_src=0, group=comm.group)
from_rank_0 = (ours - rank_0).abs().max().item()
print(f"Distance from rank 0: {from_rank_0:g}; from one process: {distance(model, alone):.0e}.")

# %% tags=["statement"]
# "The last bits differ from one process"
ranks, process = found(r"Distance from rank 0: ([\d.e+-]+); from one process: (\d+e-\d+)\.")
assert ranks == 0 < process < 1e-12

# %% [markdown] tags=["two-hours", "half-day"]
# The last bits differ from one process: four partial sums round differently from one long sum. **Data parallelism
# changes no mathematics.**

# %% [markdown]
# **Change a line.** Below, the class forgets to divide by the number of ranks, and SGD takes its first step. Which
# learning rate would one process need to take the same step? (Ours is 0.2, on four ranks.)

# %% tags=["stub"]
lab.predict("same-as-rate", None)

# %% tags=["solution"]
lab.predict("same-as-rate", 0.8)

# %%
# %%px
class Summed(DataParallelNaive):
    def average_gradients(self):
        for parameter in self.trained:
            dist.all_reduce(parameter.grad, group=self.group)


def one_step(rate):
    """In one process."""
    alone = fresh_net()
    train(alone, mine=slice(None), rate=rate, steps=1)
    return alone


summed = Summed(fresh_net(), comm.group)
losses = train(summed, summed.average_gradients, steps=1)
gaps = {rate: distance(summed, one_step(rate)) for rate in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)}
assert min(gaps.values()) < 1e-12

# %% tags=["statement"]
# "With SGD a forgotten division is a learning rate N times too large"
assert found(r"You predicted ([\d.]+), and it came out as") == [4 * 0.2]

# %% [markdown]
# With SGD a forgotten division is a learning rate N times too large: the net may still train, but worse with every
# added rank. Adam nearly hides it, because Adam divides by the gradient's size. Another silent mistake: in a mean over
# unequal slices, images of small slices count more ([04b](04b_data_parallel_appendix.ipynb)).

# %% [markdown]
# ## The parameter server
#
# The first large systems kept the weights on a *server* (DistBelief, 2012). Workers pull them, compute a gradient from
# their slice of the batch, and push it; the server takes the step. Below, rank 0 serves and the other three work.
#
# **Predict.** The weights have P bytes, and so have the gradients. How many bytes does rank 0 *send* in one step? How
# many does it *receive*?

# %% tags=["stub"]
lab.predict("bytes-of-the-server", {"sent": None, "received": None})

# %% tags=["solution"]
lab.predict("bytes-of-the-server", {"sent": 115_440, "received": 115_440})

# %%
# %%px
from torch.nn.utils import vector_to_parameters


def serve(weights, steps):
    workers = range(1, comm.size)
    for _ in range(steps):
        for worker in workers:
            dist.send(weights, group_dst=worker, group=comm.group)
        total, gradient = torch.zeros_like(weights), torch.empty_like(weights)
        for worker in workers:
            dist.recv(gradient, group_src=worker, group=comm.group)
            total += gradient
        weights -= RATE * total / len(workers)


def work(net, weights, batches):
    for x, y in batches:
        dist.recv(weights, group_src=0, group=comm.group)
        vector_to_parameters(weights, net.parameters())
        mine = slice(world.rank - 1, None, comm.size - 1)  # every third image
        loss = cross_entropy(net(x[mine]), y[mine])
        gradient = torch.autograd.grad(loss, list(net.parameters()))
        dist.send(parameters_to_vector(gradient), group_dst=0, group=comm.group)  # push


net, control = fresh_net(), fresh_net()
weights = parameters_to_vector(net.parameters()).detach().clone()
with dtlib.trace() as trace:
    serve(weights, steps=5) if world.rank == 0 else work(net, weights, batches[:5])
with dtlib.trace() as ring:
    comm.all_reduce(torch.ones_like(weights), algorithm="ring")
sent_bytes = trace.sent()[1] // 5, ring.sent()[1]  # per step
losses = train(control, mine=slice(None), momentum=0, steps=5)
vector_to_parameters(weights, net.parameters())
assert world.rank > 0 or distance(net, control) < 1e-12  # as in one process

# %% tags=["statement"]
# "The weights have P bytes, and so have the gradients."
# "the other three work"
assert found(r"sent: you predicted ([\d,]+)")[0] == 3 * found(r"P = ([\d,]+) bytes")[0]

# %% [markdown]
# All messages go through the server. Without a server a ring all-reduce sums the gradients. Which rank is busiest?

# %%
sent_with_server, sent_with_ring = zip(*lab.values("sent_bytes"), strict=True)
sent_by = zip(range(4), sent_with_server, sent_with_ring, strict=True)
lab.table(sent_by, ("rank", "bytes sent, with a server", "bytes sent, with the ring"))
print(f"The server sends {max(sent_with_server) / max(sent_with_ring):.1f} times as much.")

# %% tags=["statement"]
# "the server sends (N-1)P bytes, each rank of the ring 2P(N-1)/N"
P = found(r"P = ([\d,]+) bytes")[0]
assert row("0", under="with the ring") == [3 * P, 2 * P * 3 / 4] and row("1", under="with the ring")[0] == P

# %% [markdown]
# With more ranks the gap grows: the server sends (N-1)P bytes, each rank of the ring 2P(N-1)/N. The ring's number hardly
# grows with N. By these formulas:

# %% tags=["nbval-ignore-output"]
ranks, P = [2, 4, 8, 16, 64, 256], lab.values("P")[0]
lab.pictures.lines(
    {
        "parameter server": {n: (n - 1) * P / 1e6 for n in ranks},
        "ring": {n: 2 * (n - 1) / n * P / 1e6 for n in ranks},
    },
    xlabel="ranks", ylabel="MB sent by the busiest rank", title="One step, by formula",
)

# %% tags=["statement"]
# "With more ranks the gap grows"
# "The ring's number hardly grows with N."
ratios = [server / ring for server, ring in (row(f"{n}", "by formula") for n in (2, 4, 8, 16, 64, 256))]
assert ratios == sorted(ratios) and row("256", "by formula")[1] < 1.15 * row("8", "by formula")[1]
assert 2 * 999 / 1000 < 1.12 * 2 * 9 / 10

# %% [markdown]
# If each worker serves one slice of the weights, each rank sends as much as in the ring. Servers also allow a worker to
# continue with outdated weights, without waiting.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Hooks and buckets
#
# Averaging after the backward pass wastes time twice: the network is idle while gradients are computed, and each small
# message pays a latency. autograd, torch's part for gradients, can help. As soon as a gradient is complete, it calls a
# *hook*, a function that you write. The hook can send the gradient, alone or with others in a *bucket*.

# %% [markdown] tags=["half-day"]
# **Predict:** which layer's gradients are ready first, those of the first layer (0) or of the last (2)?

# %% tags=["half-day", "stub"]
lab.predict("first-layer-to-come", None)

# %% tags=["half-day", "solution"]
lab.predict("first-layer-to-come", 2)

# %% tags=["half-day"]
# %%px
net, got = fresh_net(), []
for name, parameter in net.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: got.append(name))
cross_entropy(net(x), y).backward()
layers = [int(name[0]) for name in got]
if world.rank == 0:
    print("layers in order of their gradients:", *layers)

# %% [markdown]
# The file of `DataParallelNaive` has two more classes. Its first lines explain all three:

# %%
lab.read(plain)

# %% [markdown]
# In the second class a hook sends each gradient.

# %%
lab.read(plain.DataParallelHooks)

# %% tags=["statement"]
# "which layer's gradients are ready first, those of the first layer (0) or of the last (2)?"
assert found(r"in order of their gradients: ([\d ]+)") == [2, 2, 0, 0]

# %% [markdown]
# It says `while`, not `if`, because one hook may have to send several gradients: **all ranks must send in the same
# order**, but autograd may call hooks in another order, so an early gradient waits for its turn. In the third class
# neighbouring gradients share a message.

# %%
lab.read(plain.DataParallelBuckets)

# %% [markdown]
# `flat` does the work: gradients become views into the message, so nothing is copied back. **Discuss** before you run:
# the net has two layers with weight and bias, and the first layer's weight fills a bucket. How many `all_reduce`s per
# step does each class call?

# %%
# %%px
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks

MIB = digits.net(dtype=torch.float64)[0].weight.nbytes / 2**20  # the first layer's weight
for kind, size in (DataParallelNaive, []), (DataParallelHooks, []), (DataParallelBuckets, [MIB]):
    model = kind(fresh_net(seed=world.rank), comm.group, *size)
    with dtlib.trace() as trace:
        average = model.average_gradients if kind is DataParallelNaive else lambda: None
        losses = train(model, average)
    calls = [e for e in trace.events if e.kind == "operation" and e.dtype == "float64"]
    assert distance(model, alone) < 1e-12
    if world.rank == 0:
        per_step = (len(calls) - 1) // 15  # one was for the losses
        print(f"{kind.__name__}: {per_step} all_reduces per step, error below 1e-12")

# %% tags=["statement"]
# "the net has two layers with weight and bias"
calls = [found(f"DataParallel{kind}: (\\d+) all_reduces per step") for kind in ("Naive", "Hooks", "Buckets")]
assert calls == [[4], [4], [2]]

# %% [markdown]
# With rings the bytes are the same, however they are divided: 2P(N-1)/N. (In practice, gradients of 7 billion
# parameters in 16 bits are 14 GB, so with many GPUs each sends 28 GB per step, 0.6 s at 50 GB/s.)

# %% tags=["claim"]
# "14 GB, so with many GPUs each sends 28 GB per step, 0.6 s at 50 GB/s."
assert 2 * 7 == 14 and round(2 * 14 / 50, 1) == 0.6

# %% [markdown] tags=["two-hours", "half-day"]
# ## Overlap, seen
#
# Sending during the backward pass helps only if the computing core need not move the bytes. On GPUs a second *stream*
# moves them: NCCL's kernels run beside those of the backward pass, and slow them a little. We emulate this with layers
# that *sleep* in the backward pass, and a slow network. **These timelines are EMULATED.**
#
# `DataParallelBuckets` sends from hooks: messages progress only *between* layers. The full class, `DataParallel`, can
# use a thread for them. **Predict:** six layers, one bucket each. How many buckets can the thread hide behind the
# backward pass?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("hidden-buckets", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("hidden-buckets", 5)

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib.lessons.l04.emulated import EmulatedAccelerator
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets

slow = comm.emulate_network(latency=0.002, bandwidth=100e6)  # 2 ms per message, 100 MB/s


def emulated_step(kind, **settings):
    """A backward pass of six layers, 50 ms and 0.56 MB each; its trace."""
    model = kind(EmulatedAccelerator(6, 140_000, seconds=0.05), slow, bucket_cap_mb=0.5, **settings)
    loss = model(torch.zeros(1, requires_grad=True)).sum()
    dist.barrier(comm.group)
    with dtlib.trace() as trace:
        loss.backward()
    return trace


inline = emulated_step(DataParallelBuckets)
thread = emulated_step(DataParallel, progress="thread")

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
from dtlib import Timeline

lab.pictures.timeline("inline", "thread", rank=0, ends={"layer 0": "backward pass ends"})
with_hooks, with_thread = (Timeline(lab.values(name)) for name in ("inline", "thread"))
print(f"EMULATED: time with a thread / time inline {with_thread.end / with_hooks.end:.2f}")

# %% tags=["two-hours", "half-day", "claim"]
# "How many buckets can the thread hide behind the backward pass?"
assert with_thread.end < with_hooks.end

# %% tags=["two-hours", "half-day", "claim"]
# "Without a thread few or no buckets end during the backward pass. With a thread all but the last do."
# "The short seventh bar is a check of `DataParallelBuckets`."
for timeline, hidden in ((with_hooks, range(3)), (with_thread, [5])):
    mine = [event for event in timeline.events if event.rank == 0]
    last = max(event.end for event in mine if event.kind == "phase")
    reduced = [event for event in mine if event.kind == "operation" and event.dtype == "float32"]
    assert len(reduced) == 6 and sum(event.end < last for event in reduced) in hidden
    assert sum(event.messages for event in reduced) == 6 * 2 * 3  # rings, both times
assert [event.dtype for event in with_hooks.events if event.rank == 0].count("int64") == 1

# %% [markdown] tags=["two-hours", "half-day"]
# Both panels show rank 0. Without a thread few or no buckets end during the backward pass. With a thread all but the
# last do. The short seventh bar is a check of `DataParallelBuckets`. (Gaps between layers: four ranks and threads share
# the cores.)

# %% [markdown]
# On a CPU a thread takes time from the computation, so there `DataParallel` works without one.

# %% [markdown] tags=["half-day"]
# ## Horovod: seven changes
#
# Horovod (Uber, 2017) made the ring all-reduce popular: take a serial script and change a few lines. Here they are,
# from `notebooks/digits_serial.py` to `digits_horovod.py`:

# %% tags=["half-day"]
from pathlib import Path

folder = next(above for above in Path.cwd().parents if (above / "digits_serial.py").exists())
lab.read_changes(folder / "digits_serial.py", folder / "digits_horovod.py")
lab.push(folder=str(folder))

# %% tags=["statement"]
# "Horovod: seven changes"
assert count(r"(?m)^ *(.*# )?[1-7]\. |# \d\. |: +# 7\.") == 7

# %% [markdown] tags=["half-day"]
# The loop has not changed. Two things are easily forgotten. Without the sampler all ranks train on the same images. And
# `batch_size` is now per rank.

# %% [markdown]
# The fourth change is a rule of thumb; lesson 05 shows its limits.
#
# **Predict.** The Horovod script runs on four ranks with 24 images per rank and rate 0.02. With which batch size and
# which rate does the serial script end at the same weights?

# %% tags=["stub"]
lab.predict("serial-script", {"batch size": None, "rate": None})

# %% tags=["solution"]
lab.predict("serial-script", {"batch size": 96, "rate": 0.08})

# %% tags=["half-day"]
# %%px
import runpy
import sys


def run(script, batch_size, rate):
    """Run a script on this rank, as `python digits_serial.py 96 0.08` would; returns its net."""
    sys.argv = [script, str(batch_size), str(rate)]
    return runpy.run_path(f"{folder}/digits_{script}.py")["net"]


on_ranks = run("horovod", 24, 0.02)
by_itself = run("serial", comm.size * 24, comm.size * 0.02)
assert distance(on_ranks, by_itself) < 1e-5  # float32

# %% tags=["statement"]
# "The serial script printed on every rank, the Horovod script only on rank 0."
assert count("89% of the test images are right") == 3

# %% [markdown] tags=["half-day"]
# The serial script printed on every rank, the Horovod script only on rank 0.

# %% [markdown]
# In a terminal: `mpiexec -n 4 python notebooks/digits_horovod.py 24 0.02`.

# %% [markdown] tags=["half-day"]
# ## DDP
#
# torch's `DistributedDataParallel` is the production form of the same idea: hooks, buckets, overlap. The line that
# creates the model changes. DDP also needs a process group (torch's communicator), a sampler and a launcher. DDP sends
# through a *backend*: NCCL, NVIDIA's collectives for GPUs; gloo, Meta's for CPUs; or, here, dtlib's own. So torch's
# class runs on these ranks, and its timeline is drawn below ours (EMULATED, as above). The losses agree to 1e-12.

# %% tags=["half-day"]
# %%px
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dtlib.backend
from dtlib.comm import progress_thread

if dist.is_initialized():
    dist.destroy_process_group()  # of an earlier run
dist.init_process_group("dtlib", init_method="dtlib://")  # on GPUs: "nccl"
ours = train(DataParallel(fresh_net(seed=world.rank), comm))
theirs = train(DistributedDataParallel(fresh_net(seed=world.rank)))
assert (ours - theirs).abs().max() < 1e-12
if world.rank == 0:
    print("losses, ours:", *(f"{loss:.6f}" for loss in ours[::7]))
    print("losses, DDP: ", *(f"{loss:.6f}" for loss in theirs[::7]))


def ddp_after_a_step(net, _, **settings):
    """In its first step DDP sends one bucket, and learns in which order gradients are ready."""
    model = DistributedDataParallel(net, **settings)
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    model.zero_grad()
    return model


dtlib.backend.emulate_network(latency=0.002, bandwidth=100e6)  # as in `slow`
with progress_thread():
    ddp = emulated_step(ddp_after_a_step)
dist.destroy_process_group()

# %% tags=["statement"]
# "The losses agree to 1e-12."
ours, theirs = (found(f"losses, {whose}: +([\\d. ]+)") for whose in ("ours", "DDP"))
assert ours == theirs and len(ours) == 3

# %% tags=["half-day", "nbval-ignore-output"]
lab.pictures.timeline("thread", "ddp", rank=0, ends={"layer 0": "backward pass ends"})
operations = [e.name for e in lab.values("ddp")[0].events if e.kind == "operation"]
assert operations == ["all_reduce"] * 6

# %% [markdown]
# ## From a config
#
# Large projects keep such choices in a file. `dtlib.initialize` reads the keys of DeepSpeed, Microsoft's library for
# training large models. It returns an engine, which with `runtime="torch"` runs on DDP.
#
# **Predict.** The config below leaves out `gradient_accumulation_steps`, the number of *micro-batches* (here of 12
# images) that a rank computes before each step. How many does each of four ranks compute?

# %% tags=["stub"]
lab.predict("accumulation-steps", None)

# %% tags=["solution"]
lab.predict("accumulation-steps", 2)

# %%
# %%px
config = {
    "train_batch_size": 96,
    "train_micro_batch_size_per_gpu": 12,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "gradient_clipping": 1.0,
}
losses = {}
for runtime in ("dtlib", "torch"):
    net, training_data = fresh_net(), torch.utils.data.TensorDataset(x, y)
    # No step uses this parameter. DDP by itself would refuse that; both runtimes allow it.
    net.register_parameter("spare", torch.nn.Parameter(torch.zeros(1).double()))
    engine, *_ = dtlib.initialize(net, config, training_data=training_data, runtime=runtime)
    losses[runtime] = [engine.train_batch().item() for _ in range(20)]
    if world.rank == 0:
        print(f"losses, {runtime}:", *(f"{loss:.6f}" for loss in losses[runtime][::9]))
steps = engine.gradient_accumulation_steps()
assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-12

# %% tags=["statement"]
# "The config below leaves out `gradient_accumulation_steps`"
# "with `runtime="torch"` runs on DDP"
assert found(r"losses, dtlib: ([\d. ]+)") == found(r"losses, torch: ([\d. ]+)")
assert found(r"You predicted (\d+), and") == [96 / 12 / 4]

# %% [markdown]
# A mistake in a config should give an error message, not cost a night:

# %%
# %%px
wrong = {**config, "train_batch_size": 100}
try:
    dtlib.initialize(model=fresh_net(), config=wrong)
except dtlib.DtlibError as error:
    if world.rank == 0:
        print(error)

# %% tags=["statement"]
# "A mistake in a config should give an error message, not cost a night"
assert count("make train_batch_size a multiple of") == 1

# %% [markdown]
# ## What holds on GPUs, and what does not
#
# These also hold on GPUs: values, messages and bytes, the order of buckets, why a ring beats one server, and that
# communication can hide. Speed does not: nets are tiny, ranks share one machine, and overlap
# was emulated. On GPUs use DDP with NCCL.
#
# ## As a script
#
# ```python
# dist.init_process_group("gloo")  # on GPUs: "nccl"
# rank, ranks = dist.get_rank(), dist.get_world_size()
# model = DistributedDataParallel(model)
# x, y = x[rank::ranks], y[rank::ranks]
# loss = cross_entropy(model(x), y)
# optimizer.zero_grad()
# loss.backward()
# optimizer.step()
# dist.destroy_process_group()
# ```
#
# In a terminal: `torchrun --nproc-per-node 2 examples/ddp.py`.
#
# **Discuss.** Half of the ranks are twice as fast as the others. How long do the fast ranks wait? What would you
# change?

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("04")

# %% [markdown]
# ## Summary
#
# - Every rank has the model and a slice of the batch; the mean of the gradients is the gradient of the batch. Up to
#   rounding, the result is that of one process: test it.
# - A server sends N - 1 times the model; in a ring each rank sends less than twice the model, for any N.
# - Broadcast parameters *and* buffers at the start; shard the data; weight uneven batches.
# - Buckets save latency, hooks start them early, and overlap pays where bytes move without stopping the computation.
# - Horovod: seven changes. DDP: the model's line, process group, sampler, launcher (`torchrun`). A config: one call.
#
# Now the [exercises](../exercises/04_data_parallel_exercises.ipynb): fix a hook, build buckets, and send few bytes
# (*byte golf*).
#
# ## References
#
# - J. Dean et al.: Large scale distributed deep networks (DistBelief). NeurIPS, 2012.
# - M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI, 2014.
# - A. Sergeev, M. Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow. arXiv:1802.05799, 2018.
# - S. Li et al.: PyTorch distributed: experiences on accelerating data parallel training. VLDB 13(12), 2020.
# - E. Alpaydin, C. Kaynak: Optical recognition of handwritten digits. UCI Machine Learning Repository, 1998.
