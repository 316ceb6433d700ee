# %% [markdown] tags=["two-hours", "half-day"]
# # 04 Data parallelism
#
# Two hours; twenty-five minutes in the two-hour workshop. You train one small net on handwritten digits in the ways that
# the field uses or used most: with a parameter server, with averaged gradients, with Horovod, with torch's DDP, with a config.
# The result is the same to the last few bits; what differs is who sends what, and when.
#
# **Questions.** How do ranks train one model together? Why did parameter servers give way to all-reduce? What do hooks and
# buckets buy? What changes in a script when it goes from one process to many?
#
# **Afterwards you can** predict the bytes of a step; average gradients by hand and prove it right; turn a serial script
# into a Horovod or DDP script; read a timeline and choose a bucket size; write a config and read its errors.
#
# **You need** [03 Collectives](03_collectives.ipynb): send, recv, the ring.

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% tags=["two-hours", "half-day"]
import difflib


from dtlib import Timeline
from dtlib.lab import emulated
from dtlib.parallel.data import plain
from dtlib.theory import collectives

# %% tags=["two-hours", "half-day"]
# %%px
import io
import time

import dtlib
import torch
from torch.nn.functional import cross_entropy

from dtlib.lab import digits

world = dtlib.init()
comm = world.comm

# %% [markdown] tags=["two-hours", "half-day"]
# ## One step, many ranks
#
# A step of training takes a batch, computes the gradient of the mean loss, and moves the weights. The mean is what can be shared
# out: give every rank a slice of the batch, and the gradient of the whole is the mean of the gradients of the slices, if
# the slices are equally large. **That is data parallelism: every rank has the whole model and a slice of the batch.** Only
# gradients travel.
#
# The net reads 64 pixels and tells ten digits apart. In float64, so that a mistake cannot hide behind rounding.

# %% tags=["two-hours", "half-day"]
# %%px
(x, y), test = digits.load(torch.float64)
BATCH, RATE = 96, 0.2
batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


def fresh_net(seed=0):
    torch.manual_seed(seed)
    return digits.net(dtype=torch.float64)


parameters = sum(p.numel() for p in fresh_net().parameters())
if world.rank == 0:
    print(f"{len(x)} images, {len(batches)} batches of {BATCH}; {parameters} parameters")

# %% [markdown] tags=["two-hours", "half-day"]
# ## The parameter server
#
# The first large systems had a *server* that keeps the weights (DistBelief, 2012). Workers pull them, compute a gradient
# from their slice of the batch, and push it; the server takes the step. Rank 0 serves, the other three work:

# %% tags=["two-hours", "half-day"]
# %%px
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def serve(weights, steps):
    workers = range(1, comm.size)
    for _ in range(steps):
        for worker in workers:
            comm.send(weights, worker)  # they pull
        gradients = [comm.recv(torch.empty_like(weights), worker) for worker in workers]
        weights -= RATE * sum(gradients) / len(workers)


def work(net, weights, batches):
    for x, y in batches:
        vector_to_parameters(comm.recv(weights, 0), net.parameters())
        mine = slice(world.rank - 1, None, comm.size - 1)  # every third image
        loss = cross_entropy(net(x[mine]), y[mine])
        gradient = torch.autograd.grad(loss, list(net.parameters()))
        comm.send(parameters_to_vector(gradient), 0)  # push

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** The weights are as many bytes as the cell below says. How many bytes does rank 0 *send* in one step? How many does
# it *receive*?

# %% tags=["two-hours", "half-day"]
size_of_weights = 8 * lab.values("parameters")[0]
print(f"{size_of_weights:,} bytes of weights, and as many of gradients")

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("bytes-of-the-server", {"sent": None, "received": None})

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("bytes-of-the-server", {"sent": 115_440, "received": 115_440})

# %% tags=["two-hours", "half-day"]
# %%px
net = fresh_net()
weights = parameters_to_vector(net.parameters()).detach().clone()
with dtlib.trace() as trace:
    serve(weights, steps=5) if world.rank == 0 else work(net, weights, batches[:5])
with dtlib.trace() as ring:
    comm.all_reduce(torch.ones_like(weights), algorithm="ring")
sent_bytes = trace.sent()[1] // 5, ring.sent()[1]  # a step

# %% [markdown] tags=["two-hours", "half-day"]
# A worker sends its gradient once; the server sends and receives for all. Without a server, every rank has the weights,
# and a ring all-reduce adds up the gradients. Who is busiest?

