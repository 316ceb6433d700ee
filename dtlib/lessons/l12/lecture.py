# %% [markdown]
# # 12 Long sequences and experts
#
# Ninety minutes, in two halves that stand alone. First you cut the *sequence*: attention over tokens that other
# ranks have. Then you divide *experts*: a token travels to the rank of its expert. At the end, two tables compare all axes.
#
# **Questions.** Which rank is the bottleneck of a ring, and what does another order change? Which gradients are wrong
# although every output is right? What do experts send, and what has to be divided by the number of ranks?
#
# **Afterwards you can** run attention in a ring or by exchanges of heads; put a mixture of experts on ranks; count what
# both send; say what each axis cuts.
#
# **You need** lesson 03 and the first half of lesson 04; for the table at the end, 06 to 08.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
from functools import partial

import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from dtlib import lab
from dtlib.lessons.l12 import axes, figures, work
from dtlib.parallel import expert
from dtlib.parallel.context import ContextParallel, plain, plain_ulysses
from dtlib.parallel.data import DataParallel
from dtlib.parallel.expert import plain as expert_plain
from dtlib.workloads import digits


# %%
# %%px
world = dtlib.init()
comm, alone = world.comm, world.comm.split(world.rank)  # all ranks; this one


def equal(a, b):
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-12)


# %% [markdown]
# ## First half: long sequences
#
# The activations of a text of a million tokens fit on no GPU. So each rank gets a slice of it. Most layers work token by
# token, and do not notice. Attention does: a query looks at the keys of all tokens before it, and out = Σ exp(score)
# · value / Σ exp(score). How does a query see keys that other ranks have?
#
# Attention over one block of keys is a weighted average of values; the logarithm of its denominator is the *log-sum-exp*.
# Merged, each block counts in proportion to its denominator. Here are eight
# keys, in blocks of five and three:

# %%
torch.manual_seed(0)
scores, values = torch.randn(3, 8).double(), torch.randn(8, 2).double()


def of_block(keys):
    return scores[:, keys].softmax(-1) @ values[keys], scores[:, keys].logsumexp(-1)


merged, lse = plain.merge(*of_block(slice(0, 5)), *of_block(slice(5, 8)))
apart = (merged - scores.softmax(-1) @ values).abs().max()
print("merged, and all at once: " + ("equal to 1e-12" if apart < 1e-12 else "not equal"))

# %% tags=["statement"]
# "Merged, each block counts in proportion to its denominator."
assert count("all at once: equal to 1e-12") == 1

# %% [markdown]
# So keys and values travel round a ring, as gradients do in lesson 03. In step s, rank r has those of rank r - s (modulo
# N), and merges what they add into its result. Attention is *causal*: no query looks at later tokens. So a block whose keys
# are all later costs nothing.
#
# **Predict.** Four ranks with contiguous slices. Which ranks have nothing to do in step 2? Write a list.

# %% tags=["stub"]
lab.predict("who-waits", None)

# %% tags=["solution"]
lab.predict("who-waits", [0, 1])

# %% [markdown]
# What follows is counted, not timed: one process plays each rank in turn (SIMULATED). A *quarter block* is
# half a slice of queries by half a slice of keys.

# %%
contiguous = work.quarter_blocks("contiguous", ranks=4)
figures.work_by_step(contiguous=contiguous)

# %% tags=["statement"]
# "Rank 0 is idle from step 1 on, and all wait for rank 3"
assert row("0", "quarter blocks") == [2, 0, 0, 0] and row("3", "quarter blocks") == [2, 4, 4, 4]

# %% [markdown]
# Rank 0 is idle from step 1 on, and all wait for rank 3: the last tokens look at most keys. So give each rank some of
# the first and some of the last: of 2N chunks, rank r gets chunks r and 2N - 1 - r. That is the *zigzag* order.
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
# "The same work, 32 quarter blocks, and nobody is idle."
both = [rows(f"{rank}", "zigzag: quarter") for rank in range(4)]
assert [zigzag for _, zigzag in both] == [[2, 2, 2, 2]] * 4 and sum(sum(one) for one, _ in both) == 32

# %% [markdown]
# The same work, 32 quarter blocks, and nobody is idle. Now on real ranks. The next keys travel while a block is computed:

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
# "To 1e-12, output and gradients are those of one process."
assert count("'out': True, 'dq': True, 'dk': True, 'dv': True") == 1

