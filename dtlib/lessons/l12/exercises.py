# %% [markdown]
# # 12 Long sequences: exercises
#
# *Predict* (three minutes), *fix* two mistakes (ten minutes), and *build* the merge of two blocks (ten minutes). A check looks at your answer on all ranks and says what is wrong; check again for the next
# hint.
#
# **You need** the lecture [12 Long sequences](../lectures/12_sequences.ipynb). Answers:
# [solutions](../solutions/12_sequences_exercises.ipynb).

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
# - Eight ranks divide a sequence; attention is causal. In how many of the ring's eight steps does rank 3 have work,
#   with contiguous slices?
# - A step ends with its slowest rank. On eight ranks, what fraction of the time of eight contiguous steps do eight
#   zigzag steps take?

# %% tags=["stub"]
lab.predict("steps-with-work", None)
lab.predict("zigzag-on-eight", None)

# %% tags=["solution"]
lab.predict("steps-with-work", 4)
lab.predict("zigzag-on-eight", 16 / 30)

# %% [markdown]
# ## Fix: a softmax in blocks
#
# This function computes attention of this rank's queries, one block of keys at a time (the *online softmax*). `top` is
# the largest score so far, `total` the sum of exp(score - top), and `out` the sum of exp(score - top) times the values;
# at the end `out / total[:, None]` is the average. At first `top` is -inf, and `total` and `out` are zero. `scores` has
# one row per query. The code is right for some inputs only. Fix it.

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
# The ring keeps averages, not sums. `out` (queries, width) is the average of the values so far, and `lse` (queries,)
# the log-sum-exp of their scores; `block_out` and `block_lse` are the same two for a new block. Write `merge`: it
# returns both for all keys together. Scores may be large: exp(10,000) is not a finite number. At first `out` is 0 and
# `lse` is -inf.

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
# This is the backward ring. In step s a rank has only the keys of rank - s. `summand(owner)` returns the part of their
# gradients from this rank's queries. The gradients travel behind the keys, and each rank adds its own part. `pass_on`
# starts to send a tensor to the next rank and to receive one from the previous rank, and returns a function that waits
# for it. Outputs and gradients of queries are right. Each gradient of keys is complete, but it ends on the wrong rank.
# Fix this.

# %% tags=["stub"]
# %%px
def pass_on(comm, tensor):
    arriving, group = torch.empty_like(tensor), comm.group
    works = [
        dist.isend(tensor, group_dst=(comm.rank + 1) % comm.size, group=group),
        dist.irecv(arriving, group_src=(comm.rank - 1) % comm.size, group=group),
    ]
    return lambda: ([work.wait() for work in works], arriving)[1]


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
def pass_on(comm, tensor):
    arriving, group = torch.empty_like(tensor), comm.group
    works = [
        dist.isend(tensor, group_dst=(comm.rank + 1) % comm.size, group=group),
        dist.irecv(arriving, group_src=(comm.rank - 1) % comm.size, group=group),
    ]
    return lambda: ([work.wait() for work in works], arriving)[1]


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
# ## If you have time
#
# - Put your `merge` into the ring: `plain.merge = merge`, with `from dtlib.parallel.context import plain`, and run
#   `plain.ring_attention`. There `out` has more dimensions: `[..., None]` in place of `[:, None]`.
# - Give `add_block` a mask, so that queries do not use later keys. What happens to a query without any key in a block?
