# %% [markdown]
# # 12b Experts: exercises
#
# *Predict* (two minutes), *fix* a balance loss (five minutes), and *build* a dispatch that loses no token (twenty
# minutes). A check looks at your answer on all ranks and says what is wrong; check again for the next hint.
#
# **You need** the lecture [12b Experts](../lectures/12b_experts.ipynb). Answers:
# [solutions](../solutions/12b_experts_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
from torch import distributed as dist

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# - There are eight ranks with one expert each, top-2, and 1,000 tokens per rank, spread evenly over experts. How many
#   rows does a rank send to other ranks, forward, on the way to the experts?
# - There are 64 experts, top-2, 4,096 tokens per rank, and a capacity of 1.25. How many places does an expert have for
#   the tokens of one rank?

# %% tags=["stub"]
lab.predict("rows-that-leave", None)
lab.predict("capacity-of-an-expert", None)

# %% tags=["solution"]
lab.predict("rows-that-leave", 1750)
lab.predict("capacity-of-an-expert", 160)

# %% [markdown]
# ## Fix: a loss for the balance
#
# `probabilities` (tokens, experts) are the gate's probabilities, and `chosen` (tokens, top) are the experts that the
# gate has chosen. All ranks have equally many tokens. The mean of `balance` over ranks must be the loss of *all*
# tokens: experts · Σ (share of the choices) · (mean probability). Gradients are averaged over ranks, too. If all
# experts are chosen equally often, counted over all ranks, the gate's gradient should be zero. With this code it is
# not. Fix this.

# %% tags=["stub"]
# %%px
def balance(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    share = chosen.flatten().bincount(minlength=experts) / chosen.numel()
    return experts * (share * probabilities.mean(0)).sum()

# %% tags=["solution"]
# %%px
def balance(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    share = chosen.flatten().bincount(minlength=experts) / chosen.numel()
    dist.all_reduce(share, op=dist.ReduceOp.AVG, group=comm.group)
    return experts * (share * probabilities.mean(0)).sum()

# %%
lab.check("balance-fix")

# %% [markdown]
# ## Build: a dispatch that loses no token
#
# Rank r has expert r. `x` (tokens, width) are this rank's tokens; ranks have different numbers of tokens, and some have
# none. `chosen` (tokens,) is the expert of each token, int64. `expert(rows)` is this rank's expert, and takes any
# number of rows. Write `dispatch(comm, x, chosen, expert)`: it returns (tokens, width), the result of each token's
# expert, in the order of `x`.
#
# - A row travels to its expert, and its result travels back. No other row travels.
# - `dist.all_to_all_single(out, tensor, group=comm.group)` exchanges equal pieces; with two lists `received, sent`
#   after `tensor`, it exchanges different numbers of rows: `sent[r]` rows to rank r, and `received[r]` rows from rank
#   r.

# %% tags=["stub"]
# %%px
def dispatch(comm, x, chosen, expert):
    return expert(x)  # your lines here

# %% tags=["solution"]
# %%px
def dispatch(comm, x, chosen, expert):
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=comm.size)
    sent = counts.tolist()
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=comm.group)
    received = theirs.tolist()
    arrived = x.new_empty(sum(received), x.shape[1])
    back, out = torch.empty_like(x), torch.empty_like(x)
    dist.all_to_all_single(arrived, x[order], received, sent, group=comm.group)
    dist.all_to_all_single(back, expert(arrived), sent, received, group=comm.group)
    out[order] = back
    return out

# %%
lab.check("dispatch-build")

# %% [markdown]
# ## If you have time
#
# - `dispatch` has no gradients: send them back, by a `torch.autograd.Function` whose backward is the reverse exchange.
# - Give each expert places for four tokens of each rank, and drop the others: how long are messages now?
