# %% [markdown]
# # 04b Data parallelism: odd batches and buckets
#
# Thirty minutes, optional: an appendix to [04 Data parallelism](04_data_parallel.ipynb). Real batches may be too large
# for memory, or may not divide evenly: here you handle both. In an exercise you weight an uneven batch. Then you study
# the size and the order of buckets.
#
# **Questions.** What if a batch does not fit into memory, or ranks have different numbers of images? How large is a good
# bucket, and which bucket leaves first?
#
# **Afterwards you can** accumulate gradients without waste, weight uneven batches, and choose a bucket size by measuring.
#
# **You need** lesson 04, up to its timelines.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import time

import dtlib
import torch
from dtlib.gradients.tokens import mean_over_tokens
from dtlib.lab import digits
from dtlib.lessons.l04.emulated import EmulatedAccelerator
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

world = dtlib.init()
comm = world.comm
(x, y), test = digits.load(torch.float64)


def fresh_net():
    torch.manual_seed(0)
    return digits.net(dtype=torch.float64)

# %% [markdown]
# ## Odd batches
#
# **Accumulation.** If a batch does not fit into memory, add up the gradients of several backward passes. Averaging each
# of them would be a waste: inside `no_sync()` gradients stay on the rank, and the first backward pass after it averages
# the sums. Divide each loss by the number of passes; otherwise the gradient is too large by this factor.
#
# **Predict.** The net has four parameters, and one bucket holds them all. There are four backward passes, the last one
# outside `no_sync()`. How many all_reduces are called?

# %% tags=["stub"]
lab.predict("all-reduces-of-four-passes", None)

# %% tags=["solution"]
lab.predict("all-reduces-of-four-passes", 1)

# %%
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

# %% tags=["statement"]
# "the first backward pass after it averages the sums"
assert found(r"(\d) backward passes, (\d) all_reduce") == [4, 1]

# %% [markdown]
# ## Exercise: weight an uneven batch (ten minutes)
#
# At the end of an epoch ranks often have different numbers of images. Each rank takes the mean loss of its own images, and
# gradients are averaged over ranks. The mean of means is the mean over all images only if the slices are equally large.
#
# torch's DDP gives each slice the same weight, so you correct the *loss*. Write `weighted_loss(comm, model, images,
# labels)`. Each rank calls it with its own images, and then `backward()`. The average of the gradients over ranks must
# be the gradient of the mean loss over all images of all ranks.
#
# - The numbers of images change from call to call. A rank knows only its own number.
# - A rank may have no image at all. Such a rank still calls `backward()`, because the others wait for its zeros.
#
# All ranks call the function together, so it may use `comm`.

# %% tags=["stub"]
# %%px
def weighted_loss(comm, model, images, labels):
    return cross_entropy(model(images), labels)  # your lines here

# %% tags=["solution"]
# %%px
def weighted_loss(comm, model, images, labels):
    dist.all_reduce(total := torch.tensor(len(images)), group=comm.group)
    return cross_entropy(model(images), labels, reduction="sum") * comm.size / total

# %%
lab.check("weight-the-batch")

# %% [markdown]
# Here rank r has r + 1 images. How far from one process is the gradient of the plain mean, and how far is that of your
# loss? dtlib's `mean_over_tokens` computes the same loss from one number per image:

# %% tags=["nbval-ignore-output"]
# %%px
def gradient_of(model, loss):
    loss.backward()
    return parameters_to_vector([p.grad for p in model.parameters()])


first = sum(range(world.rank + 1))  # rank 0 has image 0; rank 1 has 1 and 2; ...
images, labels = x[first:][: world.rank + 1], y[first:][: world.rank + 1]
one, plain, yours, dtlibs = fresh_net(), *(DataParallel(fresh_net(), comm) for _ in range(3))
losses = cross_entropy(dtlibs(images), labels, reduction="none")
whole = gradient_of(one, cross_entropy(one(x[:10]), y[:10]))
gradients = {
    "plain mean": gradient_of(plain, cross_entropy(plain(images), labels)),
    "your loss": gradient_of(yours, weighted_loss(comm, yours, images, labels)),
    "dtlib's loss": gradient_of(dtlibs, mean_over_tokens(losses, comm)),
}
for way, gradient in gradients.items():
    if world.rank == 0:
        print(f"{way}: relative error {(gradient - whole).norm() / whole.norm():.0e}")

# %% tags=["statement"]
# "The mean of means is the mean over all images only if the slices are equally large."
# "dtlib's mean_over_tokens computes the same loss"
number = r"relative error (\d+e[-+]\d+)"
assert found(f"plain mean: {number}")[0] > 0.1
assert found(f"your loss: {number}")[0] < 1e-12 and found(f"dtlib's loss: {number}")[0] < 1e-12

# %% [markdown]
# **Uneven numbers of batches.** A rank that has one batch more than the others waits for them forever. Inside `join()`,
# ranks that have finished take part with zeros until all have. The mean is still over all ranks, so the last gradients shrink.
# torch's DDP has the same `join()`. Rank r has r + 1 batches:

# %%
# %%px
model = DataParallel(fresh_net(), comm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
with model.join():
    for step in range(world.rank + 1):
        images, labels = x[96 * step :][:96], y[96 * step :][:96]
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
weights = parameters_to_vector(model.parameters()).detach()
dist.broadcast(rank_0 := weights.clone(), group_src=0, group=comm.group)
from_rank_0 = (weights - rank_0).abs().max().item()
print(f"{world.rank + 1} steps here; the weights differ from rank 0's by {from_rank_0:g}")

# %% tags=["statement"]
# "ranks that have finished take part with zeros until all have"
assert count(r"(?m)[1-4] steps here; the weights differ from rank 0's by 0$") == 4

# %% [markdown]
# ## How large is a bucket?
#
# Small buckets travel early, and pay the latency of a ring each time. One bucket for everything pays it once, but
# starts only when the backward pass is over. The next cell has sixteen layers of 0.25 MiB; the accelerator and the
# network are EMULATED, as in lesson 04.
#
# **Predict.** The bucket size is between 0.25 MiB (one layer) and 4 MiB (all layers). Which size is the fastest: the
# smallest, the largest, or one between them?

# %% tags=["stub"]
lab.predict("best-bucket", None)  # "smallest", "largest" or "between"

# %% tags=["solution"]
lab.predict("best-bucket", "between")

# %%
# %%px
def backward_of(kind, comm, layers=16, count=2**16, pause=0.008, **settings):
    """A backward pass of layers that sleep; its seconds and its trace."""
    model = kind(EmulatedAccelerator(layers, count, pause), comm, **settings)
    loss = model(torch.zeros(1, requires_grad=True)).sum()
    dist.barrier(comm.group)
    with dtlib.trace() as trace:
        began = time.perf_counter()
        loss.backward()
    return time.perf_counter() - began, trace


slow = comm.emulate_network(latency=0.002, bandwidth=100e6)  # 2 ms per message, 100 MB/s
threaded = {"progress": "thread", "algorithm": "ring"}
seconds = {}
for size in (0.25, 0.5, 1, 2, 4):  # MiB
    took = [backward_of(DataParallel, slow, bucket_cap_mb=size, **threaded)[0] for _ in range(4)]
    dist.all_reduce(slowest := torch.tensor(min(took)), op=dist.ReduceOp.MAX, group=comm.group)
    seconds[size] = slowest.item()

# %% tags=["nbval-ignore-output"]
seconds = lab.values("seconds")[0]
largest = seconds[max(seconds)]
lab.pictures.lines(
    {"backward": {size: took / largest for size, took in seconds.items()}},
    xlabel="bucket size in MiB", ylabel="time relative to one bucket", log="x",
    title="EMULATED accelerator and network",
)
best = min(seconds, key=seconds.get)
print(f"Best of these: {best:g} MiB.")

# %% tags=["claim"]
# "A bucket too small pays latency, one too large starts late"
assert min(seconds) < best < max(seconds)

# %% [markdown]
# The curve has its lowest point between the smallest and the largest bucket. The best size depends on latency,
# bandwidth and the time of the backward pass: measure it on your own machine. The default of torch and of dtlib, 25
# MiB, was chosen for the networks of data centres.
#
# **Your turn.** Set `latency=0.0001` where `slow` is made. Does the best size grow or shrink, and why?
#
# <details><summary>Answer</summary>It shrinks: a message costs less, so sending early pays.</details>
#
# ## Buckets in the wrong order
#
# Collectives must be called in the same order on all ranks, so buckets are sent in the order of their list. Normally
# the last layer's bucket is first, because its gradient is ready first. **Change a line.** The next cell reverses the
# list. The gradients stay the same. In both runs a thread progresses the messages, as in lesson 04.
#
# **Predict.** There are six layers, with one bucket each. In the reversed order, how many layers must go through their
# backward pass before the first bucket leaves?

# %% tags=["stub"]
lab.predict("layers-before-the-first-bucket", None)

# %% tags=["solution"]
lab.predict("layers-before-the-first-bucket", 6)

# %%
# %%px
from dtlib.comm import progress_thread


class FirstLayerFirst(DataParallelBuckets):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.buckets.reverse()


six = {"layers": 6, "count": 2**17, "pause": 0.05, "bucket_cap_mb": 0.5}
with progress_thread():
    usual = backward_of(DataParallelBuckets, slow, **six)[1]
    reverse = backward_of(FirstLayerFirst, slow, **six)[1]

# %% tags=["nbval-ignore-output"]
from dtlib import Timeline

lab.pictures.timeline("usual", "reverse", rank=0, ends={"layer 0": "backward pass ends"})
in_order, reversed_order = (Timeline(lab.values(name)) for name in ("usual", "reverse"))
print(f"EMULATED: time in reversed order / in usual order {reversed_order.end / in_order.end:.2f}")

# %% tags=["claim"]
# "In the upper panel each all-reduce begins at the end of a layer, and only the last is left when the backward pass ends."
# "In the lower panel all six begin after layer 0, and end one after the other while nothing is computed."
for timeline, hidden in ((in_order, 5), (reversed_order, 0)):
    for rank in range(4):
        mine = [event for event in timeline.events if event.rank == rank]
        layers = [event.end for event in mine if event.kind == "phase"]
        sent = [event for event in mine if event.lane == "background"]
        assert len(layers) == len(sent) == 6 and sum(event.end < max(layers) for event in sent) == hidden
        for end, event in zip(layers, sent, strict=True):
            assert abs(event.start - (end if hidden else max(layers))) < 0.04
assert reversed_order.end > 1.1 * in_order.end

# %% [markdown]
# In the upper panel each all-reduce begins at the end of a layer, and only the last is left when the backward pass ends. In
# the lower panel all six begin after layer 0, and end one after the other while nothing is computed. The gradient of
# layer 0 is ready last, and all others wait for it. (The short bar after layer 0 is the class's own check.)
#
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("04b")

# %% [markdown]
# ## Summary
#
# - `no_sync()` for accumulation; a weighted loss for uneven batches; `join()` for uneven numbers of batches.
# - A bucket too small pays latency, one too large starts late: the cheaper a message, the smaller the best bucket. The
#   last layer's bucket leaves first.
#
# ## References
#
# - S. Li et al.: PyTorch distributed: experiences on accelerating data parallel training. VLDB 13(12), 2020.
