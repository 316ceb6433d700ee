# %% [markdown]
# # 08b TF-Replicator's model
#
# Thirty minutes, optional. So far each program used its rank to decide who sends, receives and prints. Here you write
# the step of *one* replica, without any rank. A library runs this step on many processes, or as one graph.
# TF-Replicator did this in 2019. The library is gone, but TensorFlow 2 and JAX are still programmed in this way.
#
# **Questions.** Can code without ranks train on many ranks? How do four replicas become one graph? What can such a
# graph not contain?
#
# **Afterwards you can** write a step for many replicas without a rank in it; name the exchanges of a step; say which
# Python code a captured graph refuses, and why; recognise the same calls in TensorFlow 2 and JAX.
#
# **You need** [03 Collectives](03_collectives.ipynb) and the first half of [04 Data
# parallelism](04_data_parallel.ipynb); you do not need lesson 08.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dtlib.errors import DtlibError
from dtlib.lab import digits
from dtlib.lessons.l08 import figures
from dtlib.parallel.replicator import Replicator

# %% [markdown]
# ## The step of one replica
#
# A *replica* trains the model on its own slice of the data. You write two functions. `input_fn` returns the data of one
# replica, and `step_fn` trains on them. `optimizer.minimize(loss)` computes gradients, averages them over replicas, and
# takes the step.
#
# Some steps need more than an average of gradients. `map_reduce` combines the tensors of all replicas: in the next cell
# it counts the right answers of all replicas. `map_gather` concatenates the tensors. Gradients flow back through both,
# to every replica. As with collectives on ranks, all replicas must call these functions in the same order. **Look** for
# a rank in `step_fn`: there is none.

# %%
# %%px --local
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

# %% [markdown]
# The same `program` runs in two ways. The first is **between-graph replication**: one process per replica, on our ranks. Each
# exchange is a collective operation.

# %%
# %%px
comm = dtlib.init().comm
with dtlib.trace() as trace:
    between = program(Replicator(comm))
exchanged = [event.what for event in trace.events if event.name == "all_reduce"]
if comm.rank == 0:
    print(f"losses {tuple(between['loss'].shape)}: steps, replicas")

# %% [markdown]
# The second is **in-graph replication**: one process, this notebook's own, holds all four replicas. The engines do
# nothing. Why is this useful? If a library has the whole step as one graph, it can plan the step: order operations,
# fuse them, place each replica on a device. Each replica's step is *captured* as a graph, gradients included (by
# torch's `make_fx`). In a captured graph an exchange is only marked. *Rewiring* joins the four graphs: each mark
# becomes one exchange between them.
#
# **Predict.** How many `all_reduce`s does the rewired graph of the four replicas have, for one step?

# %% tags=["stub"]
lab.predict("all-reduces-in-the-graph", None)

# %% tags=["solution"]
lab.predict("all-reduces-in-the-graph", 2)

# %%
replicator = Replicator(replicas=4)
in_graph = program(replicator)
between = lab.values("between")[0]
assert (between["loss"] - in_graph["loss"]).abs().max() < 1e-12
assert (between["hits"] == in_graph["hits"]).all()
losses = [way["loss"].mean(1) for way in (between, in_graph)]
hits = in_graph["hits"][:, 0].tolist()
rows = [(step, *(f"{loss[step]:.10f}" for loss in losses), hits[step]) for step in (0, 1, 4, 9)]
lab.table(rows, ("step", "4 processes: loss", "1 graph: loss", "right answers of 96"))

# %% tags=["statement"]
# "Each replica has the same losses in both ways, to 1e-12."
assert all(len(set(row(f"{step}", "right answers of 96")[:2])) == 1 for step in (0, 1, 4, 9))

# %% [markdown]
# Each replica has the same losses in both ways, to 1e-12. (The number of right answers rises and falls, because ten
# steps are few.) Here is the rewired graph, from top to bottom. Look at the grey bars across all four columns: an
# `all_reduce` is an exchange, `apply_gradients` the step of the optimizer. (The figure leaves out operations that only
# change a tensor's shape or name; `print(replicator.graph().module.code)` shows them all.)

# %%
figures.rewired(replicator.graph())
exchanges = [node.meta["exchange"] for node in replicator.graph().exchanges]

# %% tags=["statement"]
# "each mark becomes one exchange between them"
assert count(r"==== all_reduce") == 2

# %% [markdown]
# And which messages did the four processes exchange?

