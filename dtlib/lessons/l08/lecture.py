# %% [markdown]
# # 08 Tensor and hybrid parallelism
#
# Ninety minutes. You cut single layers over ranks, count the bytes sent, and combine data, pipeline and tensor
# parallelism on one grid of ranks, the *mesh*.
#
# **Questions.** What if one layer is too large for a rank? Which kind of parallelism belongs inside a machine?
#
# **Afterwards you can** cut a layer by columns and by rows, with the right gradients; say how many bytes each cut sends; place
# ranks on a mesh.
#
# **You need** [03 Collectives](03_collectives.ipynb), [04 Data parallelism](04_data_parallel.ipynb), and for pipelines
# with ZeRO [06 ZeRO](06_zero.ipynb) and [07 Pipelines](07_pipelines.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from dtlib import lab
from dtlib.lab import digits
from dtlib.lessons.l08 import figures as tensor_figures
from dtlib.parallel import tensor
from dtlib.parallel.data.plain import DataParallelBuckets
from dtlib.parallel.tensor import plain
from dtlib.parallel.tensor.plain import ColumnParallelLinear, ParallelMLP
from dtlib.theory.collectives import elements_sent

# %% [markdown] tags=["half-day"]
# ## A layer too large for one rank
#
# Data parallelism, ZeRO and pipelines need a whole layer on a rank while it computes. If the layer is too large, cut
# it: *tensor parallelism*. **All ranks then work on the same samples.**
#
# A linear layer is a product Y = X A, with X of shape (samples, inputs) and A of shape (inputs, outputs). There are two
# ways to cut A among N ranks:
#
# - **by columns**: rank r has slice r of the columns, and computes X Aᵣ;
# - **by rows**: rank r has slice r of the rows, and the matching columns of X; it computes Xᵣ Aᵣ.

# %% [markdown]
# **Predict.** After which cut does Y need an `all_reduce`: `"columns"` or `"rows"`?

# %% tags=["stub"]
lab.predict("needs-all-reduce", None)

# %% tags=["solution"]
lab.predict("needs-all-reduce", "rows")

# %%
# %%px
comm = dtlib.init().comm
torch.manual_seed(0)  # so all ranks have the same
X, A = torch.randn(6, 8).double(), torch.randn(8, 12).double()
Y = X @ A  # the whole, to compare with


def mine(tensor, dim):
    return tensor.chunk(comm.size, dim)[comm.rank]


def equal(a, b):
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-12)


by_columns = X @ mine(A, 1)
by_rows = mine(X, 1) @ mine(A, 0)
complete = {"columns": equal(by_columns, mine(Y, 1)), "rows": equal(by_rows, Y)}
dist.all_reduce(total := by_rows.clone(), group=comm.group)
assert equal(total, Y)
print("complete without an all_reduce:", complete)

# %% tags=["statement"]
# "With a cut by columns, a rank has some complete outputs. With a cut by rows, it has a summand of every output."
assert count(r"complete without an all_reduce: \{'columns': True, 'rows': False\}") == 1

# %% [markdown]
# With a cut by columns, a rank has some complete outputs. With a cut by rows, it has a summand of every output.
#
# Now the backward pass. The gradient G of Y arrives, and each rank computes the gradient of its shard of A alone. The
# previous layer needs the gradient of X, which is G Aᵀ. **Predict:** for which cut does *this* need an `all_reduce`?

# %% tags=["stub"]
lab.predict("needs-it-backward", None)

# %% tags=["solution"]
lab.predict("needs-it-backward", "columns")

# %%
# %%px
G = torch.randn(6, 12, dtype=torch.float64)  # equal on all ranks, as the seed was
dX, dA = G @ A.T, X.T @ G
of_columns = mine(G, 1) @ mine(A, 1).T  # this rank has its columns of G alone
of_rows = G @ mine(A, 0).T  # here it has all of G
complete_backward = {"columns": equal(of_columns, dX), "rows": equal(of_rows, mine(dX, 1))}
dist.all_reduce(total := of_columns.clone(), group=comm.group)
assert equal(total, dX)
assert equal(X.T @ mine(G, 1), mine(dA, 1)) and equal(mine(X, 1).T @ G, mine(dA, 0))
print("complete without an all_reduce:", complete_backward)

