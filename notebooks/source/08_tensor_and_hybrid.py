# %% [markdown] tags=["half-day"]
# # 08 Tensor and hybrid parallelism
#
# Ninety minutes. You cut single layers over ranks, count what then has to travel, put data, pipeline and tensor
# parallelism on the axes of one mesh, and write a training step once that runs on many processes or in one graph.
#
# **Questions.** What if one layer is too large for a rank? Where do ranks that share a layer have to talk? Which kind
# of parallelism belongs inside a machine, and which one between machines? Can the same code know nothing of all this?
#
# **Afterwards you can** cut a layer by columns and by rows, with the right gradients; say how many bytes each cut
# sends; place ranks on a mesh and name their groups; read and write a program for TF-Replicator's model.
#
# **You need** [03 Collectives](03_collectives.ipynb), [04 Data parallelism](04_data_parallel.ipynb), and for the second
# half of the mesh [06 ZeRO](06_zero.ipynb) and [07 Pipelines](07_pipelines.ipynb).

# %% tags=["half-day", "nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% tags=["half-day"]
from dtlib.lab.lessons.l08 import figures
from dtlib.parallel import tensor
from dtlib.parallel.tensor import plain
from dtlib.theory.collectives import elements_sent

# %% tags=["half-day"]
# %%px --local
import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from dtlib.lab import digits

# %% tags=["half-day"]
# %%px
world = dtlib.init()
comm = world.comm

# %% [markdown] tags=["half-day"]
# ## A layer too large for one rank
#
# Data parallelism and ZeRO cut the batch; a pipeline cuts between layers. Both need at least one layer, whole, on a
# rank while it computes. If that is too much, or if there are more ranks than samples, cut the layer: *tensor
# parallelism*. **All ranks then work on the same samples.**
#
# A linear layer is a product Y = X A, with X of shape (samples, inputs) and A of shape (inputs, outputs). (torch keeps
# the weight as (outputs, inputs), so that A's columns are its rows.) There are two ways to cut A among N ranks:
#
# - **by columns**: rank r has slice r of the columns, and computes X Aᵣ;
# - **by rows**: rank r has slice r of the rows, and that of the columns of X that meets them; it computes Xᵣ Aᵣ.
#
# **Predict.** After which of the two does Y need an `all_reduce`: `"columns"` or `"rows"`?

# %% tags=["half-day", "stub"]
lab.predict("needs-all-reduce", None)

# %% tags=["half-day", "solution"]
lab.predict("needs-all-reduce", "rows")

# %% tags=["half-day"]
# %%px
torch.manual_seed(0)  # so all ranks have the same
X = torch.randn(6, 8, dtype=torch.float64)
A = torch.randn(8, 12, dtype=torch.float64)
Y = X @ A  # the whole, to compare with


def mine(tensor, dim):
    return tensor.chunk(comm.size, dim)[world.rank]


def equal(a, b):
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-12)


by_columns = X @ mine(A, 1)
by_rows = mine(X, 1) @ mine(A, 0)
complete = {"columns": equal(by_columns, mine(Y, 1)), "rows": equal(by_rows, Y)}
assert equal(comm.all_reduce(by_rows.clone()), Y)

# %% [markdown] tags=["half-day"]
# By columns a rank has some outputs, complete. By rows it has a summand of all of them, and the `all_reduce` adds up.
#
# Now the backward pass. The gradient G of Y comes in. Each rank gets the gradient of its shard of A for itself. The
# layer before wants the gradient of X, which is G Aᵀ. **Predict:** for which cut does *that* need an `all_reduce`?

# %% tags=["half-day", "stub"]
lab.predict("needs-it-backward", None)

# %% tags=["half-day", "solution"]
lab.predict("needs-it-backward", "columns")

# %% tags=["half-day"]
# %%px
G = torch.randn(6, 12, dtype=torch.float64)  # equal on all ranks, as the seed was
dX, dA = G @ A.T, X.T @ G
of_columns = mine(G, 1) @ mine(A, 1).T  # this rank has its columns of G alone
of_rows = G @ mine(A, 0).T  # here it has all of G
complete_backward = {"columns": equal(of_columns, dX), "rows": equal(of_rows, mine(dX, 1))}
assert equal(comm.all_reduce(of_columns.clone()), dX)
assert equal(X.T @ mine(G, 1), mine(dA, 1)) and equal(mine(X, 1).T @ G, mine(dA, 0))

