# %% [markdown]
# # 08 Tensor and hybrid parallelism: exercises
#
# Five exercises, an hour in all: *predict* what a pair of layers sends (five minutes), *predict* the groups of a mesh (five minutes),
# *fix* a layer that is cut by rows (five minutes), *build* a perceptron in shards (twenty-five minutes), and *build* a step for the
# Replicator (twenty minutes). A check looks at values, gradients, bytes sent and memory held, on all ranks. Check again for the
# next hint.
#
# **You need** the lecture [08 Tensor and hybrid parallelism](../lectures/08_tensor_and_hybrid.ipynb), and for the last exercise [08b
# TF-Replicator's model](../lectures/08b_replicator.ipynb). Answers:
# [solutions](../solutions/08_tensor_and_hybrid_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

from dtlib.parallel.tensor import copy_to_ranks, reduce_from_ranks

world = dtlib.init()

# %% [markdown]
# ## Predict: what a pair of layers sends
#
# Three ranks have x, with 1,536 tokens of 64 features in float64: B = 786,432 bytes. First comes a
# `ColumnParallelLinear(64, 256)`; its output stays in slices. Then a `RowParallelLinear(256, 64)` takes these slices.
# Which collective does each layer call, forward and backward: `"all_reduce"`, `"all_gather"` or `"nothing"`? And how
# many bytes does a rank send for it, with the ring? Run the cell, then the next one: it checks all four answers.

# %% tags=["stub"]
lab.predict("column-forward", {"column, forward": None, "bytes": None})
lab.predict("column-backward", {"column, backward": None, "bytes": None})
lab.predict("row-forward", {"row, forward": None, "bytes": None})
lab.predict("row-backward", {"row, backward": None, "bytes": None})