# %% tags=["two-hours", "half-day"]
sent_with_server, sent_with_ring = zip(*lab.values("sent_bytes"), strict=True)
sent_by = zip(range(4), sent_with_server, sent_with_ring, strict=True)
lab.table(sent_by, ("rank", "sent, server", "sent, ring"))
count = size_of_weights // 8
assert sent_with_server[0] == 3 * size_of_weights
assert sent_with_ring[0] == 8 * collectives.elements_sent("all_reduce", "ring", 4, 0, count)
print(f"The busiest sends {sent_with_server[0] / max(sent_with_ring):.1f} times as much.")

# %% [markdown] tags=["two-hours", "half-day"]
# With more ranks the gap opens: the server sends P bytes to each of N - 1 workers, and receives as many; a rank of the ring
# sends 2P(N-1)/N, hardly more on a thousand ranks than on ten. Formulas, for this net:

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
ranks = [2, 4, 8, 16, 64, 256]
lab.pictures.lines(
    {
        "parameter server": {n: (n - 1) * size_of_weights / 1e6 for n in ranks},
        "ring": {n: 2 * (n - 1) / n * size_of_weights / 1e6 for n in ranks},
    },
    xlabel="ranks", ylabel="MB sent by the busiest rank", title="One step, by formula",
)

# %% [markdown] tags=["half-day"]
# Many servers, each with a shard of the weights, share the load; with as many servers as workers the bytes are those of
# the ring. What a server can do and an all-reduce cannot: let workers go on with weights that are out of date.

# %% [markdown] tags=["two-hours", "half-day"]
# ## The plain core: averaging
#
# Without a server the loop is the serial one with one line more. We read the file that runs, from top to bottom; it
# begins with what it is about to do:

# %% tags=["half-day"]
lab.read(plain)

# %% [markdown] tags=["two-hours", "half-day"]
# The first of its three classes. All ranks begin with rank 0's parameters and buffers. (`Contract` refuses what the class
# does not do, such as slices of different sizes; buffers are the running means of a batch normalisation.)

# %% tags=["two-hours", "half-day"]
lab.read(plain.DataParallelNaive)

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** We start every rank with *other* weights (the seed is its rank) and train. How far apart are the ranks
# at the end? And how far from one process that trains on whole batches?

# %% tags=["two-hours", "half-day"]
# %%px
EVERY_FOURTH = slice(world.rank, None, comm.size)


def train(model, average=lambda: None, mine=EVERY_FOURTH, rate=RATE, momentum=0.9, steps=15):
    """So many steps on this rank's slice of each batch; returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    losses = []
    for x, y in batches[:steps]:
        optimizer.zero_grad()
        loss = cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        average()
        optimizer.step()
        losses.append(loss.detach())
    return comm.all_reduce(torch.stack(losses), op="mean")


def distance(one, other):
    """The largest difference between two models' parameters."""
    one, other = (parameters_to_vector(model.parameters()).detach() for model in (one, other))
    return (one - other).abs().max().item()

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive

model = DataParallelNaive(fresh_net(seed=world.rank), comm)
losses = train(model, model.average_gradients)
alone, alone_as_server = fresh_net(seed=0), fresh_net(seed=0)  # the control: whole batches
_ = train(alone, mine=slice(None))
_ = train(alone_as_server, mine=slice(None), momentum=0, steps=5)

# %% tags=["two-hours", "half-day"]
# %%px
mine = parameters_to_vector(model.parameters()).detach()
assert (mine == comm.broadcast(mine.clone())).all()
assert distance(model, alone) < 1e-12
if world.rank == 0:
    vector_to_parameters(weights, net.parameters())  # those of the parameter server
    assert distance(net, alone_as_server) < 1e-12
if world.rank == 0:
    print("From rank to rank: equal to the last bit. From one process: less than 1e-12.")
    print(f"After one epoch {digits.accuracy(model, test):.0%} of the test images are right.")