# %% tags=["half-day"]
figures.cuts(ranks=4)

# %% [markdown] tags=["half-day"]
# One is the other's mirror image. And nothing ever travels for the gradient of a *weight*: it is complete where the
# weight is.
#
# ## f and g
#
# Megatron-LM (M. Shoeybi et al., 2019, section 3) has two operations for it, in the forward and in the backward pass:
#
# | | forward | backward | where |
# |---|---|---|---|
# | **f** | x as it is | `all_reduce` of the gradient | before a cut by columns |
# | **g** | `all_reduce` | the gradient as it is | after a cut by rows |
#
# We read the file that runs. For autograd f and g are functions of their own, and each is what the other one does
# backward:

# %% tags=["half-day"]
lab.read(plain)
lab.read(plain.CopyToRanks, plain.ReduceFromRanks)

# %% [markdown] tags=["half-day"]
# A layer cut by columns, and one by rows. Why does the bias of the second come after the sum?

# %% tags=["half-day"]
lab.read(plain.slice_of, plain.ColumnParallelLinear, plain.RowParallelLinear)

# %% [markdown] tags=["half-day"]
# Two layers with an activation between them, as in every transformer. Cut the first **by columns, then the second by
# rows**: the columns of gelu(X A) that a rank has are just those that its rows of B need, so nothing travels in between.
# The other order would not do, as an activation of a sum is no sum of activations:

# %% tags=["half-day"]
one, two = torch.tensor(1.0), torch.tensor(2.0)
print(f"gelu(1) + gelu(1) = {gelu(one) + gelu(one):.4f}    gelu(1 + 1) = {gelu(two):.4f}")
lab.read(plain.ParallelMLP)

# %% [markdown] tags=["half-day"]
# Does it compute the same as one process, gradients included? And what does it send? X has 1,024 rows (the tokens of
# a batch) of 128 numbers in float64, and there are 512 hidden features.
#
# **Predict.** How many `all_reduce`s does a rank call in a forward and a backward pass, together?

# %% tags=["half-day", "stub"]
lab.predict("all-reduces-of-a-pair", None)

# %% tags=["half-day", "solution"]
lab.predict("all-reduces-of-a-pair", 2)

# %% tags=["half-day"]
# %%px
from dtlib.parallel.tensor.plain import ColumnParallelLinear, ParallelMLP

torch.manual_seed(0)
X, G = torch.randn(2, 1024, 128, dtype=torch.float64)
alone = comm.split(world.rank)  # a communicator of this rank only


def seeded(comm):
    torch.manual_seed(0)
    return ParallelMLP(128, 512, comm).double()


def gradients(mlp):
    x = X.clone().requires_grad_()
    z = mlp(x)
    z.backward(G)
    return {"Z": z, "X": x.grad, "A": mlp.linear1.weight.grad, "B": mlp.linear2.weight.grad}

# %% tags=["half-day"]
# %%px
whole = gradients(seeded(alone))  # in one process
expected = whole | {"A": mine(whole["A"], 0), "B": mine(whole["B"], 1)}
mlp = seeded(comm)
with dtlib.trace() as trace:
    found = gradients(mlp)
assert all(equal(found[name], expected[name]) for name in expected)
called = [(e.name, e.bytes) for e in trace.events if e.kind == "operation" and e.dtype == "float64"]

# %% tags=["half-day"]
calls = lab.values("called")[0]
formula = 8 * elements_sent("all_reduce", "ring", ranks=4, rank=0, count=1024 * 128)
assert formula == 2 * (1024 * 128 * 8) * 3 // 4  # 2 B (N-1) / N
rows = [
    (what, name, count, formula)
    for what, (name, count) in zip(("g, forward", "f, backward"), calls, strict=True)
]
lab.table(rows, ("rank 0 of 4", "operation", "bytes sent", "2 B (N-1)/N"))
assert all(count == formula for _, count in calls)