# %% tags=["half-day"]
tensor_figures.cuts(ranks=4)

# %% tags=["statement"]
# "Ranks exchange nothing for the gradient of a cut weight"
assert count(r"complete without an all_reduce: \{'columns': False, 'rows': True\}") == 1

# %% [markdown]
# Ranks exchange nothing for the gradient of a cut *weight*: it is complete on the weight's rank.
#
# ## f and g
#
# Megatron-LM (M. Shoeybi et al., 2019, section 3) has two operations for this:
#
# | | forward | backward | where |
# |---|---|---|---|
# | **f** | x, unchanged | `all_reduce` of the gradient | before a cut by columns |
# | **g** | `all_reduce` | the gradient, unchanged | after a cut by rows |
#
# f and g change the gradients in autograd, torch's backward pass. The two layers follow below. **Find** the line where
# the second layer adds its bias. Why there?

# %%
lab.read(plain.CopyToRanks, plain.ReduceFromRanks)
lab.read(plain.slice_of, plain.ColumnParallelLinear, plain.RowParallelLinear)

# %% [markdown] tags=["half-day"]
# GPT's blocks have two layers with an activation between them: gelu(X A) B. (Gated blocks have three: two by
# columns, one by rows.) Cut the first **by columns, then the second by rows**: a rank's columns of gelu(X A) match its
# rows of B, so ranks exchange nothing in between. The other order does not work: the activation of a sum is not the sum
# of the activations.

# %% [markdown]
# **Predict.** How many `all_reduce`s does a rank call for such a pair, forward and backward together?

# %% tags=["stub"]
lab.predict("all-reduces-of-a-pair", None)

# %% tags=["solution"]
lab.predict("all-reduces-of-a-pair", 2)

# %%
one, two = torch.tensor(1.0), torch.tensor(2.0)
print(f"gelu(1) + gelu(1) = {gelu(one) + gelu(one):.4f}    gelu(1 + 1) = {gelu(two):.4f}")
lab.read(plain.ParallelMLP)

# %% tags=["statement"]
# "the activation of a sum is not the sum of the activations"
two, one = found(r"gelu\(1\) \+ gelu\(1\) = ([\d.]+) gelu\(1 \+ 1\) = ([\d.]+)")
assert abs(one - two) > 0.1

# %% [markdown]
# Does it compute the same as one process, gradients included? X has 1,024 rows (tokens) of 128 numbers in float64, and
# there are 512 hidden features.
#
# **Compute.** How many bytes does each of four ranks send for g, by the ring? And with twice as many hidden features?
#
# <details><summary>Answer</summary>B = 1,024 x 128 x 8 = 1,048,576 bytes, and 2 B (N-1)/N = 1,572,864. Hidden features never
# travel.</details>

# %%
# %%px
torch.manual_seed(0)
X, G = torch.randn(2, 1024, 128, dtype=torch.float64)
alone = comm.split(comm.rank)  # a communicator of this rank only


def seeded(comm):
    torch.manual_seed(0)
    return ParallelMLP(128, 512, comm.group).double()


def gradients(mlp):
    x = X.clone().requires_grad_()
    z = mlp(x)
    z.backward(G)
    return {"Z": z, "X": x.grad, "A": mlp.linear1.weight.grad, "B": mlp.linear2.weight.grad}


whole = gradients(seeded(alone))
print("in one process:", {name: tuple(found.shape) for name, found in whole.items()})

# %%
# %%px
expected = whole | {"A": mine(whole["A"], 0), "B": mine(whole["B"], 1)}
mlp = seeded(comm)
with dtlib.trace() as trace:
    found = gradients(mlp)
assert all(equal(found[name], expected[name]) for name in expected)
called = [(e.name, e.bytes) for e in trace.events if e.kind == "operation" and e.dtype == "float64"]

