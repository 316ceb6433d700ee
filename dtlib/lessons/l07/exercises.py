# %% [markdown]
# # 07 Pipelines: exercises
#
# Five exercises: *predict* bubble and activations (ten minutes), *fix* a pipeline whose gradients are too small (five
# minutes), *build* the GPipe clock (thirty minutes), *build* 1F1B from it (twenty minutes), and *find the leak* in a
# step that holds too much memory (ten minutes). A check runs your function on all ranks, with micro-batches that are
# equal, unequal, few, and large. The check looks at values, at the order of the actions, at messages, at the tensors
# that autograd keeps, and at bytes. Check again for the next hint. The schedule puzzle has [a notebook of its
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
# There are three stages, one per rank, and six micro-batches. A backward pass takes twice as long as a forward pass.
# What fraction of the step is a rank idle, with GPipe and with 1F1B? And for how many micro-batches does each rank keep
# activations, at most?
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
# First comes the simulation.

# %%
from dtlib.schedule import draw, gpipe, one_f_one_b, simulate

simulated = {"GPipe": simulate(gpipe(3, 6)), "1F1B": simulate(one_f_one_b(3, 6))}
for name, step in simulated.items():
    print(f"{name}\n{draw(step)}")

# %% [markdown]
# Then the library's schedules run on the ranks. The stages are EMULATED: they sleep. Measured bubbles are larger,
# because each action starts a little late.

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
# `train_step` computes the gradients of a batch with the library's GPipe. Rank 0 has `x`, the last rank has `target`.
# They should be the gradients of the mean loss over the batch. They have the right direction, so a larger learning rate
# would hide the mistake. But one division is too many. Remove it, and keep the four micro-batches.

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
# micro-batches add up. If you accumulate gradients by hand, you have to divide yourself. If a library runs the loop, it
# divides for you.

# %% [markdown]
# ## Build: the GPipe clock
#
# You write one step of GPipe with nothing but `dist.send(tensor, group_dst=..., group=comm.group)` and
# `dist.recv(tensor, group_src=..., group=comm.group)` of `torch.distributed`. Write `my_gpipe(comm, stage, inputs,
# targets, loss_fn)`, which every rank calls:
#
# - `stage` is this rank's stage of the model, an `nn.Module`; stage r is on rank r.
# - `inputs` is a list with a tensor for each micro-batch. On rank 0 these are the samples. On the other ranks they are
#   buffers for the output of the previous stage: receive into them. They differ in length if the last micro-batch is
#   smaller.
# - `targets` is a list with a tensor for each micro-batch. Only the last rank needs them, and only the last rank calls
#   `loss_fn(output, target)`; it returns the mean over the samples of a micro-batch.
# - Afterwards the parameters of each stage have the gradient of the mean loss over the whole batch, and the last rank
#   returns that loss.
#
# 1. Forward, for each micro-batch: receive, compute, send the output on. Keep the tensors that the backward pass needs.
# 2. Backward, for each micro-batch: receive the gradient of the output, call `backward`, send the gradient of the input back.
#
# Example: 3 ranks and micro-batches of 3, 3 and 1 samples. The last rank scales the three losses by 3/7, 3/7 and 1/7.
#
# A message carries values, but no autograd graph. So call `x.requires_grad_()` on the received tensor, before
# `stage(x)`. After the backward pass, send `x.grad` to the previous rank, which waits for it. And send
# `output.detach()`. A gradient has the shape of its output: receive it into `torch.empty_like(output)`.

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
# A send may wait for its receiver, but ranks never wait in a circle: first all messages move down the pipeline, then
# all move up. All micro-batches are in `outputs` when the first backward pass begins. So GPipe needs much memory.
#
# ## Build: 1F1B
#
# Write `my_1f1b(comm, stage, inputs, targets, loss_fn)`. The function has the same arguments as `my_gpipe`, and
# computes the same values with less memory. Rank r of N holds the activations and outputs of at most N - r
# micro-batches. No rank computes anything twice, and the bubble is no larger than before.
#
# 1. Warm up with forward passes: one for each rank after this one, but not more than there are micro-batches.
# 2. Alternate one forward and one backward, until no forward pass is left.
# 3. Do the remaining backward passes.
#
# Example: rank 0 of 3 with four micro-batches works in the order `F0 F1 F2 B0 F3 B1 B2 B3`, and rank 2 in the order
# `F0 B0 F1 B1 F2 B2 F3 B3`.
#
# Now messages move in both directions at once. If two ranks both wait in a large send to each other, they wait forever.
# `dist.isend` starts a send and returns a *work* object with a method `wait()`.

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
# Both functions process a micro-batch in the same way; only the order differs. So `dtlib/parallel/pipeline/plain.py`
# has one `step`, and `order` is data: compare your loops with both. The full forms are `dtlib.schedule.one_f_one_b` and
# `stage.py`.
#
# ## Fix: find the leak
#
# `lean_step` is also a step of 1F1B, and its gradients are right. Besides the loss it returns a log: for each
# micro-batch the mean absolute output of this rank's stage. But with many micro-batches its memory grows as in GPipe.
# Some object still refers to tensors after their backward pass.
#
# - `microbatches` is a list of pairs. On rank 0 their first elements are inputs, and on the last rank their second
#   elements are targets; the other elements are None. `like` has the shape and dtype of every message.

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
# `Live` counts the bytes that are alive, for each line that allocated them. Here are the three largest lines at the
# peak, on the first and on the last rank, with 4 and with 32 micro-batches of 64 kB. Read the original function before
# you run the cell. **Predict** which names of that function still refer to a tensor after its backward
# pass: `kept`, `losses`, `means`, `sending`, or two of them, such as `"means and sending"`.

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
# The line that allocates a tensor does not show which object keeps it alive. A handle keeps the tensor that it sends,
# and a function keeps every object that it names. One such object is enough: after the first repair the same bytes are
# still alive.
#
# ## If you have time
#
# - Write `my_schedule(actions, comm, stage, inputs, targets, loss_fn)`. `actions` is this rank's list from a schedule
#   of `dtlib.schedule`. Two of the four schedules run without changes.
# - Post the receives of activations before they are needed: `comm.recv(..., async_op=True)`. Which receives can a rank
#   post when the step begins?
# - Keep only the inputs, and compute the forward pass again before each backward pass. What does it save, and what does it
#   cost? (The check of 1F1B refuses it.)
