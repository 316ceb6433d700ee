# %% [markdown]
# # 12 Long sequences
#
# Forty-five minutes. You cut the *sequence*. Then attention needs tokens of other ranks. You move them in three ways:
# in a ring, by an exchange of heads, and by gathering all keys.
#
# **Questions.** Which rank is the bottleneck of a ring, and how does another order help? Which way sends the fewest
# bytes? Which gradients can be wrong although every output is right?
#
# **Afterwards you can** run attention in a ring or by exchanges of heads; count the bytes that each way sends; write a
# loss for ranks with different numbers of tokens.
#
# **You need** lesson 03 and the first half of lesson 04. [12b](12b_experts.ipynb) divides *experts* in place of tokens.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
from functools import partial

import dtlib
import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from dtlib import lab
from dtlib.lessons.l12 import axes, figures, work
from dtlib.parallel.context import ContextParallel, plain, plain_ulysses
from dtlib.parallel.data import DataParallel


# %%
# %%px
world = dtlib.init()
comm, alone = world.comm, world.comm.split(world.rank)  # all ranks; this one


def equal(a, b):
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-12)


# %% [markdown]
# ## Attention over other ranks' tokens
#
# One tensor of a million tokens, 8,192 numbers of 16 bits each, has 16 GB, and a layer keeps many such tensors. So each
# rank gets a slice of the text. Most layers work token by token, and need no change. Attention must change: a query
# needs the keys of all previous tokens. How does a query get keys from other ranks?
#
# Attention over one block of keys is a weighted average of values, Σ exp(score) · value / Σ exp(score). The logarithm
# of its denominator is the *log-sum-exp*. To merge blocks, weight each average in proportion to its denominator: with
# denominators 3 and 1, the weights are 3/4 and 1/4. Here are eight keys, in blocks of five and three:

# %%
torch.manual_seed(0)
scores, values = torch.randn(3, 8).double(), torch.randn(8, 2).double()


def of_block(keys):
    return scores[:, keys].softmax(-1) @ values[keys], scores[:, keys].logsumexp(-1)


merged, lse = plain.merge(*of_block(slice(0, 5)), *of_block(slice(5, 8)))
apart = (merged - scores.softmax(-1) @ values).abs().max()
print("merged, and computed at once: " + ("equal to 1e-12" if apart < 1e-12 else "not equal"))

# %% tags=["statement"]
# "weight each average in proportion to its denominator"
assert count("computed at once: equal to 1e-12") == 1

# %% [markdown]
# So keys and values travel round a ring, as gradients do in lesson 03. In step s, rank r has the keys and values of
# rank r - s (modulo N), and merges their average into its result. Attention is *causal*: no query uses later tokens. So
# a block with only later keys costs nothing.
#
# **Predict.** Four ranks with contiguous slices. Which ranks have no work in step 2? Write a list.

# %% tags=["stub"]
lab.predict("who-waits", None)

# %% tags=["solution"]
lab.predict("who-waits", [0, 1])

# %% [markdown]
# The next figures count work, not time: one process simulates each rank in turn (SIMULATED). A *quarter block* is half
# a slice of queries by half a slice of keys.

# %%
contiguous = work.quarter_blocks("contiguous", ranks=4)
figures.work_by_step(contiguous=contiguous)

# %% tags=["statement"]
# "Rank 0 is idle from step 1 on, and all wait for rank 3"
assert row("0", "quarter blocks") == [2, 0, 0, 0] and row("3", "quarter blocks") == [2, 4, 4, 4]

# %% [markdown]
# Rank 0 is idle from step 1 on, and all wait for rank 3: the last tokens use the most keys. So give each rank some of
# the first and some of the last tokens: of 2N chunks, rank r gets chunks r and 2N - 1 - r. This is the *zigzag* order.
#
# **Predict.** A step ends with its slowest rank. What fraction of the time of four contiguous steps do four zigzag
# steps take?

# %% tags=["stub"]
lab.predict("zigzag-over-contiguous", None)

# %% tags=["solution"]
lab.predict("zigzag-over-contiguous", 0.57)

# %%
zigzag = work.quarter_blocks("zigzag", ranks=4)
figures.work_by_step(contiguous=contiguous, zigzag=zigzag)

# %% tags=["statement"]
# "The same work, 32 quarter blocks, and no rank is idle."
both = [rows(f"{rank}", "zigzag: quarter") for rank in range(4)]
assert [zigzag for _, zigzag in both] == [[2, 2, 2, 2]] * 4 and sum(sum(one) for one, _ in both) == 32

