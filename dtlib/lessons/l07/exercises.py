# %% [markdown]
# # 07 Pipelines: exercises
#
# Five exercises: *predict* bubble and activations (ten minutes), *fix* a pipeline whose gradients are too small (five
# minutes), *build* the GPipe clock (thirty minutes), *build* 1F1B from it (twenty minutes), and *find the leak* in a step
# that holds too much memory (ten minutes). A check runs your function on all ranks, with micro-batches that are equal,
# unequal, few, and large. It looks at values, at who does what when, at messages, at what autograd keeps, and at bytes.
# Check again for the next hint. The schedule puzzle has [a notebook of its
# own](07_schedule_puzzle_exercises.ipynb), and needs no engines.
#
# **You need** the lecture [07 Pipelines](../lectures/07_pipelines.ipynb). Answers:
# [solutions](../solutions/07_pipelines_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import time

import dtlib
import torch
from torch import distributed as dist
from torch import nn

from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe

world = dtlib.init()
group = world.comm.group

# %% [markdown]
# ## Predict: bubble and activations
#
# Three stages, one per rank, and six micro-batches; a backward pass takes twice as long as a forward pass. What fraction of
# the step is a rank idle, with GPipe and with 1F1B? And of how many micro-batches does each rank keep activations, at most?
#
# Replace each `None`: a fraction between 0 and 1, and a list with a number for each rank.

# %% tags=["stub"]
lab.predict("idle-of-three-stages", {"GPipe": None, "1F1B": None})
lab.predict("activations-of-three-stages", {"GPipe": None, "1F1B": None})

# %% tags=["solution"]
p, m = 3, 6
lab.predict("idle-of-three-stages", {
    "GPipe": (p - 1) / (m + p - 1),
    "1F1B": (p - 1) / (m + p - 1),
})
lab.predict("activations-of-three-stages", {"GPipe": [6, 6, 6], "1F1B": [3, 2, 1]})

# %% [markdown]
# First, the simulation.

# %%
from dtlib.schedule import draw, gpipe, one_f_one_b, simulate

simulated = {"GPipe": simulate(gpipe(3, 6)), "1F1B": simulate(one_f_one_b(3, 6))}
for name, step in simulated.items():
    print(f"{name}\n{draw(step)}")

# %% [markdown]
# Then the library's schedules, on the ranks. The stages are EMULATED: they sleep. Measured bubbles are larger, as each action
# starts a little late.

# %%
# %%px
class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(0.05)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.1)
        return gradient, gradient.sum()

class SleepingStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Sleep.apply(x, self.weight)

# %%
# %%px
def measured(kind):
    stage = PipelineStage(SleepingStage(), world.rank, world.size, world.comm)
    schedule = kind(stage, n_microbatches=6, loss_fn=nn.functional.mse_loss)
    x = target = torch.ones(6, 1)
    for _ in range(2):  # the first step only warms up
        dist.barrier(group)
        began = time.monotonic()
        schedule.step(*[x] * (world.rank == 0), target=target)
    dist.all_gather_object(times := [None] * world.size, (began, time.monotonic()), group=group)
    makespan = max(end for _, end in times) - min(begin for begin, _ in times)
    dist.all_gather_object(peaks := [None] * world.size, schedule.peak_in_flight, group=group)
    return 1 - 6 * (0.05 + 0.1) / makespan, peaks

runs = [("GPipe", *measured(ScheduleGPipe)), ("1F1B", *measured(Schedule1F1B))]

# %% tags=["nbval-ignore-output"]
for name, bubble, peaks in lab.values("runs")[0]:
    print(f"{name}: bubble {bubble:.1%}, simulated {simulated[name].bubble:.1%}; in flight {peaks}")
    assert 0 < bubble < 1 and peaks == simulated[name].peak_activations

# %% tags=["statement"]
# "What fraction of the step is a rank idle, with GPipe and with 1F1B?"
for name, held in (("GPipe", [6, 6, 6]), ("1F1B", [3, 2, 1])):
    measured, simulated, *in_flight = row(f"{name}: bubble")
    assert simulated == 25 < measured and in_flight == held

