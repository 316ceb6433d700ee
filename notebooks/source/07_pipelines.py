# %% [markdown] tags=["two-hours", "half-day"]
# # 07 Pipelines
#
# Two hours; twenty minutes in the two-hour workshop. You cut a model between its layers and put the stages on different
# ranks. At first all ranks but one wait; you cut the batch too, and count what is still lost. A schedule becomes a
# list, which you draw, prove free of deadlock, time without ranks, and run on ranks.
#
# **Questions.** What do you do with a model that does not fit, and ranks that wait for each other? How much time does
# a pipeline lose? How many activations does it keep? Which order of work is best, and when is the formula wrong?
#
# **Afterwards you can** cut a model into stages and train it, with the same numbers as one process; compute a
# pipeline's bubble and memory, and say what the bubble is a fraction of; read a schedule's picture; choose among GPipe,
# 1F1B, interleaved 1F1B and ZB-H1.
#
# **You need** [03 Collectives](03_collectives.ipynb) (send, recv) and the beginning of [04 Data
# parallelism](04_data_parallel.ipynb).

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% tags=["two-hours", "half-day"]
import csv
from pathlib import Path


from dtlib import Timeline
from dtlib import schedule as schedules
from dtlib.lab import explorer
from dtlib.lab.lessons.l07 import figures
from dtlib.parallel.pipeline import plain
from dtlib.schedule import ScheduleError, draw, formulas, gpipe, one_f_one_b, parse, simulate

# %% tags=["two-hours", "half-day"]
# %%px
import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dtlib.lab import digits
from dtlib.lab.explorer import EmulatedStage
from dtlib.parallel.pipeline import plain

world = dtlib.init()
comm = world.comm
(x, y), test = digits.load(torch.float64)

# %% [markdown] tags=["two-hours", "half-day"]
# ## A model that does not fit
#
# Data parallelism (lesson 04) does not help: each rank holds the whole model. Here is ours, as a list of layers. A
# `LayerSpec` is a layer that is built later, on the rank that gets it. `PipelineModule` cuts the list, and builds only
# this rank's stage:

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib.parallel.pipeline import LayerSpec, Linear, PipelineModule


def layers(width=96):
    """Nine layers: 64 pixels in, scores of ten digits out."""
    specs = []
    for inputs in (64, width, width, width):
        specs += [LayerSpec(Linear, inputs, width), LayerSpec(nn.Tanh)]
    return [*specs, LayerSpec(Linear, width, 10)]


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


alone = PipelineModule(layers(), 1, comm=comm.split(world.rank))  # all layers, on every rank
module = PipelineModule(layers(), num_stages=4)
held = (" ".join(module.layers), count(module), count(alone))

# %% tags=["two-hours", "half-day"]
rows = [(rank, *held) for rank, held in enumerate(lab.values("held"))]
lab.table(rows, ("rank", "its layers", "its parameters", "in data parallelism"), align="rlrr")

# %% [markdown] tags=["half-day"]
# ## Two branches
#
# The simplest case first. A net has two branches that do not need each other: one reads the upper half of an image, the
# other the lower half, and a head joins them. Frameworks place such operations on two devices by hand, as in
# TensorFlow's `with tf.device("/gpu:1"):`, and run at the same time what does not wait for anything. Here each branch
# gets a rank. (Ranks 0 and 1 are a pair. Ranks 2 and 3 do the same.)
#
# Two cores cannot compute four things at once. So where time is shown, a module's values are real and its time is
# **EMULATED**: `EmulatedStage` computes, then sleeps, as a core does that waits for its accelerator.

