# %% [markdown]
# # 06 ZeRO: exercises
#
# Six exercises: *predict* bytes (five minutes), *fix* a stage 2 that saves nothing (five minutes), *find* two leaks
# (ten minutes), *build* sharded Adam (thirty minutes), *build* a layer that is gathered on demand (fifteen minutes),
# and *fit* a large model (ten minutes). A check looks at your answer on all ranks: at values, at the bytes sent, and at
# the memory in use. Check again for the next hint.
#
# **You need** the lecture [06 ZeRO](../lectures/06_zero.ipynb). Answers:
# [solutions](../solutions/06_zero_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from dtlib import lab
from dtlib.lab import digits

world = dtlib.init()

# %% [markdown]
# ## Predict: what a rank holds
#
# The net has 64 inputs, 128 hidden units and 10 outputs, with biases, in float32. Three ranks train it with AdamW,
# which keeps two running means per parameter. How many bytes of parameters, of gradients (between backward and step)
# and of optimizer states does rank 0 hold at each stage? Stage 0 is data parallelism. If a size does not divide evenly,
# its shards are rounded up: an answer 0.1 % off counts as right.
#
# Replace each `None`. You may write expressions in `P`.

# %% tags=["stub"]
P = 64 * 128 + 128 + 128 * 10 + 10  # parameters
lab.predict("held-at-stage-0", {"parameters": None, "gradients": None, "optimizer": None})
lab.predict("held-at-stage-1", {"parameters": None, "gradients": None, "optimizer": None})
lab.predict("held-at-stage-2", {"parameters": None, "gradients": None, "optimizer": None})
lab.predict("held-at-stage-3", {"parameters": None, "gradients": None, "optimizer": None})

# %% tags=["solution"]
P = 64 * 128 + 128 + 128 * 10 + 10  # parameters
whole, third = 4 * P, 4 * P // 3
lab.predict("held-at-stage-0", {"parameters": whole, "gradients": whole, "optimizer": 2 * whole})
lab.predict("held-at-stage-1", {"parameters": whole, "gradients": whole, "optimizer": 2 * third})
lab.predict("held-at-stage-2", {"parameters": whole, "gradients": third, "optimizer": 2 * third})
lab.predict("held-at-stage-3", {"parameters": third, "gradients": third, "optimizer": 2 * third})

# %% [markdown]
# Now the run. `dtlib.memory` counts the storages of tensors, each once.

# %%
# %%px
(x, y), _ = digits.load()

def held(stage):
    config = {"train_micro_batch_size_per_gpu": 48, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW"}
    engine, *_ = dtlib.initialize(model=digits.net(hidden=128), config=config, comm=world.comm)
    with dtlib.memory(engine) as m:
        engine.backward(cross_entropy(engine(x[:48]), y[:48]))
        engine.step()
    return m.parameters, m.gradients, m.optimizer_states

held_at = [held(stage) for stage in range(4)]

# %% [markdown]
# ## Fix: a stage 2 that saves nothing
#
# `shard_gradients(comm, module)` sets a hook on each parameter. The function returns a dictionary. After `backward()`
# this dictionary has this rank's shard of each averaged gradient: flat, `length` elements, padded with zeros at the
# end. The values are right. But each rank sends as much as in data parallelism, and holds as much. Reduce both.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


def shard_gradients(comm, module):
    shards = {}

    def gradient_is_ready(parameter):
        length = -(-parameter.numel() // comm.size)  # rounded up
        flat = torch.zeros(length * comm.size, dtype=parameter.dtype)
        flat[: parameter.numel()] = parameter.grad.flatten()
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=comm.group)
        shards[parameter] = flat[comm.rank * length : (comm.rank + 1) * length]
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)
    return shards

# %% tags=["solution"]
# %%px
from torch import distributed as dist


def shard_gradients(comm, module):
    shards = {}

    def gradient_is_ready(parameter):
        length = -(-parameter.numel() // comm.size)  # rounded up
        flat = torch.zeros(length * comm.size, dtype=parameter.dtype)
        flat[: parameter.numel()] = parameter.grad.flatten()
        own = torch.empty(length, dtype=parameter.dtype)
        dist.reduce_scatter_single(own, flat, op=dist.ReduceOp.AVG, group=comm.group)
        shards[parameter] = own
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)
    return shards

# %%
lab.check("zero2-fix")

# %% [markdown]
# With the bug, `shards` looked small: its tensors have `length` elements each. But a slice is a view, and a view keeps
# the whole storage behind it alive. The size of a tensor is not the memory that it keeps: look at
# `tensor.untyped_storage().nbytes()`.

# %% [markdown]
# ## Find the leak
#
# A run at stage 2 has the right losses, but after an hour it runs out of memory. `ShardedSteps` is its training step.
# After `step(x, y)`, which returns the loss, `shards` has this rank's shard of each averaged gradient, and `guesses`
# the first row of each step's output, for a plot.