# %% [markdown]
# ## Fix: gradients that are too small
#
# `train_step` computes the gradients of a batch with the library's GPipe. Rank 0 has `x`, the last rank has `target`. The
# gradients should be those of the mean over the batch. They point in the right direction, and a larger learning rate would
# hide the mistake, but something is divided once too often. Fix it, and keep the four micro-batches.

# %% tags=["stub"]
# %%px
def train_step(comm, stage, x, target):
    microbatches = 4

    def loss_fn(output, target):
        return (output - target).square().mean() / microbatches

    stage = PipelineStage(stage, comm.rank, comm.size, comm)
    schedule = ScheduleGPipe(stage, microbatches, loss_fn)
    if comm.rank == 0:
        schedule.step(x, target=target)
    else:
        schedule.step(target=target)

# %% tags=["solution"]
# %%px
def train_step(comm, stage, x, target):
    microbatches = 4

    def loss_fn(output, target):
        return (output - target).square().mean()

    stage = PipelineStage(stage, comm.rank, comm.size, comm)
    schedule = ScheduleGPipe(stage, microbatches, loss_fn)
    if comm.rank == 0:
        schedule.step(x, target=target)
    else:
        schedule.step(target=target)

# %%
lab.check("pipeline-fix")

# %% [markdown]
# The schedule scales the loss of a micro-batch by its weight, the fraction of samples in it, because gradients of
# micro-batches add up. If you accumulate gradients by hand, you have to divide yourself. If a library runs the loop, know
# that it divides.

# %% [markdown]
# ## Build: the GPipe clock
#
# One step of GPipe, with nothing but `dist.send(tensor, group_dst=..., group=comm.group)` and `dist.recv(tensor,
# group_src=..., group=comm.group)` of `torch.distributed`. Write `my_gpipe(comm, stage, inputs, targets, loss_fn)`, which
# every rank calls:
#
# - `stage` is this rank's stage of the model, an `nn.Module`; stage r is on rank r.
# - `inputs` is a list with a tensor for each micro-batch. On rank 0 these are the samples. On the others they are buffers
#   for what the stage before gives: receive into them. They differ in length if the last micro-batch is smaller.
# - `targets` is a list with a tensor for each micro-batch. Only the last rank needs them, and only there is
#   `loss_fn(output, target)` called; it gives the mean over the samples of a micro-batch.
# - Afterwards the parameters of each stage have the gradient of the mean loss over the whole batch, and the last rank
#   returns that loss.
#
# 1. Forward, for each micro-batch: receive, compute, send the output on. Keep what the backward pass needs.
# 2. Backward, for each micro-batch: receive the gradient of the output, call `backward`, send the gradient of the input back.
#
# Example: 3 ranks and micro-batches of 3, 3 and 1 samples. The last rank scales the three losses by 3/7, 3/7 and 1/7.
#
# A message carries values, but no autograd graph. So call `x.requires_grad_()` on what arrives, before `stage(x)`; after
# the backward pass `x.grad` is what the rank before waits for. And send `output.detach()`. A gradient has the shape of its
# output: receive it into `torch.empty_like(output)`.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


def my_gpipe(comm, stage, inputs, targets, loss_fn):
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    samples = sum(len(x) for x in inputs)
    outputs, losses = [], []
    for x in inputs:
        ...
    for x, target in zip(inputs, targets, strict=True):
        ...
    return sum(losses)

# %% tags=["solution"]
# %%px
def my_gpipe(comm, stage, inputs, targets, loss_fn):
    first, last, group = comm.rank == 0, comm.rank == comm.size - 1, comm.group
    samples, outputs, losses = sum(len(x) for x in inputs), [], []
    for x in inputs:
        if not first:
            dist.recv(x, group_src=comm.rank - 1, group=group)
        outputs.append(stage(x if first else x.requires_grad_()))
        if not last:
            dist.send(outputs[-1].detach(), group_dst=comm.rank + 1, group=group)
    for x, output, target in zip(inputs, outputs, targets, strict=True):
        if last:
            losses.append(loss_fn(output, target) * len(x) / samples)
            losses[-1].backward()
        else:
            dist.recv(gradient := torch.empty_like(output), group_src=comm.rank + 1, group=group)
            output.backward(gradient)
        if not first:
            dist.send(x.grad, group_dst=comm.rank - 1, group=group)
    return sum(losses)