# %% [markdown] tags=["half-day"]
# Output and all gradients are those of one process, to 1e-12. B is the number of bytes of X. What travels depends on
# the activations, and not on the weights: *more hidden features cost no byte more*.
#
# **Change a line.** Below, the layer cut by columns has no f. **Predict:** which comes out wrong, the output `"Z"`, or the
# gradient of `"A"`, of `"B"` or of `"X"`?

# %% tags=["half-day", "stub"]
lab.predict("wrong-without-f", None)

# %% tags=["half-day", "solution"]
lab.predict("wrong-without-f", "X")

# %% tags=["half-day"]
# %%px
class WithoutF(ColumnParallelLinear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


mlp = seeded(comm)
torch.manual_seed(0)  # the same values
mlp.linear1 = WithoutF(128, 512, comm).double()
found = gradients(mlp)
wrong = [name for name in expected if not equal(found[name], expected[name])]
if world.rank == 0:
    print("wrong:", *wrong)

# %% [markdown] tags=["half-day"]
# Nothing fails, and this layer trains: only the layers before it learn from a summand. What the plain core leaves out:

# %% tags=["half-day"]
lab.read_end(plain)

# %% [markdown]
# ## A transformer in shards
#
# Everything in a transformer can be cut in this way:
#
# - **the perceptron**: by hidden features, as above;
# - **attention**: by heads. A head needs its own queries, keys and values alone; the first product is cut by columns,
#   head after head, and the last by rows;
# - **the embedding**: by words. A rank looks up the words that it has, gives zeros for the others, and g adds up;
# - **the output layer and the loss**: by words too. The logits are never put together.
#
# The full classes do that. Attention's forward pass mentions no rank:

# %%
lab.read(tensor.ParallelAttention.forward)

# %% [markdown]
# A small language model made of torch's own layers:

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

# %% [markdown]
# And the same in shards. `from_linear` and its like take a layer that is there, and keep this rank's shard.

# %%
# %%px
from dtlib.parallel import tensor


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

# %%
# %%px
ADAM = {"lr": 0.01, "eps": 1e-4}
t = torch.arange(TOKENS + 1)
texts = torch.stack([(7 * s + 3 * t * t) % WORDS for s in range(16)])  # a rule gives the next word
words, targets = texts[:, :-1], texts[:, 1:]


def train(model, words, targets, steps=10):
    adam, losses = torch.optim.AdamW(model.parameters(), **ADAM), []
    for _ in range(steps):
        adam.zero_grad()
        losses.append(model(words, targets))
        losses[-1].backward()
        adam.step()
    return torch.stack(losses).detach()


alone, cut = Whole().double(), Cut(Whole().double(), comm)
losses = [train(model, words, targets) for model in (alone, cut)]
assert equal(*losses)
assert equal(cut.mlp[0].weight.grad, mine(alone.mlp[0].weight.grad, 0))
assert equal(cut.mlp[2].weight.grad, mine(alone.mlp[2].weight.grad, 1))
assert equal(cut.norm.weight.grad, alone.norm.weight.grad)
if world.rank == 0:
    for step in (0, 9):
        one, four = (some[step] for some in losses)
        print(f"loss at step {step}: one process {one:.8f}, 4 ranks {four:.8f}")

# %% [markdown]
# Losses are equal to 1e-12 over ten steps of AdamW, and so are the gradients.
#
# **Predict.** What fraction of the model's parameters does rank 0 of 4 hold, in percent? (Ten percent off will do.)

# %% tags=["stub"]
lab.predict("percent-held", None)

# %% tags=["solution"]
lab.predict("percent-held", 26)

# %%
# %%px
def counts(model):
    children = model.named_children()
    counted = {name: sum(p.numel() for p in child.parameters()) for name, child in children}
    return counted | {"together": sum(counted.values())}


held, whole = counts(cut), counts(alone)

# %%
held, whole = lab.values("held")[0], lab.values("whole")[0]
rows = [(name, whole[name], n, f"{100 * n / whole[name]:.1f} %") for name, n in held.items()]
lab.table(rows, ("parameters", "one process", "rank 0 of 4", "fraction"))
percent = 100 * held["together"] / whole["together"]

# %% [markdown]
# The norm, and the biases that are added after g, are whole on all ranks, and nothing is sent for them: each rank
# computes the same gradient from the same activations and takes the same step, so they stay equal. Gradients, and what
# Adam keeps, go with the parameters.
#
# **Predict.** The loss needs the softmax over all 50 words, and a rank has 12 or 13 of them. How many numbers *for
# each token* does a rank give to `all_reduce`?

# %% tags=["stub"]
lab.predict("numbers-a-token", None)

# %% tags=["solution"]
lab.predict("numbers-a-token", 3)

# %%
# %%px
logits = cut.output(torch.zeros(16, TOKENS, WIDTH, dtype=torch.float64))  # of this rank's words
with dtlib.trace() as trace:
    tensor.vocab_parallel_cross_entropy(logits, targets, comm, "mean")
called_for_loss = [(event.what, event.bytes) for event in trace.events]

# %%
given, tokens = 0, 16 * 12
for what, count in lab.values("called_for_loss")[0]:
    given += count // 8 // 2  # by recursive doubling on 4 ranks: all of it goes twice
    print(f"{what}: {count:,} bytes sent")
print(f"{given} numbers for {tokens} tokens, among them one a rank, to know who has which words")

# %% [markdown]
# Putting the logits together would send all 50 of them; real vocabularies have fifty thousand words and more.
#
# ## Random numbers
#
# All ranks must draw the *same* numbers for what is whole (initial values, dropout between blocks), and *different*
# ones for what is cut (dropout inside), or each slice of the hidden features would lose the same places. Two generators,
# or two seeds:

# %%
# %%px
def dropped(seed):
    torch.manual_seed(seed)
    return "".join("." if kept == 0 else "x" for kept in nn.functional.dropout(torch.ones(16)))


outside, inside = dropped(seed=1), dropped(seed=1000 + world.rank)
print("outside the cut, one seed:", outside, "   inside, a seed a rank:", inside)
assert len(set(comm.all_gather_object(outside))) == 1
assert len(set(comm.all_gather_object(inside))) == 4

# %% [markdown] tags=["half-day"]
# ## A mesh of axes
#
# Tensor parallelism alone ends where layers have no more columns to give, or where the `all_reduce`s take longer than
# the products. So kinds of parallelism are combined: ranks stand on a grid whose axes have names. Along `tensor`, ranks
# share layers; along `data` they share the batch. `world.mesh(data=2, tensor=2)` makes a communicator for every line
# of that grid. The last axis varies fastest: its neighbours are ranks next to each other.

# %% tags=["half-day"]
figures.mesh(data=2, tensor=2)

# %% [markdown] tags=["half-day"]
# **Predict.** With whom does rank 3 average its gradients? Write a list of ranks, rank 3 among them.

# %% tags=["half-day", "stub"]
lab.predict("averages-with-3", None)

# %% tags=["half-day", "solution"]
lab.predict("averages-with-3", [1, 3])

# %% tags=["half-day"]
# %%px
mesh = world.mesh(data=2, tensor=2)
groups = {axis: mesh[axis].all_gather_object(world.rank) for axis in mesh.shape}

# %% tags=["half-day"]
rows = [(rank, group["data"], group["tensor"]) for rank, group in enumerate(lab.values("groups"))]
lab.table(rows, ("rank", "group along data", "group along tensor"))

# %% [markdown] tags=["half-day"]
# A perceptron on the digits, cut along `tensor`, inside the plain class of lesson 04 along `data`. Neither knows of the
# other: each was given another communicator.

# %% tags=["half-day"]
# %%px
from dtlib.parallel.data.plain import DataParallelBuckets
from dtlib.parallel.tensor.plain import ParallelMLP

(images, labels), _ = digits.load(torch.float64)


def net(comm):
    torch.manual_seed(0)
    return nn.Sequential(ParallelMLP(64, 256, comm), nn.Linear(64, 10)).double()


def steps(model, comm, count=10):
    """Losses on batches of 96 images, of which each rank of ``comm`` takes its slice."""
    adam, losses = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4), []
    for at in range(0, 96 * count, 96):
        x, y = (tensor[at : at + 96][comm.rank :: comm.size] for tensor in (images, labels))
        adam.zero_grad()
        losses.append(cross_entropy(model(x), y))
        losses[-1].backward()
        adam.step()
    return comm.all_reduce(torch.stack(losses).detach(), op="mean")