# %% [markdown] tags=["two-hours", "half-day"]
# Not zero, because a sum of four partial sums rounds otherwise than one long sum. That is the whole difference: **data
# parallelism changes no mathematics.** The parameter server passes the same test.
#
# **Change a line.** Below, the last line of the class says "sum" instead of "mean", and plain SGD takes a step. Which
# learning rate would one process need to do the same? (0.2 is ours, on four ranks.)

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("same-as-rate", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("same-as-rate", 0.8)

# %% tags=["two-hours", "half-day"]
# %%px
class Summed(DataParallelNaive):
    def average_gradients(self):
        for parameter in self.trained:
            self.comm.all_reduce(parameter.grad, op="sum")


def one_step(rate):
    """In one process."""
    alone = fresh_net()
    train(alone, mine=slice(None), rate=rate, steps=1)
    return alone


summed = Summed(fresh_net(), comm)
train(summed, summed.average_gradients, steps=1)
gaps = {rate: distance(summed, one_step(rate)) for rate in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)}
assert min(gaps.values()) < 1e-12

# %% [markdown] tags=["half-day"]
# So a forgotten division is a learning rate N times too large: it may even train, and worse with every rank you add.

# %% [markdown] tags=["half-day"]
# ## Horovod: six steps
#
# Horovod (2018) made the ring all-reduce popular: its users took a serial script and changed six things. Here is a serial
# script, as text, so that we can see what changes.

# %% tags=["half-day"]
SERIAL = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
from dtlib.lab import digits

torch.manual_seed(0)
train_set = TensorDataset(*digits.load()[0])
loader = DataLoader(train_set, batch_size)

net = digits.net()
optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

torch.save(net.state_dict(), file)
"""

# %% tags=["half-day"]
HOROVOD = """\
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from dtlib.lab import digits
import dtlib.horovod as hvd  # with Horovod: import horovod.torch as hvd

hvd.init()  # 1. which rank am I?
# 2. On GPUs, one for each process: torch.cuda.set_device(hvd.local_rank())
torch.manual_seed(0)
train_set = TensorDataset(*digits.load()[0])
# 3. Each rank has its own images. (If it shuffles: sampler.set_epoch(epoch) in the loop.)
sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), shuffle=False)
loader = DataLoader(train_set, batch_size, sampler=sampler)

net = digits.net()
# 4. The batch of all ranks is hvd.size() times as large, and so is the rate.
optimizer = torch.optim.SGD(net.parameters(), lr=rate * hvd.size(), momentum=0.9)
# 5. Hooks start to average gradients in the backward pass; its step() waits for them first.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
# 6. All begin as rank 0 does.
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

if hvd.rank() == 0:  # 7. One rank writes.
    torch.save(net.state_dict(), file)
"""

# %% tags=["half-day"]
before, after = SERIAL.splitlines(), HOROVOD.splitlines()
changes = difflib.unified_diff(before, after, "serial", "horovod", n=2, lineterm="")
print("\n".join(changes))
lab.push(scripts={"serial": SERIAL, "horovod": HOROVOD})

# %% [markdown] tags=["half-day"]
# The training loop has not changed. Two things are easily forgotten: the sampler, without which all ranks train on the
# same images, and that `batch_size` is now that of *one* rank. The fourth step is a rule of thumb; lesson 05 has its limits.
# In TensorFlow the same steps are `hvd.init()`, a visible device, `DistributedOptimizer` and `BroadcastGlobalVariablesHook`.
#
# Behind `step()` stand two ideas. *Negotiation*: gradients come in no fixed order, so ranks agree in rounds which of them
# are there on all (`dtlib/horovod/negotiation.py`). *Tensor fusion*: those travel as one buffer (`execution.py` beside it).
#
# **Predict.** The serial script with which batch size and which rate ends at the same weights as this one on four
# ranks with 24 images a rank and rate 0.02? Replace `None`.

# %% tags=["half-day", "stub"]
lab.predict("serial-script", {"batch size": None, "rate": None})

# %% tags=["half-day", "solution"]
lab.predict("serial-script", {"batch size": 96, "rate": 0.08})

# %% tags=["half-day"]
# %%px
def run(script, batch_size, rate):
    """Run a script on this rank; returns its net and the size of the file that it wrote."""
    names = {"batch_size": batch_size, "rate": rate, "file": io.BytesIO()}
    exec(scripts[script], names)
    return names["net"], names["file"].tell()


distributed, written = run("horovod", batch_size=24, rate=0.02)
right = run("serial", batch_size=comm.size * 24, rate=comm.size * 0.02)[0]
assert distance(distributed, right) < 1e-5  # float32
print(f"{digits.accuracy(distributed.double(), test):.0%} right; wrote a file: {written > 0}")

# %% [markdown]
# ## The TensorFlow template
#
# You will still meet this template of TensorFlow 1. It is shown as text: TensorFlow 2 keeps most of these names under
# `tf.compat.v1`, for old code alone.

# %%
TEMPLATE = """\
1  cluster = tf.train.ClusterSpec({"ps": ps_hosts, "worker": worker_hosts})
2  server = tf.train.Server(cluster, job_name=job_name, task_index=task_index)
   if job_name == "ps":
       server.join()