# %%
calls = lab.values("called")[0]
formula = 8 * elements_sent("all_reduce", "ring", ranks=4, rank=0, count=1024 * 128)
assert formula == 2 * (1024 * 128 * 8) * 3 // 4  # 2 B (N-1) / N
rows = [
    (what, name, count, formula)
    for what, (name, count) in zip(("g, forward", "f, backward"), calls, strict=True)
]
lab.table(rows, ("rank 0 of 4", "operation", "bytes sent", "2 B (N-1)/N"))
assert all(count == formula for _, count in calls)

# %% tags=["statement"]
# "Columns, then rows: one all_reduce in each pass."
# "2 B (N-1)/N bytes each time"
sent = [row(what, "2 B (N-1)/N") for what in ("g, forward", "f, backward")]
assert all(numbers[-1] == numbers[-2] == 2 * 1024 * 128 * 8 * 3 / 4 for numbers in sent)

# %% [markdown]
# Output and gradients equal those of one process, to 1e-12.
#
# **Change a line.** Below, the layer cut by columns has no f. **Predict:** which is wrong, the output `"Z"`, or the
# gradient of `"A"`, of `"B"` or of `"X"`?

# %% tags=["stub"]
lab.predict("wrong-without-f", None)

# %% tags=["solution"]
lab.predict("wrong-without-f", "X")

# %%
# %%px
class WithoutF(ColumnParallelLinear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


mlp = seeded(comm)
torch.manual_seed(0)  # the same values
mlp.linear1 = WithoutF(128, 512, comm).double()
found = gradients(mlp)
wrong = [name for name in expected if not equal(found[name], expected[name])]
if comm.rank == 0:
    print("wrong:", *wrong)

# %% tags=["statement"]
# "which is wrong, the output"
assert count("wrong: X$") == 1 or count("wrong: X\n") == 1

# %% [markdown]
# This layer learns, without an error. But earlier layers get only one summand of their gradient.
#
# ## A transformer in shards
#
# - **the two layers** (a *perceptron*) are cut by hidden features, as above;
# - **attention** is cut by heads: the first product by columns, head by head, the last by rows;
# - **the embedding** is cut by words: a rank looks up its own words and returns zeros for the others; g adds these;
# - **the output layer and the loss** also by words: no rank has the logits (scores) of all words.
#
# A small language model:

# %%
# %%px
WORDS, WIDTH, HEADS, HIDDEN, TOKENS = 50, 32, 4, 128, 12


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words, targets):
        x = self.embedding(words)
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        x = self.norm(x + self.mlp(x))
        return cross_entropy(self.output(x).flatten(0, 1), targets.flatten())


def counts(model):
    children = model.named_children()
    counted = {name: sum(p.numel() for p in child.parameters()) for name, child in children}
    return counted | {"total": sum(counted.values())}


alone = Whole().double()
whole = counts(alone)
if comm.rank == 0:
    print("parameters:", *(f"{name} {count:,}" for name, count in whole.items()), sep="\n    ")

# %% [markdown]
# The model in shards: `from_linear` takes an existing layer and keeps this rank's shard.
#
# **Predict.** What percentage of the model's parameters does rank 0 of 4 hold?

# %% tags=["stub"]
lab.predict("percent-held", None)

# %% tags=["solution"]
lab.predict("percent-held", 25)

# %%
# %%px
class Cut(nn.Module):
    def __init__(self, whole, comm):
        super().__init__()
        self.comm, by_columns = comm, tensor.ColumnParallelLinear.from_linear
        self.embedding = tensor.VocabParallelEmbedding.from_embedding(whole.embedding, comm)
        self.attention = tensor.ParallelAttention.from_attention(whole.attention, comm, causal=True)
        first, last = whole.mlp[0], whole.mlp[2]
        last = tensor.RowParallelLinear.from_linear(last, comm, input_is_parallel=True)
        self.mlp = nn.Sequential(by_columns(first, comm, gather_output=False), nn.GELU(), last)
        self.norm = whole.norm  # every rank has all of it
        self.output = by_columns(whole.output, comm, gather_output=False)

    def forward(self, words, targets):
        x = self.embedding(words)
        x = x + self.attention(x)
        x = self.norm(x + self.mlp(x))
        return tensor.vocab_parallel_cross_entropy(self.output(x), targets, self.comm, "mean")