# %% tags=["half-day"]
# %%px
alone = comm.split(world.rank)  # a communicator of this rank only
of_one_process = steps(net(alone), alone)
model = DataParallelBuckets(net(mesh["tensor"]), mesh["data"])
of_the_mesh = steps(model, mesh["data"])
assert equal(of_one_process, of_the_mesh)
if world.rank == 0:
    print(f"One process and the mesh: equal losses, to 1e-12; the last is {of_the_mesh[-1]:.8f}.")

# %% [markdown] tags=["half-day"]
# What does each axis send in a step? Without the wrapper nothing travels along `data`.

# %% tags=["half-day"]
# %%px
def sent_in_a_pass(model):
    with dtlib.trace() as trace:
        cross_entropy(model(images[:48]), labels[:48]).backward()
    return trace.sent("all_reduce")[1]


along_tensor = sent_in_a_pass(net(mesh["tensor"]))
along_data = sent_in_a_pass(model) - along_tensor
numbers = [parameter.numel() for parameter in model.parameters()]

# %% tags=["half-day"]
numbers = lab.values("numbers")[0]
activations = 48 * 64 * 8  # bytes; the input of the first layer needs no gradient
by_formula = {"tensor": activations, "data": 8 * sum(numbers)}
what = {"tensor": "activations: g", "data": "gradients"}
rows = [(axis, lab.values(f"along_{axis}")[0], by_formula[axis], what[axis]) for axis in what]
lab.table(rows, ("axis", "bytes sent", "formula", "what travels"))
assert all(row[1] == row[2] for row in rows)