# %% [markdown]
# The same work, 32 quarter blocks, and no rank is idle. Now we use real ranks. **Find** the line that starts to send
# the next keys, and the line that waits for them. What runs between these lines?

# %%
lab.read(plain.round_the_ring, plain.RingAttention.forward)


# %%
# %%px
def passes(attention, q, k, v, cotangent):
    """Output and gradients, and records of both passes."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in (q, k, v))
    with dtlib.trace() as forward:
        out = attention(q, k, v)
    with dtlib.trace() as backward:
        out.backward(cotangent)
    return {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}, forward, backward


torch.manual_seed(0)  # the same on all ranks
whole = torch.randn(4, 1, 4, 32, 8, dtype=torch.float64)  # batch, heads, tokens, width
in_one_process, *_ = passes(partial(scaled_dot_product_attention, is_causal=True), *whole)
mine = [plain.my_tokens(tensor, comm, dim=2) for tensor in whole]
found, forward, backward = passes(partial(plain.ring_attention, group=comm.group), *mine)
same = {}
for name, expected in in_one_process.items():
    same[name] = equal(found[name], plain.my_tokens(expected, comm, dim=2))
print("as in one process:", same)

# %% tags=["statement"]
# "Output and gradients equal those of one process, to 1e-12."
assert count("'out': True, 'dq': True, 'dk': True, 'dv': True") == 1

# %% [markdown]
# Output and gradients equal those of one process, to 1e-12. Forward, a rank sends N - 1 = 3 messages, of keys and
# values together. A rank does not keep them: in the backward pass they travel again. And the gradients of each block of
# keys must return to their owner.
#
# **Predict.** How many messages of tensors does a rank send in the backward pass?

# %% tags=["stub"]
lab.predict("messages-backward", None)

# %% tags=["solution"]
lab.predict("messages-backward", 7)

# %%
# %%px
backward_sent = backward.sent("send")
if comm.rank == 0:
    print("messages, bytes: forward", forward.sent("send"), "backward", backward_sent)

# %% tags=["statement"]
# "2N - 1: keys and values again, N - 1 times, and their gradients N times."
assert found(r"forward \((\d+), (\d+)\) backward \((\d+), (\d+)\)")[::2] == [3, 7]

# %% [markdown]
# 2N - 1: keys and values again, N - 1 times, and their gradients N times. The gradients travel one step behind. Each
# rank adds its part, and the last hop sends them to their owner (`RingAttention.backward` in
# dtlib/parallel/context/plain.py):
#
#     for owner, keys and values here:
#         p = exp(scores - lse)                    computed again, as in FlashAttention
#         d_scores = scale * p * (d_out @ v.T - sum(d_out * out));    d_q += d_scores @ k
#         d_kv of the owner = what arrives + (d_scores.T @ q, p.T @ d_out);    pass it on
#
# Mistakes in this code are often *silent*. A published ring used the keys of its first step in the whole backward pass
# (diffusers #14265). Output and loss were perfect. So compare gradients, one by one.
#
# **Discuss.** Your ring has a wrong dk, and the loss still falls. Which test would find the mistake?
#
# ### Heads in place of a ring: Ulysses
#
# Another way needs no ring. For attention, the ranks exchange some tokens of all heads for all tokens of some heads.
# **Find** the two exchanges (*all-to-all*). Which dimension is cut in the first, and which in the second?

# %%
lab.read(plain_ulysses)


# %%
# %%px
mine = [plain.my_tokens(tensor, comm, "contiguous", dim=2) for tensor in whole]
ulysses = partial(plain_ulysses.ulysses_attention, group=comm.group)
found, forward_ulysses, backward_ulysses = passes(ulysses, *mine)
same = {}
for name, expected in in_one_process.items():
    same[name] = equal(found[name], plain.my_tokens(expected, comm, "contiguous", dim=2))
print("as in one process:", same)

# %% [markdown]
# ### A third way: gather all keys
#
# Llama 3 uses neither. Each rank gathers the keys and values of all ranks, and computes its own output. In the backward
# pass a reduce-scatter adds the gradients of each rank's keys:

# %%
# %%px
def gathered(tensor):
    """The tokens of all ranks, in order."""
    every = torch.empty(comm.size, *tensor.shape, dtype=tensor.dtype)
    dist.all_gather_single(every, tensor, group=comm.group)
    return torch.cat(every.unbind(), 2).requires_grad_()


q, k, v, cotangent = mine
with dtlib.trace() as forward_gather:
    keys, values = gathered(k), gathered(v)
rows = torch.arange(32).chunk(comm.size)[comm.rank]  # of this rank
earlier = torch.arange(32) <= rows[:, None]
out = scaled_dot_product_attention(q, keys, values, attn_mask=earlier)
out.backward(cotangent)
dk, dv = torch.empty_like(k), torch.empty_like(v)
with dtlib.trace() as backward_gather:
    for own, whole_one in ((dk, keys), (dv, values)):
        pieces = torch.stack(whole_one.grad.chunk(comm.size, 2))
        dist.reduce_scatter_single(own, pieces, group=comm.group)
same = {}
for name, got in (("out", out), ("dk", dk), ("dv", dv)):
    expected = plain.my_tokens(in_one_process[name], comm, "contiguous", dim=2)
    same[name] = equal(got, expected)
print("as in one process:", same)

# %% [markdown]
# **Predict.** Which of the three sends the fewest bytes on these four ranks, forward and backward together: "ring",
# "Ulysses" or "gather"?

# %% tags=["stub"]
lab.predict("fewest-bytes", None)

# %% tags=["solution"]
lab.predict("fewest-bytes", "Ulysses")

# %%
# %%px
n = mine[0].nbytes  # of this rank's q


def of_tensors(trace):
    """Messages, and bytes over n."""
    events = [event for event in trace.events if event.dtype == "float64" and event.messages]
    return sum(event.messages for event in events), sum(event.bytes for event in events) / n


ways = {
    "ring": (forward, backward),
    "Ulysses": (forward_ulysses, backward_ulysses),
    "gather": (forward_gather, backward_gather),
}
sent = {way: [*of_tensors(there), *of_tensors(back)] for way, (there, back) in ways.items()}

# %%
headers = ("", "messages forward", "bytes / n forward", "messages backward", "bytes / n backward")
table = [(way, *counts) for way, counts in lab.values("sent")[0].items()]
lab.table(table, headers, "Rank 0 of 4; n: bytes of its queries")

# %% tags=["statement"]
# "On four ranks the ring sends 20 n bytes, gathering 12 n, and Ulysses 6 n."
ring, ulysses, gather = (row(way, "bytes of its queries") for way in ("ring", "Ulysses", "gather"))
assert [one[1] + one[3] for one in (ring, gather, ulysses)] == [20, 12, 6]
assert (ring[0], ring[2]) == (3, 7) and ulysses[1] == ulysses[3] == 3 and gather[1] == gather[3] == 6
# "at g = 1/8, as in Llama 3 70B, the ring sends 2.5 n, gathering 1.5 n, and Ulysses 3.4 n"
assert (20 / 8, 12 / 8, round(3 * (1 + 1 / 8), 1)) == (2.5, 1.5, 3.4)
# "4 (N - 1) g n"
assert [(6 * 4 - 4), 4 * (4 - 1), 4 * 2 * 3 / 4] == [20, 12, 6]
# "Gathering 4 · 15 g n = 3.75 n; Ulysses would send 15/16 · 4 (1 + g) n = 3.98 n"
assert (4 * 15 / 16, round(15 / 16 * 4 * 17 / 16, 2)) == (3.75, 3.98) and 4 * 3 == 12 and 3 / 4 * 4 == 3

# %% [markdown]
# On four ranks the ring sends 20 n bytes, gathering 12 n, and Ulysses 6 n. These numbers hold if keys have as many
# heads as queries. Many models have fewer key heads than query heads. Then g is the ratio of the two numbers:
#
# | way | bytes a rank sends, N ranks | sent while computing? | limit |
# |---|---|---|---|
# | ring | (6 N - 4) g n | yes | none |
# | gather | 4 (N - 1) g n | no | memory: all keys on each rank |
# | Ulysses | 4 (1 + g) n (N - 1) / N: queries and outputs too | no | at least one key head per rank |
#
# On four ranks, at g = 1/8, as in Llama 3 70B, the ring sends 2.5 n, gathering 1.5 n, and Ulysses 3.4 n: gathering
# sends the fewest.
#
# **Compute.** Llama 3 405B on sixteen ranks, 8 key and 128 query heads, g = 1/16: how much does each way send, and
# which ways can run?
#
# <details><summary>Answer</summary>Ring 92 g n = 5.75 n. Gathering 4 · 15 g n = 3.75 n; Ulysses would send
# 15/16 · 4 (1 + g) n = 3.98 n, but 8 key heads are too few.</details>
#
# ### Memory, and the right mean

# %%
rows = []
for tokens in (1024, 4096, 16384):
    counted = [f"{work.kept(tokens, ranks) / 1e6:.2f}" for ranks in (1, 4)]
    peak = f"{work.peak(tokens, 4) / 1e6:.2f}"
    rows.append((f"{tokens:,}", *counted, peak, f"{2 * 4 * tokens**2 / 1e6:,.0f}"))
headers = ("tokens", "1 rank", "4 ranks", "4 ranks, peak", "all scores (formula)")
title = "MB that two heads of width 8 keep for the backward pass; live MB at the peak (SIMULATED)"
lab.table(rows, headers, title)

# %% tags=["statement"]
# "Ranks keep no scores: four times the tokens need four times the memory, and each of N ranks keeps an N-th."
# "the peak is quadratic in tokens / N"
short, middle, long = (row(tokens, "keep for the backward") for tokens in ("1,024", "4,096", "16,384"))
assert abs(long[0] / middle[0] - 4) < 0.02 and abs(long[0] / long[1] - 4) < 0.02
assert 12 < long[2] / middle[2] < 16 and long[2] > 20 * long[1]

# %% [markdown]
# Ranks keep no scores: four times the tokens need four times the memory, and each of N ranks keeps an N-th. But a
# block's scores exist while the block is computed: the peak is quadratic in tokens / N. (A fused kernel, such as
# FlashAttention's, avoids that.)
#
# In a model, `ContextParallel(module, comm)` does all this for torch's attention; torch has `context_parallel` in
# `torch.distributed.tensor.experimental`, for GPUs. There is one trap. Here twelve of 32 tokens are padding, so some
# ranks have fewer tokens in their loss. We compare the gradients of two losses:

# %%
# %%px
from dtlib.gradients.tokens import mean_over_tokens

x, y = axes.batch()
counts = (torch.arange(axes.TOKENS) < 20).expand(axes.BATCH, axes.TOKENS)


def gradient(loss, comm):
    model = ContextParallel(axes.transformer(alone), comm)
    predicted = DataParallel(model, comm)(model.split(x))
    losses = (predicted - model.split(y)).square().mean(-1)  # one a token
    loss(losses, model.split(counts)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


expected = gradient(lambda losses, kept: losses[kept].mean(), alone)
means = gradient(lambda losses, kept: losses[kept].mean(), comm)
over_tokens = gradient(lambda losses, kept: mean_over_tokens(losses, comm, kept), comm)
rows = []
for name, got in (("mean of the ranks' means", means), ("mean_over_tokens", over_tokens)):
    off = (got - expected).abs().max() / expected.abs().max()
    rows.append((name, f"{100 * off:.1f} %"))
if comm.rank == 0:
    lab.table(rows, ("loss", "relative error of the gradient"))

# %% tags=["statement"]
# "Divide the sum by the number of all tokens *before* the backward pass"
assert row("mean of the ranks' means", "relative error of the gradient")[0] > 1 and row("mean_over_tokens", "relative error of the gradient")[0] == 0

# %% [markdown]
# Divide the sum by the number of all tokens *before* the backward pass. The backward pass adds parts of all ranks'
# losses into a key's gradient. After this, no weight can correct the part of one rank.
#
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("12")

# %% [markdown]
# ## Summary
#
# - Keys and values travel round a ring, their gradients behind them: N - 1 messages, then 2N - 1.
# - Contiguous slices leave the first ranks idle; zigzag takes 2N quarter blocks in place of 4N - 2.
# - Ulysses exchanges heads for tokens, on no more ranks than key heads. On few ranks, gathering few key heads sends less.
# - Divide by all tokens before the backward pass. Outputs do not show such mistakes; gradients do.
#
# Now the [exercises](../exercises/12_sequences_exercises.ipynb), then [12b Experts](12b_experts.ipynb).
#
# ## References
#
# - The ring with wrong gradients: github.com/huggingface/diffusers/issues/14265.
# - H. Liu et al.: Ring attention with blockwise transformers for near-infinite context. arXiv:2310.01889.
# - S. A. Jacobs et al.: DeepSpeed Ulysses. arXiv:2309.14509.
# - W. Brandon et al.: Striped attention. arXiv:2311.09431.
# - Llama team: The Llama 3 herd of models. arXiv:2407.21783, section 3.3.2 (context parallelism).