# %% [markdown]
# To 1e-12, output and gradients are those of one process. Forward, a rank sends N - 1 = 3 messages, of keys and values
# together.
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
# "2N - 1: keys and values once more, N - 1 times, and their gradients N times."
assert found(r"forward \((\d+), (\d+)\) backward \((\d+), (\d+)\)")[::2] == [3, 7]

# %% [markdown]
# 2N - 1: keys and values once more, N - 1 times, and their gradients N times. These travel one step behind; each rank adds
# its part, and the last hop takes them to their owner. Probabilities were not kept: as in FlashAttention, `p` is computed
# again from scores and `lse`:

# %%
lab.read(plain.RingAttention.backward)

# %% [markdown]
# All that is easy to get wrong *silently*. A published ring used the keys of its first step in the whole backward pass
# (diffusers #14265). Output and loss were perfect. Of the mistakes that our tests plant in this file, most leave the
# output right: compare gradients, one by one.
#
# **Discuss.** Your ring has a wrong dk, and the loss falls nicely. Which test would have seen it?
#
# ### Heads in place of a ring: Ulysses
#
# Another way needs no ring. For a moment, each rank trades its tokens of most heads for all tokens of a few heads:

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

# %%
# %%px
n = mine[0].nbytes  # of this rank's q


def of_tensors(trace):
    """Messages, and bytes over n."""
    events = [event for event in trace.events if event.dtype == "float64" and event.messages]
    return sum(event.messages for event in events), sum(event.bytes for event in events) / n


sent = [
    ("ring", *of_tensors(forward), *of_tensors(backward)),
    ("Ulysses", *of_tensors(forward_ulysses), *of_tensors(backward_ulysses)),
]

# %%
headers = ("", "messages forward", "bytes / n", "messages backward", "bytes / n")
lab.table(lab.values("sent")[0], headers, "Rank 0 of 4; n: bytes of its queries")

# %% tags=["statement"]
# "On four ranks, Ulysses sends less than a third of the bytes."
ring, ulysses = row("ring", "bytes of its queries"), row("Ulysses", "bytes of its queries")
assert ring == [3, 6, 7, 14] and ulysses == [6, 3, 6, 3] and 6 / 20 < 1 / 3
# "at Llama's g = 1/8 2.5 n and 3.4 n"
assert ring[1] + ring[3] == 20 and ulysses[1] + ulysses[3] == 3 * 2 and 20 / 8 == 2.5 and round(3 * 9 / 8, 1) == 3.4

# %% [markdown]
# On four ranks, Ulysses sends less than a third of the bytes. Here keys have as many heads as queries. With a fraction g
# of them the ring sends 20 g n bytes, Ulysses 3 (1 + g) n: at Llama's g = 1/8 2.5 n and 3.4 n. Nothing is computed while
# Ulysses' bytes travel, and a rank needs at least one head. Llama 3 gathers all keys instead.
#
# ### What is kept, and which mean

# %%
rows = []
for tokens in (1024, 4096, 16384):
    counted = [f"{work.kept(tokens, ranks) / 1e6:.2f}" for ranks in (1, 2, 4)]
    peak = f"{work.peak(tokens, 4) / 1e6:.2f}"
    rows.append((f"{tokens:,}", *counted, peak, f"{2 * 4 * tokens**2 / 1e6:,.0f}"))
headers = ("tokens", "1 rank", "2 ranks", "4 ranks", "4 ranks, peak", "all scores (formula)")
title = "MB that two heads of width 8 keep for the backward pass; live MB at the peak (SIMULATED)"
lab.table(rows, headers, title)

# %% tags=["statement"]
# "No scores are kept: four times the tokens keep four times the memory, and each of N ranks keeps an N-th."
# "the peak is quadratic in tokens / N"
short, middle, long = (row(tokens, "keep for the backward") for tokens in ("1,024", "4,096", "16,384"))
assert abs(long[0] / middle[0] - 4) < 0.02 and abs(long[0] / long[2] - 4) < 0.02
assert 12 < long[3] / middle[3] < 16 and long[3] > 20 * long[2]