# %%
lab.check("gpipe-build")

# %% [markdown]
# Each send waits until its message is on its way, and ranks never wait in a circle: first all messages go down the
# pipeline, then all go up. All micro-batches are in `outputs` when the first backward pass begins: that is GPipe's memory.
#
# ## Build: 1F1B
#
# The same arguments, the same values, less memory: `my_1f1b(comm, stage, inputs, targets, loss_fn)`. Rank r of N holds the
# activations of at most N - r micro-batches, their outputs among them, computes nothing twice, and the bubble is no larger
# than before.
#
# 1. Some forward passes to warm up: as many as there are ranks after this one, but not more than there are micro-batches.
# 2. One forward, one backward, until there is no forward pass left.
# 3. The backward passes that are left.
#
# Example: rank 0 of 3 with four micro-batches works in the order `F0 F1 F2 B0 F3 B1 B2 B3`, and rank 2 in the order
# `F0 B0 F1 B1 F2 B2 F3 B3`.
#
# Now messages go both ways at once. Two ranks that both wait in a send to each other wait forever, if messages are large.
# `dist.isend` starts a send and returns a work, which has `wait()`.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


def my_1f1b(comm, stage, inputs, targets, loss_fn):
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    samples = sum(len(x) for x in inputs)
    outputs, sending, losses = {}, [], []

    def forward(m):
        ...

    def backward(m):
        ...

    for work in sending:
        work.wait()
    return sum(losses)

# %% tags=["solution"]
# %%px
from torch import distributed as dist


def my_1f1b(comm, stage, inputs, targets, loss_fn):
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    samples = sum(len(x) for x in inputs)
    outputs, sending, losses = {}, [], []

    def forward(m):
        if not first:
            dist.recv(inputs[m], group_src=comm.rank - 1, group=comm.group)
            inputs[m].requires_grad_()
        outputs[m] = stage(inputs[m])
        if not last:
            work = dist.isend(outputs[m].detach(), group_dst=comm.rank + 1, group=comm.group)
            sending.append(work)

    def backward(m):
        output, gradient = outputs.pop(m), None
        if last:
            output = loss_fn(output, targets[m]) * len(inputs[m]) / samples
            losses.append(output.detach())
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, group_src=comm.rank + 1, group=comm.group)
        output.backward(gradient)
        if not first:
            sending.append(dist.isend(inputs[m].grad, group_dst=comm.rank - 1, group=comm.group))

    ahead = min(comm.size - comm.rank - 1, len(inputs))
    for m in range(ahead):
        forward(m)
    for m in range(len(inputs)):
        if m + ahead < len(inputs):
            forward(m + ahead)
        backward(m)
    for work in sending:
        work.wait()
    return sum(losses)

# %%
lab.check("1f1b-build")

# %% [markdown]
# Both functions do the same to a micro-batch; only the order differs. So `dtlib/parallel/pipeline/plain.py` has one `step`,
# and `order` is data: compare your loops with both. The full forms are `dtlib.schedule.one_f_one_b` and `stage.py`.
#
# ## Fix: find the leak
#
# `lean_step` is a step of 1F1B, too, and its gradients are right. Besides the loss it returns a log: for each micro-batch
# the mean absolute output of this rank's stage. With a few micro-batches all is well. With many, memory grows, as if it
# were GPipe. Something refers to tensors whose backward pass is long over.
#
# - `microbatches` is a list of pairs. On rank 0 their first elements are inputs, on the last rank their second ones are
#   targets; others are None. `like` has the shape and dtype of everything that travels.

# %%
# %%px
def in_turn(comm, count, forward, backward):
    """The order of 1F1B."""
    ahead = min(comm.size - comm.rank - 1, count)
    for m in range(ahead):
        forward(m)
    for m in range(count):
        if m + ahead < count:
            forward(m + ahead)
        backward(m)

