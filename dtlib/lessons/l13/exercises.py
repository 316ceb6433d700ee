# %% [markdown]
# # 13 When the network is slow: exercises
#
# *Predict* (three minutes), *fix* an outer step and feedback (five minutes each: ten minutes), *build* top-k with feedback
# (twenty minutes), and a race (fifteen minutes, or longer). A check looks at your answer on all ranks and
# says what is wrong; check again for the next hint.
#
# **You need** the lecture [13 When the network is slow](../lectures/13_slow_network.ipynb). Answers:
# [solutions](../solutions/13_slow_network_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import math

import dtlib
import torch
from torch import nn

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# - Four ranks average a million gradients by top-k, and send 1 % of the gradients. A value has 4 bytes, and so has a
#   place. How many bytes does a rank send by the all-gather?
# - A step computes for 0.1 s, and its message takes 0.9 s. How many steps are there in an hour, with DDP and with rounds
#   of H = 100 local steps?

# %% tags=["stub"]
lab.predict("top-1-percent-sends", None)
lab.predict("steps-of-an-hour", {"DDP": None, "H = 100": None})

# %% tags=["solution"]
lab.predict("top-1-percent-sends", 240_000)
lab.predict("steps-of-an-hour", {"DDP": 3600, "H = 100": 33_000})

# %% [markdown]
# ## Fix: momentum in the wrong place
#
# At the end of a round, `outer_step` gets the parameters at the beginning of the round (`start`, the same on all
# ranks), this rank's `parameters`, and the outer optimizer's `velocity`, which remembers previous rounds. The *outer
# gradient* is the mean over ranks of `start - parameters`. The function takes a step with Nesterov momentum, and
# returns the next start and the velocity. The loss falls, but the ranks' parameters drift apart. Fix it.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


def outer_step(comm, start, parameters, velocity, rate, momentum):
    gradient = start - parameters
    velocity = momentum * velocity + gradient
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=comm.group)
    return start - rate * (gradient + momentum * velocity), velocity

# %% tags=["solution"]
# %%px
from torch import distributed as dist


def outer_step(comm, start, parameters, velocity, rate, momentum):
    gradient = start - parameters
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=comm.group)
    velocity = momentum * velocity + gradient
    return start - rate * (gradient + momentum * velocity), velocity

# %%
lab.check("outer-fix")

# %% [markdown]
# ## Fix: feedback that is forgotten
#
# `compress` reduces each number to one bit: its sign, times the mean size of all numbers. (The rounding is real; the
# all-reduce still sends full numbers.) The function gets this rank's gradient and the error that was kept in the
# previous step. The function returns the mean over ranks, and the error to keep for the next step. But the kept error
# gets lost. Fix it.

# %% tags=["stub"]
# %%px
def compress(comm, gradient, kept):
    sent = gradient.sign() * gradient.abs().mean()
    kept = gradient - sent
    return comm.all_reduce(sent, op="mean"), kept

# %% tags=["solution"]
# %%px
def compress(comm, gradient, kept):
    wanted = gradient + kept
    sent = wanted.sign() * wanted.abs().mean()
    kept = wanted - sent
    return comm.all_reduce(sent, op="mean"), kept

# %%
lab.check("feedback-fix")

# %% [markdown]
# ## Build: top-k with feedback
#
# Write `top_k(comm, gradient, kept, fraction)`, for tensors of one dimension.
#
# - Each rank adds the kept values to its gradient. Then it sends the k = ceil(fraction · n) elements of this sum that
#   are largest in size.
# - The function returns the mean over ranks of the sent elements, as a tensor of n elements, and the values to keep
#   now.
# - Each rank sends k places and k values, not n numbers: `dist.all_gather_single(out, tensor, group=comm.group)`
#   collects the `tensor` of all ranks in `out`.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


def top_k(comm, gradient, kept, fraction):
    return gradient, kept  # your lines here

# %% tags=["solution"]
# %%px
from torch import distributed as dist


def top_k(comm, gradient, kept, fraction):
    wanted = gradient + kept
    k = math.ceil(fraction * len(wanted))
    places = wanted.abs().topk(k).indices
    everyones_places = places.new_empty(comm.size * k)
    everyones_values = wanted.new_empty(comm.size * k)
    dist.all_gather_single(everyones_places, places, group=comm.group)
    dist.all_gather_single(everyones_values, wanted[places], group=comm.group)
    mean = torch.zeros_like(wanted)
    mean.index_add_(0, everyones_places, everyones_values / comm.size)
    return mean, wanted.index_fill(0, places, 0)

# %%
lab.check("top-k-build")

# %% [markdown]
# ## The race: byte golf, once more
#
# This is the game of lesson 04. Each rank has only a few of the digits. Get 95 % of the test images right with as few
# bytes as possible. Par is forty steps in 16 bits. Now you know more ways. `lab.scores()` keeps your best; compare it
# with the class.

# %% tags=["stub"]
# %%px
from dtlib.lab import digits


def golf(comm, x, y):
    net = digits.net(hidden=32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        for parameter in net.parameters():
            comm.all_reduce(parameter.grad, op="mean")
        optimizer.step()
    return net

# %% tags=["solution"]
# %%px
from dtlib.lab import digits


def golf(comm, x, y):
    net = digits.net(hidden=32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    kept = torch.zeros(sum(p.numel() for p in net.parameters()))
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters()])
        mean, kept = top_k(comm, flat, kept, 0.05)
        pieces = mean.split([p.numel() for p in net.parameters()])
        for p, piece in zip(net.parameters(), pieces, strict=True):
            p.grad = piece.view_as(p)
        optimizer.step()
    return net

# %% tags=["nbval-ignore-output"]
lab.check("byte-golf")

# %% [markdown]
# ## If you have time
#
# - Send places as `int32` in place of `int64`: how many bytes fewer?
# - Register your `top_k` as a hook: `model.register_comm_hook(state, hook)`, of `DataParallel` and of torch's DDP.
# - Play byte golf with local steps: how many rounds are enough?