# %% [markdown] tags=["half-day"]
# Our net is tiny and our batch is small, so that here `data` sends more. Which one sends more in earnest? Take the
# shape of GPT-3 (96 layers of width 12,288) on 512 ranks, as data=8, pipe=8, tensor=8; texts of 2,048 tokens, 32
# micro-batches of one text each, 16 bits a number. Not measured: formulas.
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
    # activations to the next stage, gradients to the one before, for each micro-batch
    "pipe": 2 * activations * micro_batches,
    # two f and two g a layer: attention and perceptron
    "tensor": 4 * 2 * (t - 1) / t * activations * layers / p * micro_batches,
}
figures.bytes_of_axes(in_a_step, "GPT-3's shape on 8 x 8 x 8 ranks (formulas)")

# %% [markdown] tags=["half-day"]
# Bytes are not all: what waits for them matters as well. The `all_reduce`s of `tensor` stand in the way of every layer; gradients along
# `data` can travel during the backward pass; messages along `pipe` are small, and go to one neighbour. So `tensor` is
# put **inside a machine**, where links are fastest, and is seldom larger than one (D. Narayanan et al., 2021); `pipe`
# and `data` go between machines. Adjacent ranks mostly share a machine: so `tensor` is the last axis of a mesh.
#
# ## Three axes
#
# Eight ranks, two along each of three axes. Nothing runs here; the same function of a rank's number decides who
# stands where. **Your turn:** before you look at the table, with which rank does rank 5 share its layers (`tensor`), to
# which does it hand activations (`pipe`), and with which does it average (`data`)?

# %% tags=["half-day", "stub"]
lab.predict("partners-of-5", {"data": None, "pipe": None, "tensor": None})

# %% tags=["half-day", "solution"]
lab.predict("partners-of-5", {"data": 1, "pipe": 7, "tensor": 4})

# %% tags=["half-day"]
figures.mesh(data=2, pipe=2, tensor=2)

# %% [markdown]
# All three at once on eight real ranks are in the library's tests (`tests/test_hybrids.py`), against one process.
#
# ## Pipelines with data parallelism and ZeRO
#
# On our four ranks: two pipelines of two stages, side by side. `PipelineModule(num_stages=2)` makes the mesh itself,
# and the config chooses the stage of ZeRO (lesson 06) for the optimizer along `data`. DeepSpeed allows stage 1
# here and refuses stage 2 and 3 together with a pipeline. Stage 2 can be done; let us see what it costs.
#
# **Predict.** A step has four micro-batches. Stage 1 reduces gradients once a step. How many times as many bytes does
# stage 2 send for `reduce_scatter`?