cut = Cut(Whole().double(), comm)
held = counts(cut)
percent = 100 * held["total"] / whole["total"]
if comm.rank == 0:
    rows = [(name, whole[name], n, f"{100 * n / whole[name]:.1f} %") for name, n in held.items()]
    lab.table(rows, ("parameters", "one process", "rank 0 of 4", "fraction"))

# %%
# %%px
texts = torch.stack([(7 * s + 3 * torch.arange(TOKENS + 1) ** 2) % WORDS for s in range(16)])
words, targets = texts[:, :-1], texts[:, 1:]


def train(model, steps=10):
    adam, losses = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4), []
    for _ in range(steps):
        adam.zero_grad()
        losses.append(model(words, targets))
        losses[-1].backward()
        adam.step()
    return torch.stack(losses).detach()


losses = [train(model) for model in (alone, cut)]
assert equal(*losses)
assert equal(cut.mlp[0].weight.grad, mine(alone.mlp[0].weight.grad, 0))
assert equal(cut.mlp[2].weight.grad, mine(alone.mlp[2].weight.grad, 1))
print(f"last loss: one process {losses[0][9]:.10f}, 4 ranks {losses[1][9]:.10f}")

# %% tags=["statement"]
# "The norm, and biases that are added after g, are whole on all ranks"
assert row("norm", "rank 0 of 4")[-1] == 100 and 25 < row("total", "rank 0 of 4")[-1] < 26
assert len(set(found(r"one process ([\d.]+), 4 ranks ([\d.]+)"))) == 1

# %% [markdown]
# The norm, and biases that are added after g, are whole on all ranks. They stay equal without messages: each rank
# computes the same gradient from the same activations.
#
# **Predict.** The loss needs the softmax over all 50 words, and a rank has 12 or 13 words. How many numbers *per token*
# does a rank pass to `all_reduce`?

# %% tags=["stub"]
lab.predict("numbers-a-token", None)

# %% tags=["solution"]
lab.predict("numbers-a-token", 3)

# %%
# %%px
logits = cut.output(torch.zeros(16, TOKENS, WIDTH, dtype=torch.float64))  # of this rank's words
with dtlib.trace() as trace:
    tensor.vocab_parallel_cross_entropy(logits, targets, comm, "mean")
tokens, given = 16 * 12, 0
for event in trace.events:
    given += event.bytes // 8 // 2  # by recursive doubling on 4 ranks: sent twice
    if comm.rank == 0:
        print(f"{event.what}: {event.bytes:,} bytes sent")

# %% [markdown]
# Three numbers for each of 192 tokens: the largest logit, the sum of exponentials, the target's logit. (The first
# message has four more: each rank's number of words.) All logits would be 50 numbers; real vocabularies have 100,000
# words.
#
# ## Sequence parallelism
#
# Between the cut layers every rank has all of x. So each rank computes all norms and dropout, and keeps the results.
# Both work token by token, so cut them by tokens. f becomes an `all_gather`, g a `reduce_scatter`.
#
# **Predict.** Without it the pair of layers sends 1.57 MB forward. How many MB with it? (An `all_reduce` by the ring is a
# `reduce_scatter`, then an `all_gather`.)

# %% tags=["stub"]
lab.predict("sent-with-sequence", None)

# %% tags=["solution"]
lab.predict("sent-with-sequence", 1.57)

# %%
# %%px
def norm_and_mlp(sequence_parallel):
    """MB kept for the backward pass between blocks, and sent forward, of 1,024 tokens."""
    between = nn.Sequential(nn.LayerNorm(128), nn.Dropout(0.1)).double()
    mlp = tensor.ParallelMLP(128, 512, comm, sequence_parallel=sequence_parallel).double()
    with dtlib.memory(between) as memory:
        x = between((mine(X, 0) if sequence_parallel else X).clone())
    with dtlib.trace() as trace:
        mlp(x)
    numbers = [event.bytes for event in trace.events if event.dtype == "float64"]
    return memory.activations / 1e6, sum(numbers) / 1e6


kept_and_sent = {"tensor": norm_and_mlp(False), "tensor and sequence": norm_and_mlp(True)}