# %% tags=["stub"]
# %%px
class ShardedSteps:
    def __init__(self, comm, model):
        self.comm, self.model, self.shards, self.sent, self.guesses = comm, model, {}, [], []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def gradient_is_ready(self, parameter):
        padding = 0, -parameter.numel() % self.comm.size
        flat, parameter.grad = nn.functional.pad(parameter.grad.flatten(), padding), None
        own = self.shards[parameter] = flat.new_empty(len(flat) // self.comm.size)
        self.sent.append((self.comm.reduce_scatter(own, flat, op="mean", async_op=True), flat))

    def step(self, x, y):
        loss = cross_entropy(output := self.model(x), y)
        loss.backward()
        for handle, _ in self.sent:
            handle.wait()
        self.guesses.append(output[0].detach())
        return loss.item()

# %% tags=["solution"]
# %%px
class ShardedSteps:
    def __init__(self, comm, model):
        self.comm, self.model, self.shards, self.sent, self.guesses = comm, model, {}, [], []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def gradient_is_ready(self, parameter):
        padding = 0, -parameter.numel() % self.comm.size
        flat, parameter.grad = nn.functional.pad(parameter.grad.flatten(), padding), None
        own = self.shards[parameter] = flat.new_empty(len(flat) // self.comm.size)
        self.sent.append((self.comm.reduce_scatter(own, flat, op="mean", async_op=True), flat))

    def step(self, x, y):
        loss = cross_entropy(output := self.model(x), y)
        loss.backward()
        while self.sent:
            self.sent.pop(0)[0].wait()
        self.guesses.append(output[0].detach().clone())
        return loss.item()

# %% [markdown]
# `Live` counts the bytes of live tensors, for each line that allocated them. Here it counts after one step and after
# four.

# %%
# %%px
from dtlib.measure.live import Live

net = digits.net(hidden=128)
with Live(*net.parameters()) as live:
    steps, alive = ShardedSteps(world.comm, net), []
    for at in range(4):
        steps.step(x[48 * at : 48 * at + 48], y[48 * at : 48 * at + 48])
        alive.append({text: count for count, _, text in live.by_line()})
if world.rank == 0:
    lines = [(text, alive[0].get(text, 0), count) for text, count in alive[3].items()]
    lab.table(lines[:6], ("line that allocates", "bytes after 1 step", "bytes after 4 steps"))

# %% [markdown]
# The first line is the net, which existed before. Which lines grow? Find the attributes that keep their memory. After
# your fix, step four may hold as much as step one, plus one row for each step. Shards, guesses and losses must stay
# right.

# %%
lab.check("zero-leak")

# %% [markdown]
# ## Build: sharded Adam
#
# You write stage 1 by hand. Write a class with two methods:
#
# - `ShardedAdam(comm, parameters, **settings)`: `settings` are the arguments of `torch.optim.AdamW`. The parameters
#   have the same values on all ranks, and one dtype.
# - `step()`, called on every rank after `backward()`: afterwards all ranks have the parameters that one process
#   has after a step with the mean gradient of all ranks. Every parameter has a gradient.
#
# 1. Put all parameters into one flat tensor, padded with zeros at the end so that it divides evenly by `comm.size`. Let
#    each `parameter.data` be a view of this tensor.
# 2. This rank's shard of the flat tensor is one `nn.Parameter`. Pass only this parameter to `torch.optim.AdamW`.
# 3. A step is `dist.reduce_scatter_single(own, flat, group=comm.group)` of gradients, AdamW on this rank's shard,
#    `dist.all_gather_single(flat, own, group=comm.group)` of the new values.
#
# Example: 535 parameters on 3 ranks make shards of 179 elements; the last 2 elements on rank 2 are padding.
#
# Between two steps a rank holds all parameters once. For its shard it holds the two running means, the gradient and, if
# you like, a copy of the values. A rank holds nothing else that is large: free flat gradients before `step()` returns.
# (Each `parameter.grad` belongs to the training loop: `zero_grad()` frees it.) The check counts every tensor in the
# process, and your arrays, bytes and lists of floats too.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


class ShardedAdam:
    def __init__(self, comm, parameters, **settings):
        self.comm, self.parameters = comm, list(parameters)
        self.sizes = [parameter.numel() for parameter in self.parameters]

    def step(self):
        ...

# %% tags=["solution"]
# %%px
from torch import distributed as dist


class ShardedAdam:
    def __init__(self, comm, parameters, **settings):
        self.comm, self.parameters = comm, list(parameters)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = self.flattened(parameter.detach() for parameter in self.parameters)
        views = self.flat[: sum(self.sizes)].split(self.sizes)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view.view_as(parameter)
        self.own = nn.Parameter(self.flat.chunk(comm.size)[comm.rank])
        self.adam = torch.optim.AdamW([self.own], **settings)

    def flattened(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.comm.size))

    def step(self):
        gradients = self.flattened(parameter.grad for parameter in self.parameters)
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter_single(self.own.grad, gradients, group=self.comm.group)
        self.own.grad /= self.comm.size
        self.adam.step()
        dist.all_gather_single(self.flat, self.own.detach(), group=self.comm.group)

# %%
lab.check("sharded-adam")

# %% [markdown]
# This sends as much as data parallelism: `all_reduce` is `reduce_scatter` and then `all_gather`, and Adam now steps
# between the two. Adam updates each element separately, so a shard may begin in the middle of a
# weight.
#
# This is `Stage1` of the lecture. The full `ZeroOptimizer` has buckets, groups, unused parameters, clipping, and master
# weights for 16 bits.
#
# ## Build: gather on demand
#
# Stage 3 for one layer, forward only: the check calls it under `torch.no_grad()`. Write a class that replaces an
# `nn.Linear`:
#
# - `OnDemand(comm, layer)`: `layer` is the same on all ranks. Keep this rank's shard of its weight and bias, padded as
#   before, and free the rest.
# - `__call__(x)`, called on every rank, with different samples: gather the parameters, compute, free them, return the
#   output.
#
# The check finds every other large tensor that exists before or after a call.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


class OnDemand:
    def __init__(self, comm, layer):
        self.comm, self.shape = comm, layer.weight.shape  # (outputs, inputs)

    def __call__(self, x):
        ...

# %% tags=["solution"]
# %%px
from torch import distributed as dist


class OnDemand:
    def __init__(self, comm, layer):
        self.comm, self.shape = comm, layer.weight.shape  # (outputs, inputs)
        flat = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
        flat = nn.functional.pad(flat, (0, -len(flat) % comm.size))
        self.own = flat.chunk(comm.size)[comm.rank].clone()

    def __call__(self, x):
        whole = torch.empty(len(self.own) * self.comm.size, dtype=self.own.dtype)
        dist.all_gather_single(whole, self.own, group=self.comm.group)
        outputs, inputs = self.shape
        weight, bias = whole[: outputs * inputs], whole[outputs * inputs :][:outputs]
        return linear(x, weight.view(self.shape), bias)

# %%
lab.check("gather-on-demand")

# %% [markdown]
# Here a tensor is freed when its local name goes out of scope. In training autograd would keep `weight` until the
# backward pass, and all layers would be whole at the end of the forward pass. So `fully_shard` frees the storage of
# this tensor. When the backward pass returns to the layer, another `all_gather` fills the storage again.

# %% [markdown] tags=["two-hours", "half-day"]
# ## Fit it
#
# A model has 7.5 billion parameters, and is trained with Adam in mixed precision: 2 + 2 + 12 bytes per parameter. Each
# rank has 16 GB for these states alone (10⁹ bytes each). What is the smallest number of ranks? Give the stage, the number of ranks, and the
# gigabytes that each rank then holds.

# %% tags=["two-hours", "half-day", "stub"]
# %%px
fit = {"stage": None, "ranks": None, "gigabytes": None}

# %% tags=["two-hours", "half-day", "solution"]
# %%px
from math import ceil

parameters, budget = 7.5e9, 16e9
ranks = ceil(16 * parameters / budget)  # stage 3: 16 / N bytes a parameter
fit = {"stage": 3, "ranks": ranks, "gigabytes": 16 * parameters / ranks / 1e9}

# %% tags=["two-hours", "half-day"]
lab.check("fit-it")

# %% tags=["statement"]
# "4 bytes per parameter stay whole, and that is 30 GB. Stage 2 leaves 15 GB whole"
# "On equally many ranks, stage 2 sends a third less than stage 3."
ranks, held, sent = found(r"(\d+) ranks at stage 3 hold (\d+) GB each and send ([\d.]+) GB")
many, sent_2 = found(r"stage 2 needs (\d+) ranks, and sends ([\d.]+) GB")
assert held <= 16 and many > 10 * ranks and (4 * 7.5, 2 * 7.5) == (30, 15) and abs(sent_2 / (105 - 1) * 105 - 30) < 0.1
# 3 units on as many ranks are half as much again as 2
assert abs(2 / 3 - 0.667) < 0.001

# %% [markdown]
# Stage 1 never fits: 4 bytes per parameter stay whole, and that is 30 GB. Stage 2 leaves 15 GB whole, so the rest has
# to fit into one gigabyte: that takes many ranks. On equally many ranks, stage 2 sends a third less than stage 3. With
# cards of 16 GiB, 7 % more than 16 GB, seven ranks are enough.
#
# ## If you have time
#
# - Which stages would fit if gradients were kept in float32 (18 bytes per parameter)?
# - Let `ShardedAdam` reduce in buckets during the backward pass, and free gradients: that is stage 2. How many bytes
#   does a rank send with gradient accumulation now?
# - Make `OnDemand` trainable: a `torch.autograd.Function` that saves `x` alone, gathers again in `backward`, and calls
#   `reduce_scatter` for the gradients.