# %% [markdown]
# No scores are kept: four times the tokens keep four times the memory, and each of N ranks keeps an N-th. But a block's
# scores exist while it is computed: the peak is quadratic in tokens / N.
#
# In a model, `ContextParallel(module, comm)` does all this for torch's attention. One trap: twelve of 32 tokens are
# padding, so some ranks have fewer tokens in their loss. Two losses, and how far off their gradients are:

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
    lab.table(rows, ("loss", "gradient off by"))

# %% tags=["statement"]
# "The sum over all tokens has to be divided *before* the backward pass"
assert row("mean of the ranks' means", "gradient off by")[0] > 1 and row("mean_over_tokens", "gradient off by")[0] == 0

# %% [markdown]
# The sum over all tokens has to be divided *before* the backward pass. A key's gradient already adds up parts of all ranks'
# losses: after that, no weight can correct one rank's part.
#
# ## Second half: experts
#
# How can a model have eight times the parameters, and no more work a token? In place of one perceptron there are several, the
# *experts*, and a *gate* sends each token to one of them, or two. A token travels to the rank of its expert, and the result
# travels back.

# %%
lab.read(expert_plain.Rows, expert_plain.MixtureOfExperts.through_experts)

# %% [markdown]
# How many rows go where is known only when the gate has chosen: counts travel first. `Rows` has an exact reverse, for the
# gradients.
#
# Below, each rank has one expert and 16 tokens, four for each expert. Each rank's loss is the mean over its own tokens;
# what we want is the gradient of the mean of all losses. Nobody divides anything yet.
#
# **Predict.** How many times too large is the gradient of an expert, on four ranks?

# %% tags=["stub"]
lab.predict("factor-of-an-expert", None)

# %% tags=["solution"]
lab.predict("factor-of-an-expert", 4)

# %%
# %%px
torch.manual_seed(0)
tokens = torch.randn(4, 16, 8).double()  # of four ranks; the first four of each are for expert 0
my_expert = nn.Linear(8, 8, bias=False).double()
mine, counts = tokens[comm.rank].clone().requires_grad_(), [4, 4, 4, 4]
arrived = expert_plain.Rows.apply(mine, comm.group, counts, counts)
returned = expert_plain.Rows.apply(my_expert(arrived), comm.group, counts, counts)
returned.square().mean().backward()
on_ranks, my_expert.weight.grad = my_expert.weight.grad, None

its_tokens = tokens[:, 4 * comm.rank : 4 * comm.rank + 4]
(my_expert(its_tokens).square().sum() / tokens.numel()).backward()  # in one process
factor = float((on_ranks / my_expert.weight.grad).mean())
print(f"times too large: {factor:.6f}")

# %% tags=["statement"]
# "An expert's gradient arrives as the sum over N losses, and we want the mean: divide by N once."
assert count("times too large: 4.000000") == 1

# %% [markdown]
# An expert's gradient arrives as the sum over N losses, and we want the mean: divide by N once. DeepSpeed #5618 forgot it (4
# times too large), and pytorch #160285 reports 2 times. With Adam nobody sees it in the loss: a factor cancels, until gradients
# are clipped. Our layer divides, and no strategy averages experts again. The whole layer as a picture, then a test:

# %%
lab.read(expert_plain)