# %%
found = lab.values("kept_and_sent")[0]
rows = [(name, f"{kept:.2f}", f"{sent:.2f}") for name, (kept, sent) in found.items()]
lab.table(rows, ("cut", "MB kept until the backward pass", "MB sent in the forward pass"))

# %% tags=["statement"]
# "Ranks send equally many bytes, and between the blocks each keeps a quarter."
whole, cut = row("tensor", "MB kept"), row("tensor and sequence", "MB kept")
assert whole[1] == cut[1] == 1.57 and abs(cut[0] - whole[0] / 4) < 0.01

# %% [markdown]
# Ranks send equally many bytes, and between the blocks each keeps a quarter.
#
# Whole tensors need the *same* random numbers on all ranks (initial values, dropout on a whole x). Cut tensors need
# *different* ones (dropout on a rank's own tokens). So a rank has two generators.

# %% [markdown] tags=["half-day"]
# ## A mesh of axes
#
# Tensor parallelism is fast only inside a machine; data parallelism ends at the largest useful batch. So ranks form a
# grid, the *mesh*, with named axes. Along `tensor`, ranks divide layers; along `data`, the batch.

# %% [markdown]
# `world.mesh(data=2, tensor=2)` makes a communicator for every line of that grid. The last axis varies fastest.

# %% [markdown]
# **Predict.** With whom does rank 3 average its gradients? Write a list that includes rank 3.

# %% tags=["stub"]
lab.predict("averages-with-3", None)

# %% tags=["solution"]
lab.predict("averages-with-3", [1, 3])

# %%
# %%px
mesh = dtlib.init().mesh(data=2, tensor=2)
groups = {}
for axis in mesh.shape:
    groups[axis] = [None] * mesh[axis].size
    dist.all_gather_object(groups[axis], comm.rank, group=mesh[axis].group)

# %%
tensor_figures.mesh(data=2, tensor=2)

# %% [markdown]
# A perceptron for the digits is cut along `tensor`. The plain class of lesson 04 wraps it along `data`.

# %%
# %%px
def net(comm):
    torch.manual_seed(0)
    return nn.Sequential(ParallelMLP(64, 256, comm), nn.Linear(64, 10)).double()


def steps(model, comm):
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    return digits.train(model, comm, adam.step, adam.zero_grad)


alone = comm.split(comm.rank)  # a communicator of this rank only
of_one_process = steps(net(alone), alone)
model = DataParallelBuckets(net(mesh["tensor"].group), mesh["data"])
of_the_mesh = steps(model, mesh["data"])
assert equal(of_one_process, of_the_mesh)
print(f"last loss: one process {of_one_process[-1]:.10f}, the mesh {of_the_mesh[-1]:.10f}")

# %% [markdown]
# How many bytes does each axis send in a step?

# %%
# %%px
def sent_in_a_pass(model):
    (images, labels), _ = digits.load(torch.float64)
    with dtlib.trace() as trace:
        cross_entropy(model(images[:48]), labels[:48]).backward()
    # What the class compares to check itself are whole numbers: not counted.
    return sum(event.bytes for event in trace.events if event.dtype == "float64")


along_tensor = sent_in_a_pass(net(mesh["tensor"].group))
along_data = sent_in_a_pass(model) - along_tensor
numbers = [parameter.numel() for parameter in model.parameters()]

# %%
numbers = lab.values("numbers")[0]
activations = 48 * 64 * 8  # bytes; the input of the first layer needs no gradient
by_formula = {"tensor": activations, "data": 8 * sum(numbers)}
what = {"tensor": "activations: g", "data": "gradients"}
rows = [(axis, lab.values(f"along_{axis}")[0], by_formula[axis], what[axis]) for axis in what]
lab.table(rows, ("axis", "bytes sent", "formula", "what is sent"))
assert all(row[1] == row[2] for row in rows)

# %% tags=["statement"]
# "Here data sends more, because a step has only 48 samples"
assert row("data", "what is sent")[0] > row("tensor", "what is sent")[0]

# %% [markdown]
# Here `data` sends more, because a step has only 48 samples. The bytes along `tensor` grow with the tokens of a step,
# those along `data` with the parameters.