# %% tags=["half-day"]
# %%px
pair = comm.split(world.rank // 2)


def block_of(seed, *sizes, seconds=0.05):
    """A linear layer and tanh. EMULATED: forward takes so long, and backward twice as long."""
    torch.manual_seed(seed)
    return EmulatedStage(nn.Sequential(nn.Linear(*sizes), nn.Tanh()).double(), seconds, 2 * seconds)


class Branches(nn.Module):
    """A branch on each of two ranks; rank 0 joins them."""

    def __init__(self):
        super().__init__()
        self.branch = block_of(pair.rank, 32, 48)
        self.head = block_of(7, 96, 10) if pair.rank == 0 else None

    def forward(self, images):
        with dtlib.phase("branch"):
            self.mine = self.branch(images[:, 32 * pair.rank :][:, :32])
        if pair.rank == 1:
            return pair.send(self.mine.detach(), 0)
        self.others = pair.recv(torch.empty_like(self.mine), 1).requires_grad_()
        with dtlib.phase("head"):
            return self.head(torch.cat([self.mine, self.others], dim=1))

# %% [markdown] tags=["half-day"]
# autograd ends where the message begins, so the backward pass crosses by hand: rank 0 sends back the gradient of what it
# received, and rank 1 goes on from there.

# %% tags=["half-day"]
# %%px
def backward(self, loss=None):
    if pair.rank == 0:
        with dtlib.phase("backward"):
            loss.backward()
        return pair.send(self.others.grad, 1)
    gradient = pair.recv(torch.empty_like(self.mine), 0)
    with dtlib.phase("backward"):
        self.mine.backward(gradient)


Branches.backward = backward
net = Branches()
for _ in range(2):  # the first step of a process takes longer
    net.zero_grad()
    pair.barrier()
    with dtlib.trace() as trace:
        scores = net(x[:96])
        net.backward(cross_entropy(scores, y[:96]) if pair.rank == 0 else None)

upper, lower, head = block_of(0, 32, 48), block_of(1, 32, 48), block_of(7, 96, 10)  # in one process
joined = torch.cat([upper(x[:96, :32]), lower(x[:96, 32:])], dim=1)
cross_entropy(head(joined), y[:96]).backward()
branch = (upper, lower)[pair.rank]
for ours, theirs in zip(net.branch.parameters(), branch.parameters(), strict=True):
    assert (ours.grad - theirs.grad).abs().max() < 1e-12

# %% tags=["half-day", "nbval-ignore-output"]
timeline = Timeline(lab.values("trace")[:2])
lab.pictures.timeline(timeline)
ends = [event.end for event in timeline.events if event.name == "branch"]
begin = next(event.start for event in timeline.events if event.name == "head")
assert len(ends) == 2 and max(ends) <= begin  # the head waits for both branches

# %% [markdown] tags=["half-day"]
# The branches overlap; the head does not. Gradients are those of one process, to 1e-12 (asserted above).

# %% [markdown] tags=["two-hours", "half-day"]
# ## Two devices, one after the other
#
# Most models are no branches but a stack: each layer needs the one before. The classic way to spread it over two
# GPUs is in torch's tutorials:
#
#     class TwoDevices(nn.Module):
#         def __init__(self):
#             super().__init__()
#             self.net1 = nn.Linear(64, 48).to("cuda:0")
#             self.net2 = nn.Linear(48, 10).to("cuda:1")
#
#         def forward(self, x):
#             hidden = torch.tanh(self.net1(x.to("cuda:0")))
#             return self.net2(hidden.to("cuda:1"))
#
# With a rank for each device, `.to()` is a send and a receive, and autograd ends where the message begins: the backward
# pass crosses by hand. The file that runs, plain and whole; it begins with what it is about to do:

# %% tags=["two-hours", "half-day"]
lab.read(plain)
lab.read(plain.order)

# %% [markdown] tags=["half-day"]
# What travels. A header tells the next rank what will come, and receives are posted one ahead:

# %% tags=["half-day"]
lab.read(plain.announce, plain.announced, plain.arriving)

# %% [markdown] tags=["two-hours", "half-day"]
# And a step. Look for the places where ranks talk, and where `detach()` cuts autograd:

# %% tags=["two-hours", "half-day"]
lab.read(plain.step)

# %% [markdown] tags=["two-hours", "half-day"]
# First in its simplest form: two ranks, and the batch in one piece. Time is **EMULATED**: `EmulatedStage` computes real
# values, then sleeps, as a core does that waits for its accelerator.

# %% tags=["two-hours", "half-day"]
# %%px
def emulated_step(comm, step, microbatches, schedule="gpipe"):
    """A step's trace. EMULATED: 160 ms forward a rank, 320 backward; a micro-batch its fraction."""
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    layer = nn.Linear(64 if first else 32, 32).double()
    stage = EmulatedStage(layer, 0.16 / microbatches, 0.32 / microbatches)
    batch = x[:96] if first else None, y[:96] if last else None
    for _ in range(2):  # the first step of a process takes longer
        comm.barrier()
        with dtlib.trace() as trace:
            step(comm, stage, *batch, cross_entropy, microbatches, schedule)
    return trace


one_piece = emulated_step(comm.split(world.rank // 2), plain.step, microbatches=1)
eight = emulated_step(comm, plain.step, microbatches=8)  # for later

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** What percentage of the time does each of the two ranks compute?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("percentage-of-two", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("percentage-of-two", 50)

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
def seen(name, ranks=4, microbatches=8):
    """A step that ran, in the form of a simulated one; times in forward passes of a micro-batch."""
    timeline = Timeline(lab.values(name)[:ranks])
    return figures.measured(timeline, unit=0.16 / microbatches)


two = seen("one_piece", ranks=2, microbatches=1)
figures.picture({"two ranks, one piece (EMULATED)": two})

# %% [markdown] tags=["two-hours", "half-day"]
# **Two devices, and at every moment one of them waits.** The model fits now, and not a second is won. With four ranks
# each would compute a quarter of the time.
#
# ## Micro-batches
#
# GPipe (Y. Huang et al., 2019) cuts the batch, too: while rank 1 works on one micro-batch, rank 0 works on the next.
# All forward passes, then all backward passes, then one optimizer step; the gradients add up to those of the whole
# batch. Its picture is the best-known one of the field. Here it is data: a list of actions for each rank. `2F1` is
# stage 2, forward, micro-batch 1.

# %% tags=["two-hours", "half-day"]
schedule = gpipe(4, 4)  # ranks, micro-batches
for rank, actions in enumerate(schedule):
    print(f"rank {rank} ", *actions)
print()
print(draw(schedule))  # a backward pass takes twice as long as a forward pass

# %% [markdown] tags=["two-hours", "half-day"]
# `..` is time in which a rank is idle: the *bubble*. Nothing ran: each action starts as soon as its rank is free and
# what it needs is there.
#
# The bubble goes by two figures. Say which one you mean. With p ranks and m micro-batches, GPipe has
#
# - idle time / **makespan** (how long the step takes): (p-1) / (m+p-1), the fraction that is lost;
# - idle time / **ideal time** (what it would take if nobody waited): (p-1) / m, how much longer it takes.
#
# **Predict.** 4 ranks and 8 micro-batches. What percentage of the makespan is lost?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("percentage-lost", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("percentage-lost", 27.3)

# %% tags=["two-hours", "half-day"]
rows = []
for m in (1, 2, 4, 8, 16, 32):
    found = simulate(gpipe(4, m))
    bubbles = f"{found.bubble:.1%}", f"{found.idle_over_ideal:.1%}"
    rows.append((m, *bubbles, found.peak_activations[0]))
    assert abs(found.bubble - 3 / (m + 3)) < 1e-12 and abs(found.idle_over_ideal - 3 / m) < 1e-12
headers = ("micro-batches", "idle / makespan", "idle / ideal", "activations that rank 0 holds")
lab.table(rows, headers)

# %% [markdown] tags=["two-hours", "half-day"]
# More micro-batches, less bubble. Why not a thousand? Smaller ones keep an accelerator less busy, and with GPipe a rank
# keeps the activations of all of them (last column). Of both later.
#
# Now the plain core, on four ranks with eight micro-batches (EMULATED stages, real messages). What ran has the same form
# as what was simulated, so the same code draws it:

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
panels = {"GPipe, simulated": simulate(gpipe(4, 8)), "plain, measured (EMULATED)": seen("eight")}
figures.picture(panels)
assert seen("eight").makespan > simulate(gpipe(4, 8)).makespan  # no sleep is too short

# %% [markdown] tags=["two-hours", "half-day"]
# The pattern is the simulated one. What is measured on top is overhead: messages, and four ranks that share cores.

# %% [markdown] tags=["half-day"]
# **Change a line.** In `order`, 1F1B does `ranks - 1 - rank` forward passes ahead. Below nobody does any. The gradients
# stay the same. **Predict:** what percentage of the time does a rank compute?

# %% tags=["half-day", "stub"]
lab.predict("percentage-with-nobody-ahead", None)

# %% tags=["half-day", "solution"]
lab.predict("percentage-with-nobody-ahead", 25)

# %% tags=["half-day"]
# %%px
import inspect

line = '"1f1b": min(ranks - 1 - rank, microbatches)'
source = inspect.getsource(plain)
assert source.count(line) == 1
changed = {}
exec(source.replace(line, '"1f1b": 0'), changed)
as_it_is = emulated_step(comm, plain.step, 8, "1f1b")
changed_line = emulated_step(comm, changed["step"], 8, "1f1b")

# %% tags=["half-day", "nbval-ignore-output"]
ran = {"1F1B": seen("as_it_is"), "nobody ahead": seen("changed_line")}
figures.picture({f"{name} (EMULATED)": found for name, found in ran.items()})

# %% [markdown] tags=["half-day"]
# ## Will it hang?
#
# A schedule is a list, so a wrong one can be written down: each rank's order looks reasonable, and all wait forever.
# `validate` finds out without ranks: is every action there, does each come after what it needs, do ranks wait in a
# circle? **Predict:** which of these two orders for 2 ranks hangs?

# %% tags=["half-day"]
orders = {
    "A": ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"],
    "B": ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
}

# %% tags=["half-day", "stub"]
lab.predict("which-hangs", None)

# %% tags=["half-day", "solution"]
lab.predict("which-hangs", "B")

# %% tags=["half-day"]
for name, ranks in orders.items():
    try:
        schedules.validate([[parse(action) for action in rank.split()] for rank in ranks])
        print(f"{name} can run.")
    except ScheduleError as problem:
        hangs = name
        print(lab.fold(f"{name}: {problem}"))

# %% [markdown] tags=["half-day"]
# How a *send* behaves matters as well. If it waits for its receiver, a correct order can hang: rank 0 sends
# activations down while rank 1 sends gradients up, and neither receives. The library posts receives ahead and sends
# without waiting. With `lookahead=0` we see what would happen otherwise, to 1F1B, an order that you will meet below:

# %% tags=["half-day"]
try:
    schedules.validate(one_f_one_b(2, 4), lookahead=0)
except ScheduleError as problem:
    print(lab.fold(problem))

# %% [markdown] tags=["two-hours", "half-day"]
# ## The same numbers
#
# Now real training, with the same `step`: the first rank gives the images, the last the labels.
#
# **Predict:** how far are gradients from those of one process that sees whole batches?

# %% tags=["two-hours", "half-day"]
# %%px
def train(step, size=240):
    """One epoch; the loss of each batch, on the last rank."""
    history = []
    for images, labels in zip(x.split(size), y.split(size), strict=True):
        optimizer.zero_grad()
        history.append(step(images, labels))
        optimizer.step()
    return history


def plain_step(images, labels):
    batch = images if world.rank == 0 else None, labels if world.rank == 3 else None
    return plain.step(comm, module, *batch, cross_entropy, microbatches=8)


def step_alone(images, labels):
    loss = cross_entropy(whole(images), labels)
    loss.backward()
    return loss.detach()

# %% tags=["two-hours", "half-day"]
# %%px
module = PipelineModule(layers(), num_stages=4).double()
optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
losses = train(plain_step)
whole = PipelineModule(layers(), 1, comm=comm.split(world.rank)).double()
optimizer = torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.9)
losses_alone = train(step_alone)

theirs = dict(whole.layers.named_parameters())
for name, p in module.layers.named_parameters():  # and their last gradients
    assert (p - theirs[name]).abs().max() < 1e-12
    assert (p.grad - theirs[name].grad).abs().max() < 1e-12
if world.rank == 3:
    assert max(abs(a - b) for a, b in zip(losses, losses_alone, strict=True)) < 1e-12
    print(f"{len(losses)} batches; the loss goes from {losses[0]:.4f} to {losses[-1]:.4f}.")
    print("Losses, gradients and parameters are those of one process, to 1e-12.")

# %% [markdown] tags=["two-hours", "half-day"]
# **A pipeline changes no mathematics.** What the plain core leaves out, and where that stands:

# %% tags=["two-hours", "half-day"]
lab.read_end(plain)

# %% [markdown] tags=["half-day"]
# The full classes have the names and arguments of `torch.distributed.pipelining`: `PipelineStage` is this rank's stage with
# its neighbours, and one interpreter runs any list. Seven micro-batches of 640 images differ by an image; each
# counts by its number of images. (torch's schedules count micro-batches alike, whatever their size.)

# %% tags=["half-day"]
# %%px
from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe


def full_step(kind, microbatches, images, **options):
    """A step of the full classes on 640 images, and its schedule."""
    module = PipelineModule(layers(), num_stages=4, partition_method=[0, 2, 4, 6, 9]).double()
    stage = PipelineStage(module, world.rank, 4, comm)
    schedule = kind(stage, microbatches, cross_entropy, **options)
    with dtlib.memory(module) as m:
        inputs = [images] if world.rank == 0 else []
        schedule.step(*inputs, target=y[:640] if world.rank == 3 else None)
    return module, schedule, m


module, *_ = full_step(ScheduleGPipe, 7, x[:640])
alone = PipelineModule(layers(), 1, comm=comm.split(world.rank)).double()
cross_entropy(alone(x[:640]), y[:640]).backward()
theirs = dict(alone.layers.named_parameters())
for name, p in module.layers.named_parameters():
    assert (p.grad - theirs[name].grad).abs().max() < 1e-12
if world.rank == 0:
    print("Gradients of seven unequal micro-batches: those of one process, to 1e-12.")

# %% [markdown] tags=["half-day"]
# ## Where to cut
#
# A pipeline is as fast as its slowest stage. Equally many layers (`"uniform"`) are rarely equal work. Parameters say
# more, and time says it all: `partition_method="time"` runs each layer with a sample. In this list two layers are slow
# (EMULATED) and have few parameters, as convolutions do.

# %% tags=["half-day", "nbval-ignore-output"]
# %%px
slow = {"forward": 0.05, "backward": 0.1}  # seconds
specs = [LayerSpec(EmulatedStage, nn.Linear(8, 8), **slow) for _ in range(2)]
specs += [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
specs += [LayerSpec(nn.Linear, 8, 512), LayerSpec(nn.Linear, 512, 8)]
cuts = {
    way: PipelineModule(specs, 2, partition_method=way, sample=torch.ones(4, 8)).cuts
    for way in ("uniform", "parameters", "time")
}
assert cuts["time"][1] == 1  # between the two slow ones

# %% tags=["half-day", "nbval-ignore-output"]
for way in ("uniform", "parameters", "time"):
    _, cut, end = lab.values("cuts")[0][way]
    slow_ones = f"{min(cut, 2)} and {2 - min(cut, 2)} slow ones"
    print(f"{way:10}  stage 0: layers 0-{cut - 1}, stage 1: layers {cut}-{end - 1}; {slow_ones}")

# %% [markdown] tags=["half-day"]
# Exact cuts are possible, too: `partition_method=[0, 3, 8]`. **Your turn.** A stage that takes twice as long as the
# other three: what does it do to the makespan? Guess, then `simulate(gpipe(4, 8), {0: 1, 1: 2, 2: 1, 3: 1},
# {0: 2, 1: 4, 2: 2, 3: 2})` in a new cell. (A dictionary gives each stage its time.)

# %% [markdown] tags=["half-day"]
# ## Memory: 1F1B
#
# Between its forward and its backward pass, a micro-batch's activations stay. GPipe does all forward passes first, so
# it holds all m. *1F1B* (D. Narayanan et al.) does a backward pass as soon as it can: *one forward, one backward*.
# **Predict** for 4 ranks and 8 micro-batches: how many does rank 0 hold with 1F1B? And rank 3?

# %% tags=["half-day", "stub"]
lab.predict("held-with-1f1b", {"rank 0": None, "rank 3": None})

# %% tags=["half-day", "solution"]
lab.predict("held-with-1f1b", {"rank 0": 4, "rank 3": 1})

# %% tags=["half-day", "nbval-ignore-output"]
both = {"GPipe": simulate(gpipe(4, 8)), "1F1B": simulate(one_f_one_b(4, 8))}
figures.picture(both)
figures.in_flight(both)

# %% [markdown] tags=["half-day"]
# The bubble is the same; what is held is not. On the engines, for our net: `peak_in_flight` counts micro-batches, and
# `dtlib.memory` the bytes that autograd kept (on rank 0 with the batch itself). A third way is *recomputation* (lesson
# 06): keep a stage's input only, and run its forward pass again before the backward pass.

# %% tags=["half-day"]
# %%px
import gc


def kept_by(kind, recompute=False):
    """Micro-batches in flight and bytes of activations of one step, on this rank."""
    images = x[:640].clone()  # memory of its own
    gc.collect()  # what earlier cells have left behind
    _, schedule, m = full_step(kind, 8, images, recompute=recompute)
    return schedule.peak_in_flight, m.activations


kept = {
    "GPipe": kept_by(ScheduleGPipe),
    "1F1B": kept_by(Schedule1F1B),
    "GPipe, recomputing": kept_by(ScheduleGPipe, recompute=True),
}

# %% tags=["half-day"]
every, names = lab.values("kept"), ("GPipe", "1F1B", "GPipe, recomputing")
for at, what in enumerate(("micro-batches in flight", "bytes of activations")):
    rows = [(name, *(kept[name][at] for kept in every)) for name in names]
    lab.table(rows, (what, *(f"rank {rank}" for rank in range(4))))
assert [kept["GPipe"][0] for kept in every] == simulate(gpipe(4, 8)).peak_activations
assert [kept["1F1B"][0] for kept in every] == simulate(one_f_one_b(4, 8)).peak_activations

# %% [markdown] tags=["half-day"]
# Published: the largest AmoebaNet-D that fits accelerators of 8 GB, without a pipeline, and with GPipe on 2 and on 8
# of them. GPipe recomputes. It holds the inputs of all micro-batches, and the activations of one.

# %% tags=["half-day"]
def published(name):
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (file := folder / "data" / name).exists():
            return list(csv.DictReader(file.open(newline="")))
    raise FileNotFoundError(f"data/{name}")


columns = {
    "params_gpipe": "parameters",
    "model_memory_GB_gpipe": "model (GB)",
    "peak_activation_GB_gpipe": "activations (GB)",
}
table = published("gpipe_table1_memory.csv")
rows = [(row["experiment"], *(row[column] for column in columns)) for row in table]
title = "GPipe, table 1; memory over all accelerators"
lab.table(rows, ("", *columns.values()), title, align="lrrr")

# %% [markdown] tags=["half-day"]
# ## Other orders
#
# All of them run on the interpreter of the full classes; what differs is the list.
#
# - **Interleaved 1F1B** (D. Narayanan et al., 2021): v stages a rank, not neighbours, so that a micro-batch goes around
#   v times. Each stage takes 1/v of the time, so the bubble is v times smaller; messages are v times as many.
# - **ZB-H1**, zero bubble (P. Qi et al., 2024): a backward pass has two halves. The stage before waits for the gradient
#   of the input (`I`); nobody waits for the gradients of the weights (`W`), so they fill idle time.

# %% tags=["half-day", "nbval-ignore-output"]
four = {name: explorer.simulate(name, ranks=4, microbatches=8) for name in explorer.ORDERS}
figures.picture(four)

# %% [markdown] tags=["half-day"]
# The papers give formulas (`dtlib.schedule.formulas` has them all, with their sources). **Predict:** of the four, which
# has the smallest bubble, and which holds the most activations on rank 0? (An interleaved stage's are half as large.)

# %% tags=["half-day", "stub"]
lab.predict("of-four-schedules", {"smallest bubble": None, "most held": None})

# %% tags=["half-day", "solution"]
lab.predict("of-four-schedules", {"smallest bubble": "ZB-H1", "most held": "GPipe"})

# %% tags=["half-day"]
rows, weights = [], {}
for name, found in four.items():
    order = explorer.ORDERS[name]
    sizes = (order.formulas, 4, 8, order.chunks)
    weights[name] = found.peak_activations[0] / order.chunks
    rows.append((name, f"{found.bubble:.1%}", f"{formulas.bubble(*sizes):.1%}", weights[name]))
    assert abs(found.bubble - formulas.bubble(*sizes)) < 1e-12
    assert found.peak_activations[0] == formulas.peak_activations(*sizes)
headers = ("", "bubble, simulated", "by formula", "held by rank 0, in stages of 1F1B")
lab.table(rows, headers)

# %% [markdown] tags=["half-day"]
# Beside it, the published table of schedules. ZB2P and ZBV are further zero-bubble schedules, which this library does
# not have. One row is over the ideal time, the others over the makespan: as we said, ask which.

# %% tags=["half-day"]
rows = [
    (r["schedule"], r["bubble"], r["activation_memory_vs_1F1B"], r["comm_volume_vs_1F1B"])
    for r in published("pipeline_schedule_formulas.csv")
]
title = "P. Qi et al. (README beside their code); D. Narayanan et al., 2021"
lab.table(rows, ("", "bubble", "activations", "bytes sent"), title)
looped, plain = four["interleaved 1F1B"], four["1F1B"]
assert abs(looped.idle_over_ideal - 3 / (2 * 8)) < 1e-12
assert looped.peak_activations[0] / 2 / plain.peak_activations[0] == 1 + 3 / (4 * 2)

# %% [markdown] tags=["half-day"]
# And on the engines (EMULATED stages, real messages): the same four, measured.

# %% tags=["half-day", "nbval-ignore-output"]
runs = {name: explorer.measure(name, ranks=4, microbatches=8) for name in explorer.ORDERS}
figures.picture({f"{name}, measured": run.simulation for name, run in runs.items()})
for name, run in runs.items():
    assert run.peaks == four[name].peak_activations
    assert run.simulation.makespan > four[name].makespan

# %% [markdown] tags=["half-day"]
# ## Explore
#
# Move the sliders; the button runs what you see on the engines. Try: fewer micro-batches than ranks. A backward pass
# as short as a forward pass. Messages that take as long as a forward pass: which order suffers most?

# %% tags=["half-day", "nbval-ignore-output"]
explorer.explore()

# %% [markdown] tags=["half-day"]
# ## When formulas miss
#
# The formulas know nothing of messages. `simulate(..., message=t)` lets each take a while. A rank that has work to do
# meanwhile loses nothing; who waits for an answer pays twice, there and back. Here is the makespan of 4 ranks and 8
# micro-batches:

# %% tags=["half-day", "nbval-ignore-output"]
times = [0, 0.25, 0.5, 1, 2]
series = {
    name: {t: explorer.simulate(name, 4, 8, message=t).makespan for t in times}
    for name in explorer.ORDERS
}
title = "Simulated, in forward passes"
lab.pictures.lines(series, "message", "makespan", title=title, log="", form=".1f")
assert min(series, key=lambda name: series[name][0]) == "ZB-H1"
assert min(series, key=lambda name: series[name][2]) == "GPipe"

# %% [markdown] tags=["half-day"]
# The order turns round. GPipe pays for messages at its beginning and its end only. 1F1B waits for an answer in every
# turn, and the interleaved one sends twice as much.
#
# **Predict.** The simulator lets any number of messages be under way at once. On an EMULATED network that carries one
# after the other, a message takes 2 forward passes. Is the measured makespan of GPipe above the simulated one?

# %% tags=["half-day", "stub"]
lab.predict("above-the-simulated", None)  # True or False

# %% tags=["half-day", "solution"]
lab.predict("above-the-simulated", True)

# %% tags=["half-day", "nbval-ignore-output"]
rows = []
for message in (0, 0.5, 2):
    simulated = explorer.simulate("GPipe", 4, 8, message=message).makespan
    on = explorer.measure("GPipe", 4, 8, message=message, one_by_one=True).simulation.makespan
    rows.append((message, formulas.makespan("gpipe", 4, 8), simulated, on))
    assert on > simulated
title = "EMULATED network and stages; in forward passes"
headers = ("message", "formula", "simulated", "measured, one after the other")
lab.table(rows, headers, title, floats=".1f")
last = rows[-1]

# %% [markdown] tags=["half-day"]
# A message that takes longer than the work between two messages makes the network the slowest stage.

# %% [markdown] tags=["half-day"]
# So: formulas for an estimate, a simulation with *your* times of stages and messages for a choice, a trace for the
# truth.
#
# ## GPipe's table 2
#
# Does a simulation this simple say anything about real machines? Here is the published throughput with K partitions and
# M micro-batches, as a multiple of K = 2 and M = 1, beside the simulated one: equal stages, messages for nothing,
# forward passes done again.

# %% tags=["half-day"]
def throughput(row):
    """The same batch and model in every row; a backward pass takes 2, and 1 to recompute."""
    p, m = int(row["K_partitions"]), int(row["M_microbatches"])
    forward = 1 / (p * m)
    return 1 / simulate(gpipe(p, m), forward, 3 * forward).makespan


table = published("gpipe_table2_throughput.csv")
first = throughput(table[0])
rows = [
    (r["model"], r["K_partitions"], r["M_microbatches"], f"{throughput(r) / first:.2f}",
     r["gpipe_normalised_throughput"], r["torchgpipe_P40_reproduction"])
    for r in table
]
headers = ("model", "K", "M", "simulated", "GPipe", "torchgpipe")
lab.table(rows, headers)

# %% [markdown] tags=["half-day"]
# **Your turn.** Rank each column from slow to fast. Which pairs are the other way round than simulated, and why? Order
# agrees better than size: a simulation of equal stages without messages is a first guess, not a forecast.

# %% [markdown] tags=["two-hours", "half-day"]
# ## The engine
#
# As in the lessons before, a config does it all. `dtlib.pipe` has DeepSpeed's names. The micro-batches are the config's
# accumulation steps; `train_batch` is a whole step.

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib.pipe import PipelineModule  # with DeepSpeed: from deepspeed.pipe import PipelineModule

losses = {}
for order in ("gpipe", "1f1b", "zero_bubble_h1"):
    config = {
        "train_batch_size": 96,
        "gradient_accumulation_steps": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
        "pipeline": {"schedule": order},
    }
    net = PipelineModule(layers(), num_stages=4, loss_fn=cross_entropy).double()
    data = torch.utils.data.TensorDataset(x, y)
    engine, *_ = dtlib.initialize(net, config, training_data=data)
    losses[order] = [engine.train_batch().item() for _ in range(15)]
for some in losses.values():
    assert max(abs(a - b) for a, b in zip(some, losses["gpipe"], strict=True)) < 1e-12

# %% tags=["two-hours", "half-day"]
losses = lab.values("losses")[0]
names = ("gpipe", "1f1b", "zero_bubble_h1")
rows = [(step, *(f"{losses[name][step]:.8f}" for name in names)) for step in (0, 4, 9, 14)]
lab.table(rows, ("loss at step", *names))

# %% [markdown] tags=["two-hours", "half-day"]
# The order changes when, never what. `PipelineModule(num_stages=2)` on four ranks gives two pipelines side by side, each
# with its slice of the batch: data parallelism between pipelines. The next lesson is about such grids.

# %% [markdown] tags=["half-day"]
# ## Who else?
#
# - **PipeDream** (D. Narayanan et al., 2019) never empties the pipeline: whole batches follow one another, each with its
#   own update of the weights, asynchronously; 1F1B comes from there. Between a batch's forward and backward pass a stage's
#   weights would change, so *weight stashing* keeps the version of the forward pass for the backward pass. Once it is
#   filled it has no bubble; it keeps several versions of the weights, and its numbers are not those of one process.
# - **HetPipe** (J. H. Park et al., 2020): GPUs of different kinds, some too small for the model, form *virtual workers*,
#   each of which is a pipeline; between them there is data parallelism with parameter servers. *Wave synchronous*: a virtual
#   worker sends its updates once a wave of minibatches, and workers may be a bounded number of waves apart.
# - **DAPPLE** (S. Fan et al., 2021) stays synchronous, as we do here. *Early backward scheduling* is 1F1B with a flush, and
#   a planner chooses how many stages, where to cut, and how often to replicate each stage, for data x pipeline.
# - **Pipe-torch** (J. Zhan and J. Zhang, 2019): pipelines combined with data parallelism, on clusters of GPUs whose
#   links are fast here and slow there, so that the network has a say in where to cut.
#
# ## What holds on GPUs, and what does not
#
# Seen here, and true there: values, schedules, bubbles for given times, activations in flight, who waits for whom, and that
# slow messages turn the order of schedules round.
#
# Not shown here: speed. Stages slept. On GPUs smaller micro-batches compute less efficiently, so the best m is not the
# largest; messages go from GPU to GPU, by NCCL, while kernels run; stages are never quite equal, and the last one has
# the loss. Use `torch.distributed.pipelining`, Megatron-LM or DeepSpeed there. Speed here is measured by `python -m
# benchmarks pipeline`, as a ratio in one run.
#
# ## Summary
#
# - Data parallelism copies the model, a pipeline cuts it between layers. Activations travel, and their gradients.
# - Without micro-batches one rank computes at a time. With m of them, p ranks lose (p-1)/(m+p-1) of the makespan, which is
#   (p-1)/m of the ideal time.
# - GPipe holds the activations of m micro-batches, 1F1B those of p - rank at most. Same bubble.
# - Interleaved: v times less bubble, v times the messages. ZB-H1: a third of the bubble, if F, I and W are equally long.
# - A schedule is a list: check it, time it, draw it, run it. Gradients are those of one process, to 1e-12.
# - Slow messages hurt those most who wait for an answer in every turn.
#
# Now the [exercises](../exercises/07_pipelines_exercises.ipynb), and a puzzle: [be the
# schedule](../exercises/07_schedule_puzzle_exercises.ipynb). The next lesson, 08, cuts layers themselves.
#
# ## References
#
# - Y. Huang et al.: GPipe: efficient training of giant neural networks using pipeline parallelism. NeurIPS, 2019.
# - C. Kim et al.: torchgpipe: on-the-fly pipeline parallelism for training giant models. arXiv:2004.09910, 2020.
# - D. Narayanan et al.: PipeDream: generalized pipeline parallelism for DNN training. SOSP, 2019.
# - D. Narayanan et al.: Efficient large-scale language model training on GPU clusters using Megatron-LM. SC, 2021.
# - P. Qi, X. Wan, G. Huang, M. Lin: Zero bubble pipeline parallelism. ICLR, 2024.
# - J. H. Park et al.: HetPipe: enabling large DNN training on (whimpy) heterogeneous GPU clusters through integration of
#   pipelined model parallelism and data parallelism. USENIX ATC, 2020.
# - S. Fan et al.: DAPPLE: a pipelined data parallel approach for training large models. PPoPP, 2021.
# - J. Zhan, J. Zhang: Pipe-torch: pipeline-based distributed deep learning in a GPU cluster with heterogeneous
#   networking. CBD, 2019.
# - torch's tutorial on model parallelism, and its documentation of `torch.distributed.pipelining`.
# - E. Alpaydin, C. Kaynak: Optical recognition of handwritten digits. UCI Machine Learning Repository, 1998.
