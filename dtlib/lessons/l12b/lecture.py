# %% [markdown]
# # 12b Experts
#
# Forty-five minutes. A layer has several *experts*, which are divided among ranks. A token travels to the rank of its
# expert. At the end, two tables compare all axes of this course.
#
# **Questions.** Which data do experts exchange? What must be divided by the number of ranks? What does each axis cut,
# and when does it send?
#
# **Afterwards you can** divide a mixture of experts among ranks; count the bytes that it sends; keep experts in
# balance; name the cut of each axis.
#
# **You need** lesson 03 and the first half of lesson 04; for the tables at the end, 06 to 08 and [12](12_sequences.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from dtlib import lab
from dtlib.lessons.l12 import axes
from dtlib.lessons.l12b import figures
from dtlib.parallel import expert
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
# ## A token travels to its expert
#
# How can a model have eight times the parameters, and no more work per token? The model has several perceptrons in
# place of one, called *experts*. A *gate* sends each token to one or two of the experts. The token travels to the rank
# of its expert, and the result travels back. **Find** the three exchanges below. What does the first exchange send?

# %%
lab.read(expert_plain.Rows, expert_plain.through_experts)

# %% [markdown]
# The gate decides how many rows each rank sends to each other rank. So ranks exchange counts first, then rows, then
# results. `Rows` has an exact reverse, for the gradients.
#
# Below, each rank has one expert and 16 tokens, four for each expert. Each rank's loss is the mean over its own tokens.
# We want the gradient of the mean of all losses. The code does not divide anything yet.
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
print(f"too large by a factor of {factor:.6f}")

# %% tags=["statement"]
# "An expert's gradient arrives as the sum over N losses, and we want the mean: divide by N once."
assert count("too large by a factor of 4.000000") == 1

# %% [markdown]
# An expert's gradient arrives as the sum over N losses, and we want the mean: divide by N once. DeepSpeed #5618 forgot
# it (4 times too large), and pytorch #160285 reports 2 times. With Adam the loss does not show the mistake: a factor
# cancels, until gradients are clipped. Our layer divides, and no strategy averages experts again. Here is the layer,
# compared with all experts in one process:

# %%
# %%px
def layer(comm, ranks):
    """Experts of these ranks; expert r has the same initial weights on any rank."""
    experts = []
    for rank in ranks:
        torch.manual_seed(rank + 1)
        experts.append(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    torch.manual_seed(0)
    return expert_plain.MixtureOfExperts(8, experts, comm, top=2).double()

# %%
# %%px
shared, whole_layer = layer(comm, [comm.rank]), layer(alone, range(4))
with dtlib.trace() as trace:
    mine = tokens[comm.rank].clone().requires_grad_()
    out = shared(mine)
    (out.square().mean() + 0.01 * shared.balance).backward()
expected = whole_layer(tokens.flatten(0, 1))
(expected.square().mean() + 0.01 * whole_layer.balance).backward()
gate = shared.gate.weight.grad.clone()  # every rank has one
dist.all_reduce(gate, op=dist.ReduceOp.AVG, group=comm.group)
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
ways = ("tokens to experts", "tokens back", "gradients to experts", "gradients back")
lab.table(rows, ("rank", *ways), "Bytes sent, in how many messages")

# %% tags=["statement"]
# "Four exchanges, N - 1 messages each; gradients have as many bytes as their rows."
of_ranks = [row(f"{rank}", "in how many messages") for rank in range(4)]
assert all(sent[1::2] == [3, 3, 3, 3] and sent[:4] == sent[4:] for sent in of_ranks)
assert count("'output': True, 'gate': True, 'expert': True") == 1

# %% [markdown]
# Four exchanges, N - 1 messages each; gradients have as many bytes as their rows. Ranks send different numbers of
# bytes, which is a problem of experts.
#
# **Compute.** A rank has 8,192 tokens of width 4,096 in bfloat16. Each token goes to two of 64 experts, one per rank,
# and tokens are spread evenly over experts. How many MB does the rank send to experts in one layer, forward?
#
# <details><summary>Answer</summary>8,192 x 2 rows of 8,192 bytes are 134 MB, and 63 of 64 rows leave: 132 MB. Equally
# many return, and the backward pass sends both again.</details>
#
# ## Balance
#
# An expert that is chosen often learns more, and then is chosen even more often. The remedy is a second loss, E · Σ
# (share of the choices) · (mean probability). It is 1 if all E experts get equally many tokens. Four experts on four
# ranks learn the digits, with this loss and without:

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
# "At the end, without this loss, one expert of four gets more than half of the tokens, and two hardly any."
both = [[last for _, last in rows(f"{expert}", "with the loss")] for expert in range(4)]
shares = sorted(without for without, _ in both)
assert shares[3] > 50 and shares[1] < 15 and all(15 < balanced < 40 for _, balanced in both)

# %% [markdown]
# At the end, without this loss, one expert of four gets more than half of the tokens, and two hardly any. The balance
# loss must count *all* ranks' tokens, have a gradient, and be scaled once. In NeMo Automodel it had no gradient
# (#1408). In Megatron-LM it shrank with tensor ranks (#5047, with a loss per token). Every output was right.
#
# DeepSeek-V3 needs hardly any such loss. Each expert has a bias that affects only the choice: the bias falls while the
# expert gets too many tokens.
#
# A *capacity* makes all messages equally long: an expert has a fixed number of places for each rank's tokens, and a
# token without a place is dropped. At capacity 1.0 there are just enough places if all experts get equally many tokens:

# %%
# %%px
rows = []
for capacity in (0.5, 1.0, 2.0, None):
    net = Net(capacity)
    net(images[16 * comm.rank : 16 * comm.rank + 16])
    dropped = torch.tensor(net.moe.dropped)
    dist.all_reduce(dropped, group=comm.group)
    rows.append((f"{capacity}", int(dropped)))
if comm.rank == 0:
    lab.table(rows, ("capacity", "dropped tokens of 64"))

# %% tags=["statement"]
# "The layer computes nothing for a dropped token: only the residual connection passes it to the next layer."
assert row("None", "dropped tokens of 64") == [0] and row("0.5", "dropped tokens of 64")[0] > row("2.0", "dropped tokens of 64")[0] > 0

# %% [markdown]
# The layer computes nothing for a dropped token: only the residual connection passes it to the next layer.
#
# **Discuss.** A batch has much padding, and the gate sends all padding to expert 0. What happens to the real tokens of
# this expert?
#
# ## All axes
#
# One transformer of four blocks, on four ranks, cut along each axis of this course. The tables show one step with AdamW
# in float64: the memory of a rank, by `dtlib.memory()`, and the bytes that it sends, by `dtlib.trace()`.
#
# **Predict.** Which of these axes sends nothing in the forward pass: "data", "ZeRO 3", "tensor" or "context, ring"?

# %% tags=["stub"]
lab.predict("silent-forward", None)

# %% tags=["solution"]
lab.predict("silent-forward", "data")

# %%
# %%px
table = {axis: axes.measured(axis, comm) for axis in axes.AXES}
losses = {axis: f"{of_axis['loss']:.9f}" for axis, of_axis in table.items()}
with_experts = {loss for axis, loss in losses.items() if "expert" in axis}
others = {loss for axis, loss in losses.items() if "expert" not in axis}
print("loss with experts:", *with_experts, "- of the other axes:", *others)

# %% tags=["statement"]
# "All axes compute the same loss. With experts the model is another one"
assert len(found(r"loss with experts: ([\d. ]+) - of the other axes: ([\d. ]+)")) == 2

# %%
figures.held(lab.values("table")[0])

# %% tags=["statement"]
# "Only ZeRO 3, tensor (with `sequence`), the pipeline and experts cut parameters."
# "`sequence` keeps more than a quarter of the activations"
assert row("sequence", "Memory of the busiest of 4 ranks")[3] > 25
cut = {axis: row(axis, "Memory of the busiest of 4 ranks") for axis in ("data", "ZeRO 2", "context, ring", "ZeRO 3")}
assert cut["data"][0] == cut["context, ring"][0] == 100 and cut["ZeRO 2"][:3] == [100, 25, 25]
assert all(row(axis, "Memory of the busiest of 4 ranks")[0] < 40 for axis in ("tensor", "sequence", "pipeline", "expert"))

# %%
figures.sent(lab.values("table")[0])

# %% tags=["statement"]
# "Gradients travel during the backward pass."
# "Its 24 all_reduces are for norms and biases"
# "which sends a third more"
# "the four all_reduces in the forward pass are for the balance, one per layer."
assert count(r"(?m)^data +- +1 all_reduce +- ") == 1 and count("24 all_reduce") == 1
assert count(r"(?m)^expert +4 all_reduce, 8 all_to_all +8 all_to_all") == 1
for more, less in (("tensor", "sequence"), ("data", "ZeRO 2")):
    more, less = (row(axis, "Bytes that the busiest of 4 ranks sends in a step")[-1] for axis in (more, less))
    assert 1.28 < more / less < 1.36

# %% [markdown]
# - **Loss.** All axes compute the same loss. With experts the model is another one; its loss equals that of the same
#   model in one process.
# - **What is cut.** Only ZeRO 3, tensor (with `sequence`), the pipeline and experts cut parameters. `data` and
#   `context` cut only activations.
# - **When it is sent.** Ranks wait for messages *inside* a layer (tensor, sequence, Ulysses, experts). Among these,
#   only a ring's keys travel while the layer computes. Gradients travel during the backward pass.
# - **Algorithms.** For arrays this small, `all_reduce` uses doubling, which sends a third more than a ring. That is why `data`
#   sends more than ZeRO 2, and `tensor` more than `sequence`.
# - **`sequence`** keeps more than a quarter of the activations: a layer cut by columns keeps its input of all tokens,
#   for the gradient of its weight. Its 24 `all_reduce`s are for norms and biases: their gradients on a rank count only
#   this rank's tokens.
# - **`expert`**: the four `all_reduce`s in the forward pass are for the balance, one per layer.
#
# The model is small: gradients grow with its width squared, activations with the tokens.
#
# **Discuss.** Texts become ten times as long. Which rows of the second table grow, which rows do not, and what would
# you change?
#
# ## Which cut, when?
#
# Now you know all axes. In the chart, follow *yes* to the right. If the result is not enough, continue below. `dtlib
# plan` computes the choice.

# %%
lab.chart()

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("12b")

# %% [markdown]
# ## Summary
#
# - A token travels to its expert and back: counts, rows, results; gradients travel in reverse.
# - An expert's gradient is a sum over N losses: divide by N once. Outputs do not show the mistake; gradients do.
# - The balance counts all ranks' choices. A capacity makes messages equal, and drops tokens.
# - Only messages outside of layers can travel during computing; a ring's keys are the exception.
#
# Now the [exercises](../exercises/12b_experts_exercises.ipynb).
#
# ## References
#
# - Mistakes, on https://github.com: microsoft/DeepSpeed/issues/5618, pytorch/pytorch/issues/160285,
#   NVIDIA-NeMo/Automodel/issues/1408, NVIDIA/Megatron-LM/pull/5047.
# - D. Lepikhin et al.: GShard. arXiv:2006.16668.
# - W. Fedus et al.: Switch transformers. arXiv:2101.03961.
# - L. Wang et al.: Auxiliary-loss-free load balancing strategy for mixture-of-experts. arXiv:2408.15664.
# - DeepSeek-AI: DeepSeek-V3 technical report. arXiv:2412.19437, section 2.1.2.