# %% [markdown] tags=["half-day"]
# How many bytes does each axis send for a large model? Take the shape of GPT-3 (96 layers of width 12,288) on 512
# ranks, with a pipeline on a third axis: data=8, pipe=8, tensor=8. Each pipeline takes 32 micro-batches of one text of
# 2,048 tokens, in 16 bits per number. These are formulas, not measurements.
#
# **Predict.** Along which axis does a rank send most: `"data"`, `"pipe"` or `"tensor"`?

# %% tags=["half-day", "stub"]
lab.predict("busiest-axis", None)

# %% tags=["half-day", "solution"]
lab.predict("busiest-axis", "tensor")

# %% tags=["half-day"]
layers, width, tokens, micro_batches, d, p, t = 96, 12_288, 2_048, 32, 8, 8, 8
parameters = 12 * layers * width**2  # 4 in attention, 8 in the perceptron, biases left out
activations = 2 * tokens * width  # bytes
in_a_step = {
    # a gradient once a step, of the parameters of this rank
    "data": 2 * (d - 1) / d * 2 * parameters / (p * t),
    # activations to the next stage, gradients to the previous stage, for each micro-batch
    "pipe": 2 * activations * micro_batches,
    # four all_reduces a layer: attention and perceptron, forward and backward
    "tensor": 4 * 2 * (t - 1) / t * activations * layers / p * micro_batches,
}
tensor_figures.bytes_of_axes(in_a_step, "GPT-3's shape on 8 x 8 x 8 ranks (formulas)")

# %% tags=["statement"]
# "`tensor` sends most, and ranks wait for it most"
tensor, data, pipe = (row(axis, "relative to the least")[-1] for axis in ("tensor", "data", "pipe"))
assert tensor > data > pipe == 1

# %% [markdown] tags=["half-day"]
# Every layer also waits for the `all_reduce`s of `tensor`, while gradients along `data` can travel during the backward pass.
# `tensor` stays **inside a machine**, where links are fastest; `pipe` and `data` go between
# machines.

# %% tags=["statement"]
# "`tensor` is the last axis of a mesh"
assert count("0-1  2-3", "connected to the ranks that they communicate with") == 1

# %% [markdown]
# Ranks with consecutive numbers mostly share a machine, so `tensor` is the last axis of a mesh.

# %% [markdown]
# ## Pipelines with data parallelism and ZeRO
#
# (Needs 06 and 07.) Here are two parallel pipelines of two stages, with ZeRO along `data`. DeepSpeed allows stage 1
# here, and refuses 2 and 3.
#
# **Predict.** A step has four micro-batches. Stage 1 reduces gradients once per step. How many times as many bytes does
# stage 2 send for `reduce_scatter`?

# %% tags=["stub"]
lab.predict("times-stage-1", None)

# %% tags=["solution"]
lab.predict("times-stage-1", 4)

# %%
# %%px
from dtlib.deepspeed.pipe import LayerSpec, PipelineModule

SPECS = [
    LayerSpec(nn.Linear, 64, 128), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 128, 128),
    LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 128, 10),
]