3  with tf.device(tf.train.replica_device_setter(
           worker_device=f"/job:worker/task:{task_index}", cluster=cluster)):
       loss = ...
       optimizer = tf.train.SyncReplicasOptimizer(
           tf.train.GradientDescentOptimizer(rate), replicas_to_aggregate=workers)
       step = tf.train.get_or_create_global_step()
       train = optimizer.minimize(loss, global_step=step)
4  with tf.train.MonitoredTrainingSession(
           master=server.target, is_chief=(task_index == 0), hooks=hooks) as session:
       while not session.should_stop():
           session.run(train)
"""
print(TEMPLATE)

# %% [markdown]
# | | TensorFlow 1 | what it is for | here |
# |---|---|---|---|
# | 1 | `ClusterSpec` | who takes part, with hosts and ports | `lab.engines(4)`, `mpiexec -n 4`: the launcher knows |
# | 2 | `Server(...)`, `job_name`, `task_index` | one process's place in it | `world = dtlib.init()`, `world.rank` |
# | | `if job_name == "ps": server.join()` | servers only serve | `serve(weights, steps)` on rank 0, above |
# | 3 | `replica_device_setter` | variables to the servers in turn, the rest to this worker | not needed: every rank has the model |
# | | `SyncReplicasOptimizer` | wait for all workers and average | `average_gradients()` |
# | | `global_step` | a counter that all share | every rank counts alike |
# | 4 | `MonitoredTrainingSession` | the chief initialises and saves, others wait for it | the broadcast at construction; `if world.rank == 0:` |
# | | `session.run(train)` | a step | `backward()`, `step()` |
#
# **Your turn.** Without `SyncReplicasOptimizer` each worker's gradient is applied when it arrives. Which property of
# data parallelism, tested above, is lost? (The result then depends on who comes first, and equals no run of one process.)

# %% [markdown] tags=["two-hours", "half-day"]
# ## Hooks and buckets
#
# `DataParallelNaive` wastes twice. One small message for each parameter pays latency again and again; and the network
# sleeps while the backward pass computes, then the processor while gradients travel.
#
# Both have a cure. autograd calls a *hook* as soon as a parameter's gradient is there. **Predict:** which layer's come
# first, those of the first layer (0) or of the last (2)?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("first-layer-to-come", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("first-layer-to-come", 2)

# %% tags=["two-hours", "half-day"]
# %%px
net, came = fresh_net(), []
for name, parameter in net.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
cross_entropy(net(x), y).backward()
layers = [int(name[0]) for name in came]
if world.rank == 0:
    print("layers in order of their gradients:", *layers)

# %% [markdown] tags=["half-day"]
# The second class: each gradient leaves from its hook.

# %% tags=["half-day"]
lab.read(plain.DataParallelHooks)

# %% [markdown] tags=["half-day"]
# Why `while`, and not `if`? autograd may call hooks in another order on another rank, and **all ranks must send in the
# same order**: what has come early waits for those before it. The third class: neighbours travel together.

# %% tags=["half-day"]
lab.read(plain.DataParallelBuckets)

# %% [markdown] tags=["half-day"]
# Here `flat` is where the work is: gradients are views into the message, so nothing is copied back. All three classes run
# the same epoch. **Discuss** before you run: the net has two layers with weight and bias. How many messages a step?

# %% tags=["half-day"]
# %%px
MIB = digits.net(dtype=torch.float64)[0].weight.nbytes / 2**20  # the first weight fills a bucket
cases = {
    "DataParallelNaive": DataParallelNaive(fresh_net(seed=world.rank), comm),
    "DataParallelHooks": DataParallelHooks(fresh_net(seed=world.rank), comm),
    "DataParallelBuckets": DataParallelBuckets(fresh_net(seed=world.rank), comm, MIB),
}
rows = []
for name, model in cases.items():
    average = model.average_gradients if name == "DataParallelNaive" else lambda: None
    with dtlib.trace() as trace:
        train(model, average)
    calls = [e for e in trace.events if e.name == "all_reduce" and e.kind == "operation"]
    off = distance(model, alone)
    assert off < 1e-12
    rows.append((name, (len(calls) - 1) // 15, "less than 1e-12"))  # one for the losses

# %% tags=["half-day"]
headers = ("", "all_reduces a step", "off from one process")
lab.table(lab.values("rows")[0], headers)

# %% [markdown] tags=["half-day"]
# With rings the bytes are the same, however they are divided: 2P(N-1)/N for P bytes of gradients.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Overlap, seen
#
# It helps to send while the backward pass computes only if somebody else computes. Here the core that sends is the core
# that computes; on a GPU cluster the accelerator computes, the network card sends, and the core is idle. So we emulate
# both: layers whose backward pass *sleeps*, and a slow network. **All that follows up to "DDP" is EMULATED.**

# %% tags=["two-hours", "half-day"]
lab.read(emulated.SleepingLayer)

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib.lab.emulated import EmulatedAccelerator
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets

slow = comm.emulate_network(latency=0.002, bandwidth=100e6)  # 2 ms a message, 100 MB/s


def emulated_step(kind, layers=6, count=2**17, **settings):
    """A backward pass of six layers of 0.5 MiB, a bucket each; its trace."""
    net = EmulatedAccelerator(layers, count, seconds=0.05)
    model = kind(net, slow, bucket_cap_mb=0.5, **settings)
    loss = model(torch.zeros(1, requires_grad=True)).sum()
    comm.barrier()
    with dtlib.trace() as trace:
        loss.backward()
    assert all((p.grad == 1).all() for p in net.parameters())
    return trace


inline = emulated_step(DataParallelBuckets)

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
lab.pictures.timeline("inline")

# %% [markdown] tags=["half-day"]
# The plain class moves messages on in its hooks (`advance_all`), between two layers. While a layer sleeps, nothing moves.
#
# **Change a line.** The buckets in the order of the forward pass, first layer first. The result is the same. When does the
# first bucket leave?

# %% tags=["half-day"]
# %%px
class FirstLayerFirst(DataParallelBuckets):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.buckets.reverse()


turned = emulated_step(FirstLayerFirst)

# %% tags=["half-day", "nbval-ignore-output"]
lab.pictures.timeline("turned")
mine = [event for event in Timeline(lab.values("turned")).events if event.rank == 0]
last = max(event.start for event in mine if event.kind == "phase")  # the first layer's
assert all(event.start > last for event in mine if event.name == "all_reduce")

# %% [markdown] tags=["two-hours", "half-day"]
# The full class, `DataParallel`, has a thread that looks after messages while the core is idle (`progress="thread"`).
#
# **Predict** before you run: of six buckets, how many can be hidden behind the backward pass?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("hidden-buckets", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("hidden-buckets", 5)

# %% tags=["two-hours", "half-day"]
# %%px
thread = emulated_step(DataParallel, progress="thread")

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
lab.pictures.timeline("thread")
with_hooks, with_thread = (Timeline(lab.values(name)) for name in ("inline", "thread"))
print(f"EMULATED: thread over inline {with_thread.end / with_hooks.end:.2f}")
assert with_thread.end < with_hooks.end

# %% [markdown] tags=["half-day"]
# Where the core computes, a thread takes from the computation what it gives to the messages: `DataParallel` chooses inline
# for the CPU. What else it adds stands at the end of the plain file:

# %% tags=["half-day"]
lab.read_end(plain)

# %% [markdown] tags=["half-day"]
# ## How large is a bucket?
#
# Small buckets travel early, and pay the latency of a ring each time. One bucket for everything pays it once, and starts
# when the backward pass is over. **Predict** the shape of the curve, then run. (EMULATED; sixteen layers of 0.25 MiB.)

# %% tags=["half-day"]
# %%px
seconds = {}
for size in (0.25, 0.5, 1, 2, 4):  # MiB
    net = EmulatedAccelerator(layers=16, count=2**16, seconds=0.008)
    model = DataParallel(net, slow, size, progress="thread", algorithm="ring")
    took = []
    for _ in range(4):
        loss = model(torch.zeros(1, requires_grad=True)).sum()
        comm.barrier()
        began = time.perf_counter()
        loss.backward()
        took.append(time.perf_counter() - began)
    seconds[size] = max(comm.all_gather_object(min(took)))

# %% tags=["half-day", "nbval-ignore-output"]
seconds = lab.values("seconds")[0]
largest = seconds[max(seconds)]
lab.pictures.lines(
    {"backward": {size: took / largest for size, took in seconds.items()}},
    xlabel="bucket size in MiB", ylabel="time, one bucket = 1", log="x",
    title="EMULATED accelerator and network",
)
best = min(seconds, key=seconds.get)
print(f"Best of these: {best:g} MiB.")
assert min(seconds) < best < max(seconds)

# %% [markdown] tags=["half-day"]
# The best size depends on latency, bandwidth and the time of the backward pass: measure on your own machine. torch's
# and our default, 25 MiB, was chosen for networks of data centres.
#
# **Your turn.** Set `latency=0.0001` where `slow` is made. Which way does the best size move, and why? (To the left.)

# %% [markdown] tags=["two-hours", "half-day"]
# ## DDP
#
# torch's `DistributedDataParallel` is the production form of the same idea: hooks, buckets, an all-reduce behind the
# backward pass.

# %% [markdown] tags=["half-day"]
# The model's line differs, and around it what Horovod's script has too: process group, sampler, launcher. DDP sends through a *backend*: NCCL on GPUs, gloo on the CPU, and here dtlib's, which is our
# collectives. So torch's own class runs on these ranks, can be stopped, and shows its timeline below ours (EMULATED, as
# above). The losses are equal to 1e-12.

# %% tags=["half-day"]
# %%px
import dtlib.backend
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtlib.comm import progress_thread

if dist.is_initialized():
    dist.destroy_process_group()  # of an earlier run
dist.init_process_group("dtlib")  # on GPUs: "nccl"
ours = train(DataParallel(fresh_net(seed=world.rank), comm))
theirs = train(DistributedDataParallel(fresh_net(seed=world.rank)))
assert (ours - theirs).abs().max() < 1e-12
if world.rank == 0:
    for step in (0, 1, 7, 14):
        print(f"loss at step {step:>2}: ours {ours[step]:.6f}, DDP {theirs[step]:.6f}")


def ddp_after_a_step(net, _, **settings):
    """In its first step DDP sends one bucket, and learns in which order gradients come."""
    model = DistributedDataParallel(net, **settings)
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    model.zero_grad()
    return model


dtlib.backend.emulate_network(latency=0.002, bandwidth=100e6)  # as in `slow`
with progress_thread():
    ddp = emulated_step(ddp_after_a_step)
dist.destroy_process_group()

# %% tags=["half-day", "nbval-ignore-output"]
lab.pictures.timeline("thread")
lab.pictures.timeline("ddp")
operations = [e.name for e in lab.values("ddp")[0].events if e.kind == "operation"]
assert operations == ["all_reduce"] * 6

# %% [markdown] tags=["two-hours", "half-day"]
# ## From a config
#
# Large projects keep such choices in a file. `dtlib.initialize` reads DeepSpeed's keys, and returns an engine that wraps model,
# optimizer and data; `runtime="torch"` runs the same engine on DDP. The net has a parameter to spare that no step uses, as real
# models do: both runtimes must cope with it.

# %% tags=["two-hours", "half-day"]
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
    net.register_parameter("spare", torch.nn.Parameter(torch.zeros(1).double()))  # never used
    engine, *_ = dtlib.initialize(net, config, training_data=training_data, runtime=runtime)
    losses[runtime] = [engine.train_batch().item() for _ in range(20)]

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** `gradient_accumulation_steps` is missing. What must it be, on four ranks?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("accumulation-steps", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("accumulation-steps", 2)

# %% tags=["two-hours", "half-day"]
# %%px
steps = engine.gradient_accumulation_steps()
assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-12
if world.rank == 0:
    for step in (0, 9, 19):
        values = [f"{name} {some[step]:.6f}" for name, some in losses.items()]
        print(f"loss at step {step:>2}:", *values)

# %% [markdown] tags=["two-hours", "half-day"]
# A mistake in a config should cost a sentence, not a night:

# %% tags=["two-hours", "half-day"]
# %%px
wrong = {**config, "train_batch_size": 100}
try:
    dtlib.initialize(model=fresh_net(), config=wrong)
except dtlib.DtlibError as error:
    if world.rank == 0:
        print(error)

# %% [markdown] tags=["half-day"]
# ## Odd batches
#
# **Accumulation.** If a batch does not fit into memory, add up the gradients of several backward passes. Averaging each of them
# would be waste: inside `no_sync()` gradients stay on the rank, and the first backward pass after it averages them all.

# %% tags=["half-day"]
# %%px
model = DataParallel(fresh_net(), comm)
pieces = [(x[i :: 4 * comm.size], y[i :: 4 * comm.size]) for i in range(world.rank, 16, comm.size)]
with dtlib.trace() as trace:
    with model.no_sync():
        for images, labels in pieces[:-1]:
            (cross_entropy(model(images), labels) / len(pieces)).backward()
    images, labels = pieces[-1]
    (cross_entropy(model(images), labels) / len(pieces)).backward()
calls = sum(event.name == "all_reduce" and event.kind == "operation" for event in trace.events)
if world.rank == 0:
    print(f"{len(pieces)} backward passes, {calls} all_reduce")

# %% [markdown] tags=["half-day"]
# **Uneven batches.** The mean of means is the mean over all images only if the slices are equally large. At the end of an epoch they
# often are not. Here rank r has r + 1 images. Tell the model, and it weights:

# %% tags=["half-day"]
# %%px
def gradient_of(model, images, labels):
    cross_entropy(model(images), labels).backward()
    return parameters_to_vector([p.grad for p in model.parameters()])


first = sum(range(world.rank + 1))  # rank 0 has image 0; rank 1 has 1 and 2; ...
mine = slice(first, first + world.rank + 1)
whole = gradient_of(fresh_net(), x[:10], y[:10])
unweighted, weighted = DataParallel(fresh_net(), comm), DataParallel(fresh_net(), comm)
weighted.batch_size = world.rank + 1
off = [(gradient_of(m, x[mine], y[mine]) - whole).norm() for m in (unweighted, weighted)]
assert off[0] > 0.1 * whole.norm() and off[1] < 1e-12
if world.rank == 0:
    print(f"unweighted: off by {off[0] / whole.norm():.0%}; weighted: less than 1e-12")

# %% [markdown] tags=["half-day"]
# **Uneven numbers of batches.** A rank that has a batch more than the others waits for them for ever. Inside `join()` those
# that are finished take part with zeros until all are. Rank r has r + 1 batches:

# %% tags=["half-day"]
# %%px
model = DataParallel(fresh_net(), comm)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
with model.join():
    for images, labels in batches[: world.rank + 1]:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
ends = comm.all_gather_object(parameters_to_vector(model.parameters()).sum().item())
assert len(set(ends)) == 1
print(f"{world.rank + 1} steps here; all ranks end with the same weights.")

# %% [markdown] tags=["two-hours", "half-day"]
# ## What holds on GPUs, and what does not
#
# Seen here, and true there: values, messages and bytes, the order of buckets, what a missing division does, why a ring
# beats one server, and that communication can hide behind the backward pass.
#
# Not shown here: speed. These nets are tiny, all ranks share one machine, and overlap was emulated. On GPUs use DDP with
# NCCL or the production engine: their all-reduce runs on the GPU itself and knows the wires. Speed here is measured in
# `python -m benchmarks data-parallel`, as a ratio in one run.
#
# ## Summary
#
# - Every rank has the model and a slice of the batch; the mean of the gradients is the gradient of the whole. It equals one process
#   up to rounding; test that.
# - A server sends N - 1 times the model; a ring sends less than twice the model from each rank, whatever N is.
# - Broadcast parameters *and* buffers at the start; weight uneven batches; shard the data.
# - Buckets spare latency, hooks start them early, and overlap pays where the core that sends is not the one that computes.
# - Horovod: seven changes; DDP: the model's line, the process group, sampler and launcher; a config: none in the loop.
#
# Now the [exercises](../exercises/04_data_parallel_exercises.ipynb): mend a hook, build buckets, and play byte golf.
#
# ## References
#
# - J. Dean et al.: Large scale distributed deep networks (DistBelief). NIPS, 2012.
# - M. Li et al.: Scaling distributed machine learning with the parameter server. OSDI, 2014.
# - A. Sergeev, M. Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow. arXiv:1802.05799, 2018.
# - S. Li et al.: PyTorch distributed: experiences on accelerating data parallel training. VLDB 13(12), 2020.
# - M. Abadi et al.: TensorFlow: a system for large-scale machine learning. OSDI, 2016.
# - S. Rajbhandari et al.: ZeRO: memory optimizations toward training trillion parameter models. SC, 2020.
# - E. Alpaydin, C. Kaynak: Optical recognition of handwritten digits. UCI Machine Learning Repository, 1998.