# %% tags=["stub"]
# %%px
def lean_step(comm, stage, microbatches, like, loss_fn):
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    kept, sending, losses, means = {}, [], [], []

    def forward(m):
        x, target = microbatches[m]
        if not first:
            x = comm.recv(torch.empty_like(like), comm.rank - 1).requires_grad_()
        output = y = stage(x)
        means.append(lambda: output.abs().mean().item())
        if last:
            y = loss_fn(output, target) / len(microbatches)
            losses.append(y.detach())
        else:
            sending.append(comm.send(output.detach(), comm.rank + 1, async_op=True))
        kept[m] = x, y

    def backward(m):
        x, y = kept.pop(m)
        y.backward(None if last else comm.recv(torch.empty_like(like), comm.rank + 1))
        if not first:
            sending.append(comm.send(x.grad, comm.rank - 1, async_op=True))

    in_turn(comm, len(microbatches), forward, backward)
    for handle in sending:
        handle.wait()
    return sum(losses), [mean() for mean in means]

# %% tags=["solution"]
# %%px
def lean_step(comm, stage, microbatches, like, loss_fn):
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    kept, sending, losses, means = {}, [], [], []

    def forward(m):
        x, target = microbatches[m]
        if not first:
            x = comm.recv(torch.empty_like(like), comm.rank - 1).requires_grad_()
        output = y = stage(x)
        means.append(output.detach().abs().mean().item())  # a number
        if last:
            y = loss_fn(output, target) / len(microbatches)
            losses.append(y.detach())
        else:
            sending.append(comm.send(output.detach(), comm.rank + 1, async_op=True))
        kept[m] = x, y

    def backward(m):
        x, y = kept.pop(m)
        y.backward(None if last else comm.recv(torch.empty_like(like), comm.rank + 1))
        if not first:
            sending.append(comm.send(x.grad, comm.rank - 1, async_op=True))
        sending[:] = [handle for handle in sending if not handle.done()]

    in_turn(comm, len(microbatches), forward, backward)
    for handle in sending:
        handle.wait()
    return sum(losses), means

# %% [markdown]
# `Live` counts the bytes that are alive, and knows the line that allocated them. Here are the three largest lines at the
# peak, on the first and on the last rank, with 4 and with 32 micro-batches of 64 kB. Before you run it, read the function.
# **Predict** which names of the function as it was handed to you still refer to a tensor after its backward pass.

# %% tags=["stub"]
lab.predict("holders-of-memory", {"output": None, "x.grad": None})

# %% tags=["solution"]
lab.predict("holders-of-memory", {"output": "means and sending", "x.grad": "sending"})

# %%
# %%px
from dtlib.measure.live import Live


def largest_lines(count):
    """The most bytes at a time, and the three lines that had most of them."""
    like = torch.zeros(64, 128, dtype=torch.float64)
    stage = nn.Sequential(nn.Linear(128, 128), nn.Tanh()).double()
    batch = [(torch.ones_like(like), torch.zeros_like(like)) for _ in range(count)]
    with Live() as live:
        lean_step(world.comm, stage, batch, like, nn.functional.mse_loss)
    return live.peak, [(bytes_, text) for bytes_, _, text in live.by_line(at_peak=True)[:3]]

# %%
# %%px
lines = {count: largest_lines(count) for count in (4, 32)}

# %% tags=["nbval-ignore-output"]
for rank in (0, 2):
    for count, (peak, found) in lab.values("lines")[rank].items():
        print(f"rank {rank}, {count:>2} micro-batches: {peak:>9,} bytes at the peak")
        for bytes_, text in found:
            print(f"{bytes_:>20,} {text[:60]}")

# %%
lab.check("leak-fix")

# %% [markdown]
# The line that allocates a tensor says what it is, not who keeps it. A handle keeps the tensor that it sends, and a function
# keeps everything that it names. One holder is enough: after the first repair the same bytes are still there.
#
# ## If you have time
#
# - Write `my_schedule(actions, comm, stage, inputs, targets, loss_fn)`, where `actions` is this rank's list of a schedule of
#   `dtlib.schedule`. Two of the four schedules run with it as they are.
# - Ask for activations before they are needed: `comm.recv(..., async_op=True)`. Which receives can a rank post when the
#   step begins?
# - Keep only the inputs, and compute the forward pass again before each backward pass. What does it save, and what does it
#   cost? (The check of 1F1B refuses it.)