# %% tags=["stub"]
lab.predict("times-stage-1", None)

# %% tags=["solution"]
lab.predict("times-stage-1", 4)

# %%
# %%px
from collections import Counter

from dtlib.pipe import LayerSpec, PipelineModule

SPECS = [
    LayerSpec(nn.Linear, 64, 128), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 128, 128),
    LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 128, 10),
]

# %%
# %%px
def two_pipelines(stage):
    """Losses of five steps on 96 images, and bytes of numbers that this rank sent, by operation."""
    module = PipelineModule(SPECS, num_stages=2, loss_fn=cross_entropy).double()
    config = {
        "train_batch_size": 96,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = dtlib.initialize(model=module, config=config)
    data, losses = module.data_comm, []
    with dtlib.trace() as trace:
        for at in range(0, 5 * 96, 96):
            x, y = (tensor[at : at + 96][data.rank :: 2].chunk(4) for tensor in (images, labels))
            losses.append(engine.train_batch(zip(x, y, strict=True)).item())
    sent = Counter()
    for event in trace.events:
        sent[event.name] += event.bytes if event.dtype == "float64" else 0  # without headers
    return losses, sent

# %%
# %%px
of_stage = {stage: two_pipelines(stage) for stage in (0, 1, 2)}
whole = PipelineModule(SPECS, 1, cross_entropy, comm=alone).double()  # in one process
adam, expected = torch.optim.AdamW(whole.parameters(), lr=0.01, eps=1e-4), []
for at in range(0, 5 * 96, 96):
    adam.zero_grad()
    loss = cross_entropy(whole(images[at : at + 96]), labels[at : at + 96])
    loss.backward()
    adam.step()
    expected.append(loss.item())
for losses, _ in of_stage.values():
    assert max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True)) < 1e-12

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

# %% [markdown]
# Losses are those of one process, at all stages. `send` is the pipeline: activations and their gradients. With a
# pipeline, many micro-batches are wanted, as they make the bubble small; for stage 2 each of them costs a
# `reduce_scatter`. And of gradients a rank of a pipeline has only those of its own stage to begin with. That is why one
# stays at stage 1 here.
#
# ## What holds on GPUs, and what does not
#
# Seen here, and true there: the values, where an `all_reduce` stands, the bytes along each axis, and who talks with
# whom. Not shown here: speed. Our ranks share one machine and two or a few cores, and f and g wait until they are done.
#
# On GPUs use Megatron-LM, DeepSpeed, or torch's own DTensor. There the plan of our pair is `parallelize_module(model,
# mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})`, and `init_device_mesh` is `world.mesh`. They cut
# norms and dropout as well, along the tokens (*sequence parallelism*: an `all_gather` and a `reduce_scatter` in the place
# of each `all_reduce`, together as many bytes), and can overlap exchanges with products. A node often has 8 GPUs, on
# links that are several times as fast as those between nodes; on our CPU there is no such difference to see.

# %% [markdown] tags=["half-day"]
# ## TF-Replicator: the step of one replica
#
# All this is much to know for somebody who only wants to train a model. TF-Replicator (P. Buchlovsky et al., 2019)
# hides it: the user writes what *one* replica reads and does; the library runs it on all of them. A program in that
# style, for TensorFlow 1, which was written for this lesson and does not run here. `input_fn`, `step_fn`, `run` and
# `wrap_optimizer` are its names.
#
# ```python
#  1   replicator = MultiGpuReplicator(num_gpus=4)
#  2
#  3   with replicator.context():                               # variables: once for all replicas
#  4       net = snt.Linear(10)
#  5       optimizer = replicator.wrap_optimizer(tf.train.MomentumOptimizer(0.1, 0.9))
#  6
#  7   def input_fn(replica_id):
#  8       return digits_dataset().shard(4, replica_id).batch(24)
#  9
# 10   def step_fn(inputs):
# 11       images, labels = inputs
# 12       scores = net(images)
# 13       loss = tf.losses.sparse_softmax_cross_entropy(labels, scores)
# 14       with tf.control_dependencies([optimizer.minimize(loss)]):
# 15           return tf.identity(loss)
# 16
# 17   loss = tf.reduce_mean(replicator.run(step_fn, input_fn))  # builds the graph; nothing has run yet
# 18   with tf.train.MonitoredSession() as session:
# 19       for _ in range(10):
# 20           session.run(loss)
# ```
#
# Line by line, with ours:
#
# | there | here | |
# |---|---|---|
# | 1 | `Replicator(comm)` or `Replicator(replicas=4)` | a process a replica, or all in this process |
# | 3, 4 | `model = nn.Linear(64, 10)` | one copy a process, which `wrap_optimizer` makes equal; or one copy for all |
# | 5 | `replicator.wrap_optimizer(torch.optim.SGD(...))` | from now on gradients are averaged over replicas |
# | 7, 8 | `def input_fn(replica_id)` | what this replica reads |
# | 10 to 13 | `def step_fn(inputs)` | what it computes: the same code on all replicas |
# | 14 | `optimizer.minimize(loss)` | gradients, their average, the step |
# | 15 | `return loss` | this replica's; `run` gives those of all |
# | 17 to 20 | `replicator.run(step_fn, input_fn).mean(1)` | there a graph is built, and run by hand; here it runs |

