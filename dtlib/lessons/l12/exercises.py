# %% [markdown]
# # 12 Long sequences and experts: exercises
#
# *Predict* (three minutes), *fix* a softmax in blocks, a last hop, and a loss for balance (five minutes each:
# fifteen minutes), and *build* the merge of two blocks (ten minutes) and a dispatch that loses no token (twenty
# minutes). A check looks at your answer on all ranks and says what is wrong; check again for the next hint.
#
# **You need** the lecture [12 Long sequences and experts](../lectures/12_sequences_and_experts.ipynb); for *balance* and
# *dispatch* its second half is enough, and for the others its first. Answers:
# [solutions](../solutions/12_sequences_and_experts_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
from dtlib.parallel.context.plain import pass_on

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# - Eight ranks share a sequence, causal. In how many of the ring's eight steps is there work for rank 3, with contiguous
#   slices?
# - A step ends with its slowest rank. On eight ranks, what fraction of the time of eight contiguous steps do eight
#   zigzag steps take?
# - Eight ranks, an expert each, top-2, and 1,000 tokens a rank; choices are spread evenly. How many rows leave a rank
#   for others, forward, on the way to the experts?

# %% tags=["stub"]
lab.predict("steps-with-work", None)
lab.predict("zigzag-on-eight", None)
lab.predict("rows-that-leave", None)

# %% tags=["solution"]
lab.predict("steps-with-work", 4)
lab.predict("zigzag-on-eight", 16 / 30)
lab.predict("rows-that-leave", 1750)

# %% [markdown]
# ## Fix: a softmax in blocks
#
# Attention of this rank's queries, one block of keys after the other (the *online softmax*). `top` is the largest score so
# far, `total` the sum of exp(score - top), and `out` the sum of exp(score - top) times the values; in the end `out /
# total[:, None]` is the average. At first `top` is -inf, and the others are zero. `scores` has one row per query. The code
# is right for some inputs only. Fix it.

# %% tags=["stub"]
# %%px
def add_block(scores, values, top, total, out):
    new_top = torch.maximum(top, scores.amax(-1))
    weights = (scores - new_top[:, None]).exp()
    total = total * (top - new_top).exp() + weights.sum(-1)
    out = out + weights @ values
    return new_top, total, out

# %% tags=["solution"]
# %%px
def add_block(scores, values, top, total, out):
    new_top = torch.maximum(top, scores.amax(-1))
    weights = (scores - new_top[:, None]).exp()
    rescaled = (top - new_top).exp()
    total = total * rescaled + weights.sum(-1)
    out = out * rescaled[:, None] + weights @ values
    return new_top, total, out

# %%
lab.check("rescaling-fix")

# %% [markdown]
# ## Build: the merge of two blocks
#
# The ring keeps averages, not sums. `out` (queries, width) is the average of the values so far, and `lse` (queries,) the
# log-sum-exp of their scores; `block_out` and `block_lse` are those of a new block. Write `merge`: it returns both for all
# keys together. Scores may be large: exp(10,000) is no number. At first `out` is 0 and `lse` is -inf.

# %% tags=["stub"]
# %%px
def merge(out, lse, block_out, block_lse):
    return out, lse  # your lines here

# %% tags=["solution"]
# %%px
def merge(out, lse, block_out, block_lse):
    total = torch.logaddexp(lse, block_lse)
    share, block_share = (lse - total).exp(), (block_lse - total).exp()
    return share[:, None] * out + block_share[:, None] * block_out, total

# %%
lab.check("merge-build")

# %% [markdown]
# ## Fix: the last hop
#
# The backward ring. In step s a rank has the keys of rank - s and no others, and `summand(owner)` is what its queries add
# to their gradients. These travel behind the keys, and each rank adds its own. `pass_on(comm, tensor)` starts to give a
# tensor to the next rank; what it returns, when called, waits for what the rank before gives. The outputs are perfect, and
# so are the gradients of the queries; no gradient is incomplete. And yet no rank gets the gradients of its own keys. Fix
# it.

# %% tags=["stub"]
# %%px
def send_home(comm, summand):
    travelling = None
    for step in range(comm.size):
        owner = (comm.rank - step) % comm.size
        here = summand(owner)
        if step > 0:
            here = here + pass_on(comm, travelling)()
        travelling = here
    return travelling

# %% tags=["solution"]
# %%px
def send_home(comm, summand):
    travelling = None
    for step in range(comm.size):
        owner = (comm.rank - step) % comm.size
        here = summand(owner)
        if step > 0:
            here = here + pass_on(comm, travelling)()
        travelling = here
    return pass_on(comm, travelling)()

# %%
lab.check("last-hop-fix")

# %% [markdown]
# ## Fix: a loss for the balance
#
# `probabilities` (tokens, experts) are the gate's, and `chosen` (tokens, top) are the experts that it has chosen. All ranks
# have as many tokens. Averaged over ranks, what `balance` returns is to be the loss of *all* tokens: experts · Σ (share of
# the choices) · (mean probability). Its gradients are averaged over ranks, too. With this one the gate
# gets a gradient even where, over all ranks, all experts get as much; it should be zero there. Fix it.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


def balance(comm, probabilities, chosen):
    experts = probabilities.shape[1]
    share = chosen.flatten().bincount(minlength=experts) / chosen.numel()
    return experts * (share * probabilities.mean(0)).sum()

# %% tags=["solution"]
# %%px
from torch import distributed as dist


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
# Rank r has expert r. `x` (tokens, width) are this rank's tokens, of which ranks have different numbers, and some none;
# `chosen` (tokens,) is the expert of each, int64. `expert(rows)` is this rank's, and takes any number of rows. Write
# `dispatch(comm, x, chosen, expert)`: it returns (tokens, width), for each token what its expert computes, in the order of
# `x`.
#
# - A row travels to its expert, and what is computed of it travels back. No other row travels.
# - `dist.all_to_all_single(out, tensor, group=comm.group)` exchanges equal pieces; with `received, sent` after `tensor`, as
#   many rows as two lists say: `sent[r]` rows go to rank r, `received[r]` arrive from it.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


def dispatch(comm, x, chosen, expert):
    return expert(x)  # your lines here

# %% tags=["solution"]
# %%px
from torch import distributed as dist


def dispatch(comm, x, chosen, expert):
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=comm.size)
    sent = counts.tolist()
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=comm.group)
    received = theirs.tolist()
    arrived, back, out = x.new_empty(sum(received), x.shape[1]), torch.empty_like(x), torch.empty_like(x)
    dist.all_to_all_single(arrived, x[order], received, sent, group=comm.group)
    dist.all_to_all_single(back, expert(arrived), sent, received, group=comm.group)
    out[order] = back
    return out

# %%
lab.check("dispatch-build")

# %% [markdown]
# ## If you have time
#
# - Put your `merge` into the ring: `plain.merge = merge`, with `from dtlib.parallel.context import plain`, and run
#   `plain.ring_attention`. There `out` has more dimensions: `[..., None]` in place of `[:, None]`.
# - `dispatch` has no gradients: make them travel, by a `torch.autograd.Function` whose backward is the reverse exchange.
# - Give each expert places for four tokens of each rank, and drop the others: how long are messages now?