# %%
exchanged = lab.values("exchanged")[0]
first = exchanged[: len(exchanged) // 10]
print(f"{len(exchanged)} in 10 steps; in the first:", *first, sep="\n    ")

# %% tags=["statement"]
# "The gradients of a step travel as one message: 650 gradients and two flags, one for each parameter (was it used?). The hits (right answers) follow."
assert found(r"(\d+) in 10 steps")[0] == 20
assert found(r"all_reduce\(mean\) of \((\d+),\) float64 all_reduce\(sum\)") == [64 * 10 + 10 + 2]

# %% [markdown]
# They made the same two exchanges. The gradients of a step travel as one message: 650 gradients and two flags, one for
# each parameter (was it used?). The hits (right answers) follow.
#
# **Predict.** The hits are reduced after `apply_gradients`. Were they computed with the parameters "before" or "after"
# the step?

# %% tags=["stub"]
lab.predict("hits-belong-to", None)

# %% tags=["solution"]
lab.predict("hits-belong-to", "before")

# %%
torch.manual_seed(0)
untrained = nn.Linear(64, 10).double()  # as `program` makes it
hits_before = int((untrained(images[:96]).argmax(1) == labels[:96]).sum())
print(f"right answers of 96 in step 0: {hits[0]}; by the parameters before any step: {hits_before}")

# %% tags=["statement"]
# "The scores were computed before the step"
assert len(set(found(r"right answers of 96 in step 0: (\d+); by the parameters before any step: (\d+)"))) == 1

# %% [markdown]
# The scores were computed before the step. Replicas move from exchange to exchange together: when `apply_gradients`
# changes the shared parameters, every replica has read the old ones, and none has read the new ones.

# %% [markdown]
# ## What a graph cannot hold
#
# A graph contains operations on tensors, but no values: it is captured before anything is computed. So a Python `if` on
# a value cannot be captured. Random numbers could be captured, but replicas in one process would draw from one
# generator. The library refuses both, and the message names the line:

# %%
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

# %% tags=["statement"]
# "the message names the line"
assert count(r"cannot capture") == 2 and found(r"in 'line (\d): if x.mean") == [2]

# %% [markdown]
# Both functions work with one process per replica, because there Python runs on real numbers. Our graph shows the idea,
# but it is not faster: its replicas take turns on one device, and it is captured again in each step. TF-Replicator's
# graph was built once. Then a counter, or a rate that Python computes, silently keeps its value from the capture. A
# library that captures once must check later whether these values have changed, as `torch.compile` does with its
# *guards*.
#
# ## Where it comes from
#
# TF-Replicator (P. Buchlovsky et al., 2019) had these two functions, for TensorFlow 1. We wrote this sketch from the
# paper, and have not run it. The wrapped optimizer in line 14 averages before it steps:
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
# | line | here | |
# |---|---|---|
# | 1 | `Replicator(comm)` or `Replicator(replicas=4)` | a process per replica, or all in this process |
# | 5 | `replicator.wrap_optimizer(torch.optim.SGD(...))` | averages gradients over replicas |
# | 17 to 20 | `replicator.run(step_fn, input_fn).mean(1)` | the sketch builds a graph, then runs it; ours runs at once |
#
# ## Where you meet it today
#
# | here | TensorFlow 2 | JAX |
# |---|---|---|
# | `run(step_fn, input_fn)` | `strategy.run(step_fn, args)` | `jax.shard_map(step_fn, mesh=...)` |
# | `input_fn(replica_id)` | `strategy.distribute_datasets_from_function` | arrays cut along an axis of the mesh |
# | `map_reduce(x)` | `ReplicaContext.all_reduce(op, x)` | `jax.lax.psum(x, axis)` |
# | `map_gather(x)` | `ReplicaContext.all_gather(x, axis)` | `jax.lax.all_gather(x, axis)` |
# | `wrap_optimizer` | `apply_gradients`, which *adds* gradients: divide the loss by the batch of all replicas | `jax.grad`, which adds up the gradients of shared parameters |
# | captured in each step | `tf.function`, once for each shape | `jax.jit`, once for each shape |
# | an `if` on a value: refused | rewritten into the graph by AutoGraph | refused: use `jnp.where` or `lax.cond` |
#
# PyTorch has no `step_fn`: `DistributedDataParallel` puts the average into `backward`, and
# `torch.distributed.nn.functional.all_reduce` is a `map_reduce` with gradients. `torch.compile` captures as much as
# possible: at such an `if` it ends the graph, lets Python decide, and begins another graph.
#
# **Discuss.** Which other programs capture something once, and then run it again and again?

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("08b")

# %% [markdown]
# ## Summary
#
# - `input_fn`, `step_fn`, `wrap_optimizer`, `map_reduce`, `map_gather`: a step of one replica, and no rank in it.
# - Between graphs: a process per replica, and each exchange is a collective. In one graph: captured, then rewired.
# - The losses are equal, to 1e-12. A graph has no values, so a branch on a value is refused.
# - TensorFlow 2 and JAX have the same programming model; torch hides the exchange in `backward`.
#
# Now the last of the [exercises](../exercises/08_tensor_and_hybrid_exercises.ipynb).
#
# ## References
#
# - P. Buchlovsky et al.: TF-Replicator: distributed machine learning for researchers. arXiv:1902.00465, 2019.
# - Distribution Strategy: revised API. A proposal of 2018 to the TensorFlow community, github.com/tensorflow/community,
#   rfcs/20181016-replicator.md.
# - Manual parallelism with `shard_map`, docs.jax.dev: collectives, and how `jax.grad` goes back through them.
# - J. Reed et al.: torch.fx: practical program capture and transformation for deep learning in Python. MLSys, 2022.