# %% tags=["half-day"]
# %%px --local
from dtlib.parallel.replicator import Replicator

(images, labels), _ = digits.load(torch.float64)


def program(replicator):
    torch.manual_seed(0)
    model = nn.Linear(64, 10).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = replicator.wrap_optimizer(sgd)

    def input_fn(replica_id):
        mine = slice(replica_id, None, replicator.replicas)
        for at in range(0, 960, 96):
            yield images[at : at + 96][mine], labels[at : at + 96][mine]

    def step_fn(inputs):
        x, y = inputs
        scores = model(x)
        loss = cross_entropy(scores, y)
        optimizer.minimize(loss)
        hits = replicator.map_reduce((scores.argmax(1) == y).sum())
        return {"loss": loss, "hits": hits}

    return replicator.run(step_fn, input_fn)

# %% [markdown] tags=["half-day"]
# `map_reduce` combines a tensor of every replica: here it counts what all of them got right. `map_gather` puts tensors
# one after the other. The gradients of both flow back to every replica. (In a proposal for TensorFlow of 2018, authors of
# TF-Replicator call such exchanges `all_sum`, `all_min`, `all_max`, `all_gather` and `broadcast`, and ask for the same as
# here: all replicas make them, in the same order.)
#
# **Between-graph replication**: one process a replica, on our engines. Whatever is exchanged is an operation.

# %% tags=["half-day"]
# %%px
with dtlib.trace() as trace:
    between = program(Replicator(comm))
per_step = [event.what for event in trace.events if event.name == "all_reduce"][:2]
if world.rank == 0:
    print(f"losses {tuple(between['loss'].shape)}: steps, replicas")
    print("in a step:", *per_step, sep="\n    ")

# %% [markdown] tags=["half-day"]
# The gradients of a step travel as one message, with a flag for each of the two parameters (was it used?); then the
# hits.
#
# **In-graph replication**: one process, this notebook's own, holds all four replicas. No engine takes part. Each
# replica's step is *captured* as a graph, gradients included (by torch's `make_fx`), in which an exchange is only a
# mark. Then the four graphs are *rewired* into one, in which each mark has become a real exchange between the replicas.
#
# **Predict.** How many `all_reduce`s has the rewired graph of the four replicas, for one step?

# %% tags=["half-day", "stub"]
lab.predict("all-reduces-in-the-graph", None)

# %% tags=["half-day", "solution"]
lab.predict("all-reduces-in-the-graph", 2)

# %% tags=["half-day"]
replicator = Replicator(replicas=4)
in_graph = program(replicator)
between = lab.values("between")[0]
assert (between["loss"] - in_graph["loss"]).abs().max() < 1e-12
assert (between["hits"] == in_graph["hits"]).all()
losses = [way["loss"].mean(1) for way in (between, in_graph)]
hits = in_graph["hits"][:, 0].tolist()
rows = [(step, *(f"{loss[step]:.10f}" for loss in losses), hits[step]) for step in (0, 1, 4, 9)]
headers = ("step", "4 processes: loss", "1 graph: loss", "right of 96")
lab.table(rows, headers)