# %% tags=["solution"]
B = 1536 * 64 * 8
lab.predict("column-forward", {"column, forward": "nothing", "bytes": 0})
lab.predict("column-backward", {"column, backward": "all_reduce", "bytes": 2 * B * 2 // 3})
lab.predict("row-forward", {"row, forward": "all_reduce", "bytes": 2 * B * 2 // 3})
lab.predict("row-backward", {"row, backward": "nothing", "bytes": 0})

# %%
# %%px
from dtlib.parallel.tensor import ColumnParallelLinear, RowParallelLinear

def sent(run):
    """The result of a run; its collectives, and the bytes that this rank sends for them."""
    with dtlib.trace() as trace:
        value = run()
    return value, (" ".join(event.name for event in trace.events) or "nothing", trace.sent()[1])

column = ColumnParallelLinear(64, 256, world.comm, gather_output=False).double()
row = RowParallelLinear(256, 64, world.comm, input_is_parallel=True).double()
x = torch.ones(1536, 64, dtype=torch.float64, requires_grad=True)
hidden, column_forward = sent(lambda: column(x))
inside = hidden.detach().requires_grad_()  # so that the two layers are seen one by one
y, row_forward = sent(lambda: row(inside))
_, row_backward = sent(lambda: y.sum().backward())
_, column_backward = sent(lambda: hidden.backward(inside.grad))

# %% tags=["statement"]
# "B = 786,432 bytes"
assert 1536 * 64 * 8 == 786_432 and count("came out as nothing: right") == 2 and count("came out as all_reduce: right") == 2

# %% [markdown]
# ## Predict: the groups of a mesh
#
# Twelve ranks form `world.mesh(data=2, pipe=2, tensor=3)`. The last axis varies fastest. Write the ranks of rank 7's
# three groups, with rank 7, in ascending order.

# %% tags=["stub"]
lab.predict("groups-of-7", {"data": None, "pipe": None, "tensor": None})

# %% tags=["solution"]
lab.predict("groups-of-7", {"data": [1, 7], "pipe": [7, 10], "tensor": [6, 7, 8]})

# %%
from dtlib.lessons.l08 import figures

figures.mesh(data=2, pipe=2, tensor=3)

# %% [markdown]
# ## Fix: a layer cut by rows
#
# `RowParallel(whole, comm)` keeps this rank's shard of an `nn.Linear` that is the same on all ranks. Each rank passes
# it this rank's features of the input, and all ranks should get the output of the whole layer. They do not: find out
# what they get instead, and fix it.
#
# `AddUp` is g, written with `torch.distributed`: its `backward` returns the gradient unchanged. The check looks at the
# output, at the gradients of input, weight and bias, and at the collectives: one `all_reduce` forward, and none
# backward.

# %% tags=["stub"]
# %%px
class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, summand, comm):
        total = summand.clone()
        dist.all_reduce(total, group=comm.group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RowParallel(nn.Module):
    def __init__(self, whole, comm):
        super().__init__()
        self.comm = comm
        shard = whole.weight.detach().chunk(comm.size, dim=1)[comm.rank]
        self.weight = nn.Parameter(shard.clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x_slice):
        return AddUp.apply(linear(x_slice, self.weight, self.bias), self.comm)

# %% tags=["solution"]
# %%px
class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, summand, comm):
        total = summand.clone()
        dist.all_reduce(total, group=comm.group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RowParallel(nn.Module):
    def __init__(self, whole, comm):
        super().__init__()
        self.comm = comm
        shard = whole.weight.detach().chunk(comm.size, dim=1)[comm.rank]
        self.weight = nn.Parameter(shard.clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x_slice):
        return AddUp.apply(linear(x_slice, self.weight), self.comm) + self.bias

# %%
lab.check("row-fix")

# %% [markdown]
# Two other ways give the right output and are still wrong. With `self.bias / comm.size` on every rank, the gradient of
# the bias is 1/N of the right one. And if only rank 0 adds the bias, the other ranks get no gradient for it, so their
# copies do not change.
#
# ## Build: a perceptron in shards
#
# `MyMLP(linear1, linear2, comm)` replaces `linear2(gelu(linear1(x)))`. The two whole layers are the same on all ranks.
# The number of hidden features is a multiple of the number of ranks, and rank r has slice r of the features, in order.
# `forward(x)` takes the whole x on every rank, with any number of dimensions before the last, and returns the whole
# output on every rank.
#
# 1. Keep this rank's hidden features: rows of `linear1.weight` (which are columns of A), elements of `linear1.bias`,
#    columns of `linear2.weight` (rows of B). Keep all of `linear2.bias`. Make each an `nn.Parameter` with its own
#    memory, with any name.
# 2. Then in `forward`: f, the first product, gelu, the second product, g, the bias.
#
# Example: width 6, 48 hidden features, 3 ranks: 16 x 6, 16, 6 x 16 and 6 numbers per rank.
#
# The check looks at the output, at the gradients of x and of all parameters, at bytes held, and at bytes sent: one
# `all_reduce` forward and one backward, each with as many numbers as x. `copy_to_ranks(x, comm)` is f, and
# `reduce_from_ranks(x, comm)` is g.

# %% tags=["stub"]
# %%px
class MyMLP(nn.Module):
    def __init__(self, linear1, linear2, comm):
        super().__init__()
        self.comm = comm

    def forward(self, x):
        ...

# %% tags=["solution"]
# %%px
class MyMLP(nn.Module):
    def __init__(self, linear1, linear2, comm):
        super().__init__()
        self.comm = comm
        self.weight1 = self.shard(linear1.weight, dim=0)
        self.bias1 = self.shard(linear1.bias, dim=0)
        self.weight2 = self.shard(linear2.weight, dim=1)
        self.bias2 = nn.Parameter(linear2.bias.detach().clone())

    def shard(self, whole, dim):
        return nn.Parameter(whole.detach().chunk(self.comm.size, dim)[self.comm.rank].clone())

    def forward(self, x):
        hidden = gelu(linear(copy_to_ranks(x, self.comm), self.weight1, self.bias1))
        return reduce_from_ranks(linear(hidden, self.weight2), self.comm) + self.bias2

# %%
lab.check("mlp-build")

# %% [markdown]
# The lecture's `ParallelMLP` is the same, made of two layers; the full layers also allow a number of hidden features
# that is not a multiple of the number of ranks. Without f the output is still right, and so are the gradients of all
# parameters here. Only the layers *before* this block get a wrong gradient. A test that looks at outputs alone would
# not see it.
#
# ## Build: a step for the Replicator
#
# Write `build_step(replicator, model)`. It returns `step_fn(inputs)`, the step of one replica:
#
# - `inputs` are x and y, this replica's samples; the loss is the mean cross-entropy of `model(x)` and y;
# - the optimizer is `torch.optim.SGD` with a learning rate of 0.5, and all replicas train as one on all samples;
# - it returns `{"loss": ..., "accuracy": ...}`: the loss of this replica's samples, and the fraction of right answers
#   among the samples of *all* replicas, computed from the same scores. All replicas have equally many samples.
#
# Create permanent objects (the optimizer) in `build_step`; `step_fn` runs in every step. The check runs your code on
# the three engines, one process per replica, and then in one process, where it is captured as a graph. The lecture's
# example counts right answers; here you return a fraction.

# %% tags=["stub"]
# %%px
def build_step(replicator, model):
    # what stays

    def step_fn(inputs):
        x, y = inputs
        loss = cross_entropy(model(x), y)
        return {"loss": loss, "accuracy": None}

    return step_fn

# %% tags=["solution"]
# %%px
def build_step(replicator, model):
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    def step_fn(inputs):
        x, y = inputs
        scores = model(x)
        loss = cross_entropy(scores, y)
        optimizer.minimize(loss)
        right = (scores.argmax(1) == y).double().mean()
        return {"loss": loss, "accuracy": replicator.map_reduce(right, "mean")}

    return step_fn

# %%
lab.check("step-build")

# %% [markdown]
# This code contains no rank, no communicator, and no number of replicas. The caller chooses them: `Replicator(comm)`,
# or `Replicator(replicas=3)`.
#
# ## If you have time
#
# - Cut an `nn.Embedding` by words: which rows does a rank look up, which values does it return for the other rows, and
#   where is g?
# - Let `MyMLP` allow any number of hidden features (`slice_of` in `dtlib.parallel.tensor.functions`).
# - Put `MyMLP` on `world.mesh(data=..., tensor=...)["tensor"]`, inside `DataParallel` on the other axis. Which ranks must begin with
#   the same slices?
# - Give `step_fn` a loss in which each sample is compared with the samples of all replicas: `replicator.map_gather(model(x))`.