# %%
# %%px
def layer(comm, ranks):
    """Experts of these ranks; expert r begins the same wherever it is."""
    experts = []
    for rank in ranks:
        torch.manual_seed(rank + 1)
        experts.append(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    torch.manual_seed(0)
    return expert_plain.MixtureOfExperts(8, experts, comm, top=2).double()


shared, whole_layer = layer(comm, [comm.rank]), layer(alone, range(4))
with dtlib.trace() as trace:
    mine = tokens[comm.rank].clone().requires_grad_()
    out = shared(mine)
    (out.square().mean() + 0.01 * shared.balance).backward()
expected = whole_layer(tokens.flatten(0, 1))
(expected.square().mean() + 0.01 * whole_layer.balance).backward()
gate = comm.all_reduce(shared.gate.weight.grad.clone(), op="mean")  # every rank has one
mine, same_one = shared.experts[0][0], whole_layer.experts[comm.rank][0]
same = {
    "output": equal(out, expected.view(4, 16, 8)[comm.rank]),
    "gate": equal(gate, whole_layer.gate.weight.grad),
    "expert": equal(mine.weight.grad, same_one.weight.grad),
}
moved = [e for e in trace.events if e.name == "all_to_all" and e.dtype == "float64"]
sent = [(event.messages, event.bytes) for event in moved]
print("as in one process:", same)

# %%
all_sent, rows = lab.values("sent"), []
for rank, of_rank in enumerate(all_sent):
    rows.append((rank, *(f"{sent:,} in {messages}" for messages, sent in of_rank)))
ways = ("to experts", "back", "gradients there", "gradients back")
lab.table(rows, ("rank", *ways), "Bytes of numbers, in so many messages")

# %% tags=["statement"]
# "Four exchanges, N - 1 messages each; gradients have as many bytes as their rows."
of_ranks = [row(f"{rank}", "in so many messages") for rank in range(4)]
assert all(sent[1::2] == [3, 3, 3, 3] and sent[:4] == sent[4:] for sent in of_ranks)
assert count("'output': True, 'gate': True, 'expert': True") == 1

# %% [markdown]
# Four exchanges, N - 1 messages each; gradients have as many bytes as their rows. Ranks send different numbers of bytes: that is
# the trouble with experts.
#
# ### Balance
#
# An expert that is chosen learns, and is chosen more often. The remedy is a second loss, E · Σ (share of the choices) · (mean
# probability): 1 where all experts get as much. Digits, four experts on four ranks, with that loss and without:

# %%
# %%px
images, labels = digits.load()
images = images.double()


class Net(nn.Module):
    def __init__(self, capacity=None):
        super().__init__()
        torch.manual_seed(comm.rank + 1)
        mine = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()]
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 16).double(), nn.Linear(16, 10).double()
        self.moe = expert.MixtureOfExperts(16, mine, comm, capacity=capacity).double()

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.moe(x))


def trained(weight):
    """Choices of each expert, in 60 steps of 16 images a rank."""
    net, choices = Net(), []
    model, adam = DataParallel(net, comm), torch.optim.Adam(net.parameters(), 0.01)
    for step in range(60):
        at = slice(64 * (step % 20) + 16 * comm.rank, 64 * (step % 20) + 16 * comm.rank + 16)
        adam.zero_grad()
        (cross_entropy(model(images[at]), labels[at]) + weight * net.moe.balance).backward()
        adam.step()
        choices.append(net.moe.choices.tolist())
    return choices


without, balanced = trained(0), trained(0.2)

# %% tags=["nbval-ignore-output"]
figures.shares(without=lab.values("without")[0], with_the_loss=lab.values("balanced")[0])

# %% tags=["statement"]
# "Without it, one expert of four gets more than half of the tokens, and two hardly any."
both = [[last for _, last in rows(f"{expert}", "with the loss")] for expert in range(4)]
shares = sorted(without for without, _ in both)
assert shares[3] > 50 and shares[1] < 15 and all(15 < balanced < 40 for _, balanced in both)

# %% [markdown]
# Without it, one expert of four gets more than half of the tokens, and two hardly any. This balance loss has to be
# that of *all* ranks' tokens, attached to the graph, and scaled once. It was never attached in NeMo Automodel (#1408),
# and shrank with tensor ranks in Megatron-LM (pull request #5047); every output was right.
#
# A *capacity* makes messages equally long: each expert has so many places, and a token that finds none is dropped. At 1.0
# there are as many places as an even share needs:

# %%
# %%px
rows = []
for capacity in (0.5, 1.0, 2.0, None):
    net = Net(capacity)
    net(images[16 * comm.rank : 16 * comm.rank + 16])
    rows.append((f"{capacity}", sum(comm.all_gather_object(net.moe.dropped))))
if comm.rank == 0:
    lab.table(rows, ("capacity", "dropped of 64"))

# %% tags=["statement"]
# "A dropped token gets nothing from the layer: only the residual connection carries it on."
assert row("None", "dropped of 64") == [0] and row("0.5", "dropped of 64")[0] > row("2.0", "dropped of 64")[0] > 0

# %% [markdown]
# A dropped token gets nothing from the layer: only the residual connection carries it on.
#
# **Discuss.** A batch has much padding, and the gate sends all padding to expert 0. What happens to its real tokens?
#
# ## All axes
#
# One transformer of four blocks, on four ranks, cut along each axis that this course knows. A step of each, with AdamW, in
# float64: what a rank has, by `dtlib.memory()`, and what it sends, by `dtlib.trace()`. All compute the same loss
# (experts: that of experts in one process).