# %% [markdown] tags=["half-day"]
# The same losses on each replica, to 1e-12. Here is the rewired graph. (Operations that only give a tensor another shape or
# name are left out; `print(replicator.graph())` counts all of them, and `graph().dot()` is for Graphviz.)

# %% tags=["half-day"]
figures.rewired(replicator.graph())
exchanges = [node.meta["exchange"] for node in replicator.graph().exchanges]

# %% [markdown] tags=["half-day"]
# Replicas go from exchange to exchange in step. When `apply_gradients` changes the shared variables, every replica has
# read the old ones, and none has read the new ones.
#
# **Your turn.** What does `map_reduce` give if each of four replicas adds up every fourth of the numbers 0 to 11?

# %% tags=["half-day", "stub"]
lab.predict("sum-over-replicas", None)

# %% tags=["half-day", "solution"]
lab.predict("sum-over-replicas", 66)

# %% tags=["half-day"]
items = torch.arange(12.0)


def total(_):
    return replicator.map_reduce(lambda replica_id: items[replica_id :: replicator.replicas].sum())


sums = replicator.run(total, lambda replica_id: [torch.zeros(1)])
print(f"of replicas 0 to 3: {sums[0].tolist()}")

# %% [markdown] tags=["half-day"]
# ## What a graph cannot hold
#
# A graph does the same operations every time. A value that becomes Python's, a random number, a counter: the graph
# would keep what it was when it was captured, and be wrong without a word. So it is refused, with its line:

# %% tags=["half-day"]
from dtlib.errors import DtlibError


def step_with_a_branch(x):
    if x.mean() > 0:
        return x.sum()
    return -x.sum()


def step_with_a_coin(x):
    return (x * torch.rand(3)).sum()


for step_fn in (step_with_a_branch, step_with_a_coin):
    try:
        replicator.run(step_fn, lambda replica_id: [torch.ones(3)])
    except DtlibError as refusal:
        print(lab.fold(f"{refusal}\n"))

# %% [markdown] tags=["half-day"]
# Both work with a process a replica, for there Python runs in every step. Whoever captures graphs makes this trade.
# What differs from the original: its in-graph replicas have a device each; ours take turns on one, so the graph shows
# what happens, and is no faster.
#
# ## Summary
#
# - A layer is cut by columns or by rows. By rows, the output has to be added up; by columns, the gradient of the input.
# - f: forward nothing, backward `all_reduce`. g: the reverse. Columns, then rows: one each way, and nothing between.
# - What travels are activations, 2 B (N-1)/N a time; nothing ever travels for the gradient of a cut weight.
# - Attention is cut by heads, embedding and loss by words. What is whole stays equal without being sent; random numbers
#   are the same outside the cut, and different inside.
# - A mesh names axes. `tensor` sends most and waits most, so it is the innermost; `data` and `pipe` go between
#   machines.
# - Pipelines with ZeRO-2 work; they pay one `reduce_scatter` a micro-batch.
# - TF-Replicator: `input_fn`, `step_fn`, `wrap_optimizer`, `map_reduce`. Run as processes, or captured and rewired.
#
# Now the [exercises](../exercises/08_tensor_and_hybrid_exercises.ipynb).
#
# ## References
#
# - M. Shoeybi et al.: Megatron-LM: training multi-billion parameter language models using model parallelism.
#   arXiv:1909.08053, 2019.
# - D. Narayanan et al.: Efficient large-scale language model training on GPU clusters using Megatron-LM. SC, 2021.
# - V. Korthikanti et al.: Reducing activation recomputation in large transformer models. MLSys, 2023 (sequence
#   parallelism).
# - T. Brown et al.: Language models are few-shot learners. NeurIPS, 2020 (GPT-3's shape: table 2.1).
# - P. Buchlovsky et al.: TF-Replicator: distributed machine learning for researchers. arXiv:1902.00465, 2019.
# - Replicator API. A proposal to the TensorFlow community by several of these authors, 17 October 2018.
# - J. Reed et al.: torch.fx: practical program capture and transformation for deep learning in Python. MLSys, 2022.
# - DeepSpeed's pipeline engine: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism" (an assertion).
# - torch's documentation of `torch.distributed.tensor.parallel` and of `init_device_mesh`.