def engine_of(stage):
    """Two pipelines of two stages each, and this stage of ZeRO along data."""
    module = PipelineModule(SPECS, num_stages=2, loss_fn=cross_entropy).double()
    config = {
        "train_batch_size": 96,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = dtlib.initialize(model=module, config=config)
    return engine, module.data_comm

# %%
# %%px
from collections import Counter


def two_pipelines(stage):
    """Losses of five steps on 96 images, and bytes of numbers that this rank sent, by operation."""
    engine, data = engine_of(stage)
    (images, labels), _ = digits.load(torch.float64)
    losses = []
    with dtlib.trace() as trace:
        for at in range(0, 5 * 96, 96):
            x, y = (tensor[at : at + 96][data.rank :: 2].chunk(4) for tensor in (images, labels))
            losses.append(engine.train_batch(zip(x, y, strict=True)).item())
    sent = Counter()
    for event in trace.events:
        sent[event.name] += event.bytes if event.dtype == "float64" else 0  # without headers
    return losses, sent


of_stage = {stage: two_pipelines(stage) for stage in (0, 1, 2)}

# %%
of_stage = lab.values("of_stage")[0]
operations = ("send", "all_reduce", "reduce_scatter", "all_gather")
rows = [
    (f"stage {stage}", f"{losses[-1]:.8f}", *(sent[name] for name in operations))
    for stage, (losses, sent) in of_stage.items()
]
headers = ("ZeRO", "last loss", *operations)
lab.table(rows, headers, "Bytes that rank 0 sent in five steps")
reduced = {stage: sent["reduce_scatter"] for stage, (_, sent) in of_stage.items()}

# %% tags=["statement"]
# "The losses are equal."
# "at stage 2 each of them costs a `reduce_scatter`"
none, one, two = (row(f"stage {stage}", "in five steps") for stage in (0, 1, 2))
assert none[0] == one[0] == two[0] and two[3] == 4 * one[3] > 0

# %% [markdown]
# The losses are equal. A small bubble needs many micro-batches, and at stage 2 each of them costs a `reduce_scatter`.
# Stage 2 also saves only the gradients of one pipeline stage, not of the whole model. So use stage 1 here.
#
# ## What holds on GPUs, and what does not
#
# On GPUs values are the same, and bytes if NCCL uses a ring; speed was not shown. There use Megatron-LM, DeepSpeed, or
# torch's DTensor. Our pair of layers in torch:

# %%
# %%px
import dtlib.backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("dtlib", init_method="dtlib://")
torch.manual_seed(0)
pair = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).double()
z = pair(X)
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
pair = parallelize_module(pair, init_device_mesh("cpu", (comm.size,)), plan)
with dtlib.trace() as trace:
    assert equal(pair(X), z)
if comm.rank == 0:
    sent = [f"{event.name}, {event.bytes:,} bytes" for event in trace.events if event.bytes]
    print("forward:", *sent)

# %% tags=["statement"]
# "One all_reduce forward, with the number of bytes that you computed."
assert found(r"forward: all_reduce, ([\d,]+) bytes$") == [1_572_864]

# %% [markdown]
# One `all_reduce` forward, with the number of bytes that you computed. The same cuts and ZeRO in a script:
#
# ```python
# dist.init_process_group("gloo")  # on GPUs: "nccl"
# mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
# rank, ranks = mesh["data"].get_local_rank(), mesh["data"].size()
# cuts = {"0": ColwiseParallel(), "2": RowwiseParallel()}
# model = parallelize_module(model, mesh["tensor"], cuts)
# model = fully_shard(model, mesh=mesh["data"])
# x, y = x[rank::ranks], y[rank::ranks]
# ```
#
# Run `torchrun --nproc-per-node 4 examples/mesh.py`.
#
# **Discuss.** You have sixteen GPUs in two machines, and a model whose largest layer fits on one GPU. Do you need
# tensor parallelism at all? What would change your mind?

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("08")

# %% [markdown]
# ## Summary
#
# - A layer is cut by columns or by rows. With rows, ranks add up the output; with columns, the gradient of the input.
# - f: forward nothing, backward `all_reduce`. g: the reverse. Columns, then rows: one `all_reduce` in each pass.
# - Ranks send activations, 2 B (N-1)/N bytes each time.
# - Attention is cut by heads, embedding and loss by words; norms by tokens (sequence parallelism).
# - A mesh names axes. `tensor` sends most, and ranks wait for it most, so it stays inside a machine.
# - With a pipeline take ZeRO-1.
#
# Now the [exercises](../exercises/08_tensor_and_hybrid_exercises.ipynb); the last of them belongs to
# [08b](08b_replicator.ipynb).
#
# ## References
#
# - M. Shoeybi et al.: Megatron-LM: training multi-billion parameter language models using model parallelism.
#   arXiv:1909.08053, 2019.
# - D. Narayanan et al.: Efficient large-scale language model training on GPU clusters using Megatron-LM. SC, 2021.
# - V. Korthikanti et al.: Reducing activation recomputation in large transformer models. MLSys, 2023.
# - T. Brown et al.: Language models are few-shot learners. NeurIPS, 2020 (GPT-3's shape: table 2.1).