# %%
# %%px
table = {axis: axes.measured(axis, comm) for axis in axes.AXES}
losses = {axis: f"{of_axis['loss']:.9f}" for axis, of_axis in table.items()}
with_experts = {loss for axis, loss in losses.items() if "expert" in axis}
others = {loss for axis, loss in losses.items() if "expert" not in axis}
print("loss with experts:", *with_experts, "- of all others:", *others)

# %% tags=["statement"]
# "All compute the same loss (experts: that of experts in one process)."
assert len(found(r"loss with experts: ([\d. ]+) - of all others: ([\d. ]+)")) == 2

# %%
figures.held(lab.values("table")[0])

# %% tags=["statement"]
# "Only ZeRO 3, tensors, the pipeline and experts cut parameters"
cut = {axis: row(axis, "What the busiest of 4 ranks has") for axis in ("data", "ZeRO 2", "context, ring", "ZeRO 3")}
assert cut["data"][0] == cut["context, ring"][0] == 100 and cut["ZeRO 2"][:3] == [100, 25, 25]
assert all(row(axis, "What the busiest of 4 ranks has")[0] < 40 for axis in ("tensor", "sequence", "pipeline", "expert"))

# %%
figures.sent(lab.values("table")[0])

# %% tags=["statement"]
# "gradients travel during the backward pass"
# "Its 24 all_reduces are for norms and biases"
# "which sends a third more"
# "the four all_reduces in the forward pass are for the balance, one a layer."
assert count(r"(?m)^data +- +1 all_reduce +- ") == 1 and count("24 all_reduce") == 1
assert count(r"(?m)^expert +4 all_reduce, 8 all_to_all +8 all_to_all") == 1
for more, less in (("tensor", "sequence"), ("data", "ZeRO 2")):
    more, less = (row(axis, "What the busiest of 4 ranks sends in a step")[-1] for axis in (more, less))
    assert 1.28 < more / less < 1.36

# %% [markdown]
# - **What is cut.** Only ZeRO 3, tensors, the pipeline and experts cut parameters; `data` and `context` cut activations alone.
# - **When it is sent.** What is sent *inside* a layer is waited for (tensor, sequence, Ulysses, experts), except for a
#   ring's keys; gradients travel during the backward pass.
# - **`sequence`** is `tensor` with less kept between the layers, and sends the same activations by a ring. (So small an
#   `all_reduce` goes by doubling, which sends a third more; so `data` sends more than ZeRO 2. By a ring the two are
#   equal.) Its 24 `all_reduce`s are for norms and biases: a rank has seen their gradients for its own tokens alone.
# - **`expert`**: the four `all_reduce`s in the forward pass are for the balance, one a layer.
#
# The model is small: gradients grow with its width squared, activations with the tokens.
#
# **Discuss.** Texts become ten times as long. Which rows of the second table grow, which do not, and what would you change?
#
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("12")

# %% [markdown]
# ## Summary
#
# - Keys and values travel round a ring, their gradients behind them: N - 1 messages, then 2N - 1.
# - Contiguous slices leave the first ranks idle; zigzag takes 2N quarter blocks in place of 4N - 2.
# - Ulysses exchanges heads for tokens, on no more ranks than heads.
# - Divide by all tokens before the backward pass; divide an expert's gradient by N once.
# - The balance is that of all ranks' choices. Outputs do not show any of these mistakes; gradients do.
#
# Now the [exercises](../exercises/12_sequences_and_experts_exercises.ipynb).
#
# ## References
#
# - H. Liu et al.: Ring attention with blockwise transformers for near-infinite context. arXiv:2310.01889.
# - S. A. Jacobs et al.: DeepSpeed Ulysses. arXiv:2309.14509.
# - W. Brandon et al.: Striped attention. arXiv:2311.09431.
# - Llama team: The Llama 3 herd of models. arXiv:2407.21783, section 3.3.2 (context parallelism).
# - W. Fedus et al.: Switch transformers. arXiv:2101.03961.
# - D. Lepikhin et al.: GShard. arXiv:2006.16668.
