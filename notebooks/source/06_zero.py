# %% [markdown] tags=["two-hours", "half-day"]
# # 06 ZeRO
#
# Two hours; twenty minutes in the two-hour workshop. Data parallelism keeps the same model, gradients and optimizer
# states on every rank. You read how they are shared out, one after the other, until each rank keeps 1/N of everything,
# and you count the bytes: those that a rank holds, and those that it sends.
#
# **Questions.** What fills the memory? How much of it does every rank keep without need? What does it cost to share
# it out? Which setting makes a model fit?
#
# **Afterwards you can** predict the memory of a model to the byte, for each stage; read and change all three; say what
# each stage sends, also with micro-batches; save on four ranks and go on with three; choose a stage for a budget.
#
# **You need** [03 Collectives](03_collectives.ipynb) (reduce_scatter, all_gather) and the beginning of [04 Data
# parallelism](04_data_parallel.ipynb).

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% tags=["two-hours", "half-day"]
import csv
from pathlib import Path


from dtlib.lab.lessons.l06 import figures
from dtlib.parallel.zero import plain
from dtlib.theory.zero import GB, GIB, SCHEMES, fewest_ranks, zero_bytes, zero_wire_elements

# %% tags=["two-hours", "half-day"]
# %%px
from contextlib import nullcontext

import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from dtlib.lab import digits

world = dtlib.init()
comm = world.comm

# %% [markdown] tags=["two-hours", "half-day"]
# ## What fills the memory?
#
# In *mixed precision* the model computes in 16 bits. Adam, the usual optimizer, adds small steps to the weights, too
# small for 16 bits; so it keeps a *master copy* of them in 32 bits, and two numbers more for each: a running mean of
# the gradients and one of their squares. Together they are the *model states*:

# %% tags=["two-hours", "half-day"]
mixed = SCHEMES["mixed_adam"]
rows = [
    ("parameters", "16 bits", mixed.parameters),
    ("gradients", "16 bits", mixed.gradients),
    ("master weights", "32 bits", mixed.master_weights),
    ("Adam: two running means", "2 x 32 bits", mixed.optimizer_states),
    ("together", "", mixed.total),
]
lab.table(rows, ("", "", "bytes a parameter"))

# %% [markdown] tags=["two-hours", "half-day"]
# Here a GB is 10⁹ bytes, as in the papers. A GiB is 2³⁰ bytes, 7 % more; tools such as `nvidia-smi` count that way,
# and an accelerator "of 80 GB" has about 80 GiB. From here on it is always said which.
#
# **Predict.** A model has 7.5 billion parameters. How many GB of model states does a rank hold in data parallelism on
# 64 ranks?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("gigabytes-a-rank", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("gigabytes-a-rank", 120)

# %% tags=["two-hours", "half-day"]
for ranks in (1, 64, 1024):
    held = sum(zero_bytes(7_500_000_000, ranks, stage=0).values())
    print(f"{ranks:>5} ranks: {held / GB:.0f} GB, {held / GIB:.1f} GiB a rank")

# %% [markdown] tags=["two-hours", "half-day"]
# More ranks do not help: each holds the same. Activations (what the forward pass keeps for the backward pass) come on
# top; of them later.
#
# **ZeRO** (*zero redundancy optimizer*, S. Rajbhandari et al., 2020) removes what is held N times. Stage 1 shares out
# the optimizer, stage 2 the gradients as well, stage 3 the parameters too. Filled is what a rank keeps:

# %% tags=["two-hours", "half-day"]
figures.shards(ranks=4)

# %% [markdown] tags=["two-hours", "half-day"]
# ## Stage 1: each rank updates a quarter
#
# Every rank takes the same optimizer step on all parameters: four times the same work with the same states. Let each
# take the step for a quarter, and tell the others. Where a quarter begins does not matter, as Adam works element by
# element. We read the file that runs:

# %% tags=["two-hours", "half-day"]
lab.read(plain)
lab.read(plain.Unit)

# %% [markdown] tags=["two-hours", "half-day"]
# In `step`, `reduce_scatter` computes the mean of all ranks' gradients, and each rank gets its own shard of it. Then
# Adam. Then `all_gather`: everybody gets all new values. (`Contract` refuses what the class does not do.)

# %% tags=["two-hours", "half-day"]
lab.read(plain.Stage1)

# %% [markdown] tags=["two-hours", "half-day"]
# Here is the net, in float64, so that no mistake hides behind rounding, and a loop that trains any of our models.

# %% tags=["two-hours", "half-day"]
# %%px
(x, y), test = digits.load(torch.float64)
ADAM = {"lr": 0.01, "eps": 1e-4}
EVERY_FOURTH = slice(world.rank, None, comm.size)


def fresh_net(dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*layers).to(dtype)


def train(model, *after_backward, steps=10):
    """So many steps on this rank's slice of each batch; returns the losses."""
    losses = []
    for at in range(0, 96 * steps, 96):
        images, labels = x[at : at + 96][EVERY_FOURTH], y[at : at + 96][EVERY_FOURTH]
        losses.append(cross_entropy(model(images), labels))
        losses[-1].backward()
        for do in after_backward:
            do()
    return comm.all_reduce(torch.stack(losses).detach(), op="mean")

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** We train by data parallelism, then by stage 1. How many times as many bytes does stage 1 send?
# Think of how a ring all-reduce works.

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("bytes-of-stage-1", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("bytes-of-stage-1", 1)

# %% tags=["two-hours", "half-day"]
# %%px
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3

model = DataParallel(fresh_net(), comm, algorithm="ring")
adam = AdamW(model.parameters(), **ADAM)
with dtlib.trace() as trace:
    losses = {"data parallelism": train(model, adam.step, adam.zero_grad)}
sent_by_data_parallelism = trace.sent()[1]

model = fresh_net()
zero = Stage1(comm, model, AdamW, **ADAM)
with dtlib.trace() as trace:
    losses["stage 1"] = train(model, zero.step)
sent_by_stage_1 = trace.sent()[1]

# %% tags=["two-hours", "half-day"]
# %%px
def states_of(optimizer):
    states = [state for one in optimizer.state.values() for state in one.values()]
    return sum(state.numel() for state in states if state.dim())


assert (losses["stage 1"] - losses["data parallelism"]).abs().max() < 1e-12
if world.rank == 0:
    print("Losses of data parallelism and stage 1 are equal, to 1e-12.")
    print(f"Numbers that Adam keeps: {states_of(adam):,} and {states_of(zero.optimizer):,}.")

# %% [markdown] tags=["two-hours", "half-day"]
# That is the surprise of ZeRO: a ring all-reduce *is* a reduce_scatter and an all_gather. Stage 1 puts the
# optimizer's step between the two. **The same bytes travel, the same numbers come out, and a quarter of the optimizer
# is left.**

# %% [markdown] tags=["half-day"]
# ## Stage 2: gradients go as they come
#
# Stage 1 keeps all gradients until the step, though a rank needs the mean of its shard only. So reduce them *during*
# the backward pass, and free them. Who calls `reduce` then? autograd, through a hook (lesson 04), for the last unit
# first:

# %% tags=["half-day"]
lab.read(plain.Stage2)

# %% [markdown] tags=["half-day"]
# ## Stage 3: whole only while it computes
#
# Now the parameters. A unit needs its weights twice: in its forward pass and in its backward pass. In between, and the
# rest of the time, a quarter will do. *Gather before use, free after use.* (torch's FSDP2 says *unshard* and *reshard*.)

# %% tags=["half-day"]
lab.read(plain.Stage3)

# %% [markdown] tags=["two-hours", "half-day"]
# ## All stages, one table
#
# Stages 2 and 3 go further: gradients, then parameters in shards. The three classes of the file, a unit for each linear
# layer:

# %% tags=["two-hours", "half-day"]
# %%px
def plain_losses(kind):
    """Losses of ten steps; all_gathers of a step; bytes of flat memory between steps."""
    model = fresh_net()
    units = [module for module in model if isinstance(module, nn.Linear)]
    zero = kind(comm, model, AdamW, units, **ADAM)
    with dtlib.trace() as trace:
        losses = train(model, zero.step)
    calls = [e for e in trace.events if e.kind == "operation" and e.name == "all_gather"]
    gathers = [e for e in calls if e.dtype == "float64"]
    held = sum(unit.flat.untyped_storage().nbytes() for unit in zero.units)
    return losses, len(gathers) // 10, held


of_stage = {kind.__name__: plain_losses(kind) for kind in (Stage1, Stage2, Stage3)}
for of_this, *_ in of_stage.values():
    assert (of_this - losses["data parallelism"]).abs().max() < 1e-12

# %% tags=["two-hours", "half-day"]
of_stage = lab.values("of_stage")[0]
alone = lab.values("losses")[0]["data parallelism"]
columns = [alone, *(losses for losses, *_ in of_stage.values())]
rows = [(f"loss at step {at}", *(f"{losses[at]:.8f}" for losses in columns)) for at in (0, 1, 9)]
rows.append(("whole between steps", "", *(f"{held:,} bytes" for *_, held in of_stage.values())))
lab.table(rows, ("", "data parallelism", *of_stage), align="lrrrr")

# %% [markdown] tags=["half-day"]
# **Change a line.** Below, `forward_ends` frees nothing: weights stay whole until the backward pass has used them. The
# losses stay the same. Three units are gathered twice a step in `Stage3`, and how many `all_gather`s are left here?

# %% tags=["half-day", "stub"]
lab.predict("gathers-left", None)

# %% tags=["half-day", "solution"]
lab.predict("gathers-left", 3)

# %% tags=["half-day"]
# %%px
class KeptUntilBackward(Stage3):
    def forward_ends(self, unit, module, inputs, output):
        pass


kept_losses, gathers, _ = plain_losses(KeptUntilBackward)
assert (kept_losses - losses["data parallelism"]).abs().max() < 1e-12
if world.rank == 0:
    print(f"Stage3: {of_stage['Stage3'][1]} all_gathers a step; here: {gathers}. The same losses.")

# %% tags=["half-day"]
lab.read_end(plain)

# %% [markdown] tags=["half-day"]
# That is `reshard_after_forward=False` of FSDP2: fewer bytes sent, more held. The full classes, for what follows. Stages 1
# and 2 are an optimizer; stage 3 is a form of the model, and its optimizer is torch's own, made *after* `fully_shard`.

# %% tags=["half-day"]
# %%px
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.sharded import fully_shard


def at_stage(stage):
    """A model, and the optimizer that belongs to it."""
    model = fresh_net()
    if stage == 0:
        model = DataParallel(model, comm, algorithm="ring")
    if stage in (1, 2):
        return model, ZeroOptimizer(model.parameters(), AdamW, comm, stage=stage, **ADAM)
    if stage == 3:
        for module in model:
            if isinstance(module, nn.Linear):
                fully_shard(module, comm)
        fully_shard(model, comm)
    return model, AdamW(model.parameters(), **ADAM)

# %% [markdown] tags=["two-hours", "half-day"]
# ## Memory, to the byte
#
# `dtlib.memory` looks at every storage that a rank holds, and counts it once. A model in bfloat16, with master
# weights, by `dtlib.initialize`, which gives each stage from a config (more of that at the end).
#
# **Predict.** On four ranks, how many bytes a parameter does a rank hold at stage 2?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("bytes-at-stage-2", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("bytes-at-stage-2", 5.5)

# %% tags=["two-hours", "half-day"]
# %%px
def counted(stage, comm):
    """One step of the net in mixed precision, counted."""
    config = {
        "train_micro_batch_size_per_gpu": 24,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = dtlib.initialize(model=fresh_net(), config=config, comm=comm)
    with dtlib.memory(engine) as m:
        engine.train_batch(iter([(x[:24].bfloat16(), y[:24].clone())]))
    return m


reports = {stage: counted(stage, comm) for stage in range(4)}
lines_of = {stage: report.lines for stage, report in reports.items()}
if world.rank == 0:
    display(reports[2].beside(stage=2, scheme="mixed_adam"))

# %% [markdown] tags=["two-hours", "half-day"]
# Every line that the formula knows is met exactly: rank 0's quarter is rounded up to a whole element. *Padding* makes
# the shards equal, *step counters* are what Adam keeps once a tensor, and *communication* is memory in which messages
# are put together: of buckets or units, which are smaller than a large model, and the ring's own. *Peak* is the most
# that was allocated at a time. Now all stages, counted beside the formula:

# %% tags=["two-hours", "half-day"]
held = lab.values("lines_of")[0]
parameters = held[0]["parameters"] // 2  # 16 bits each
sizes = {stage: parameters for stage in range(3)} | {3: [8320, 16512, 1290]}  # stage 3: by unit
groups = {
    name: {"counted": held[stage], "formula": zero_bytes(sizes[stage], 4, stage)}
    for stage, name in enumerate(figures.STAGES)
}
figures.bars(groups, title="Model states of rank 0 of 4")
for both in groups.values():
    assert all(both["counted"][line] == count for line, count in both["formula"].items())

# %% [markdown] tags=["two-hours", "half-day"]
# ## 64 ranks
#
# The paper's first figure has 7.5 billion parameters on 64 ranks. We have neither. But what rank 0 of 64 holds does
# not depend on the others being there: `dtlib.comm.solo(0, 64)` is a communicator whose other ranks do not exist.
# **SIMULATED:** its values mean nothing, its bytes do. The model is our small net, and bytes a parameter are scaled
# up.

# %% tags=["two-hours", "half-day"]
# %%px
simulated = {stage: counted(stage, dtlib.comm.solo(0, 64)).lines for stage in range(4)}

# %% tags=["two-hours", "half-day"]
def published(name):
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (file := folder / "data" / name).exists():
            return list(csv.DictReader(file.open(newline="")))
    raise FileNotFoundError(f"data/{name}")


figure_1 = [float(row["GB"]) for row in published("zero_figure1_7p5B_Nd64.csv")]
P, groups = 7_500_000_000, {}
for stage, name in enumerate(figures.STAGES):
    lines = lab.values("simulated")[0][stage]
    groups[name] = {
        "simulated": {line: count / parameters * P / GB for line, count in lines.items()},
        "formula": {line: count / GB for line, count in zero_bytes(P, 64, stage).items()},
    }
    assert round(sum(groups[name]["formula"].values()), 1) == figure_1[stage]

# %% tags=["two-hours", "half-day"]
title = "7.5 billion parameters, rank 0 of 64 (SIMULATED, scaled up), and published"
figures.bars(groups, "GB", dict(zip(figures.STAGES, figure_1, strict=True)), title)

# %% [markdown] tags=["two-hours", "half-day"]
# The published numbers (S. Rajbhandari et al., figure 1) and the formula agree in all digits that are printed. The
# simulated ones are a little higher: the small net has padding and step counters that a large one would not notice.

# %% [markdown] tags=["half-day"]
# ## What it costs: bytes on the wire
#
# We count what a rank sends for parameters and gradients in one step, in units of P (N-1)/N, P being the parameters.
# A ring's reduce_scatter or all_gather is 1, its all_reduce 2.
#
# **Predict.** How many units does stage 3 send?

# %% tags=["half-day", "stub"]
lab.predict("units-of-stage-3", None)

# %% tags=["half-day", "solution"]
lab.predict("units-of-stage-3", 3)

# %% tags=["half-day"]
# %%px
def sent_in_a_step(stage, micro_steps=1):
    """Bytes that this rank sends for gradients and parameters."""
    model, optimizer = at_stage(stage)
    with dtlib.trace() as trace:
        for micro_step in range(micro_steps):
            waits = stage == 0 and micro_step < micro_steps - 1
            with model.no_sync() if waits else nullcontext():
                (cross_entropy(model(x[:24]), y[:24]) / micro_steps).backward()
        optimizer.step()
    operations = ("all_reduce",) if stage == 0 else ("reduce_scatter", "all_gather")
    return sum(trace.sent(operation)[1] for operation in operations)


sent_bytes = {(stage, m): sent_in_a_step(stage, m) for stage in range(4) for m in (1, 4)}

# %% tags=["half-day"]
sent = lab.values("sent_bytes")[0]
flat = {0: parameters + 7, 1: parameters, 2: parameters, 3: [8320, 16512, 1290]}


def row(stage, micro_steps=1):
    """What a rank sent, by the formula, and in units of P (N-1)/N."""
    formula = 8 * zero_wire_elements(flat[stage], 4, stage, micro_steps)  # float64
    assert formula == sent[stage, micro_steps]
    return sent[stage, micro_steps], formula, f"{sent[stage, micro_steps] / (6 * parameters):.3f}"


paper = {line["scheme"]: line["volume_in_units_of_P"] for line in published("zero_comm_volume.csv")}
names = ("DP all-reduce", "ZeRO-1", "ZeRO-2", "ZeRO-3")
units_sent = [(figures.STAGES[stage], *row(stage), paper[name]) for stage, name in enumerate(names)]
headers = ("", "bytes sent", "formula", "units", "published")
lab.table(units_sent, headers)

# %% [markdown] tags=["half-day"]
# Stages 1 and 2 send what data parallelism sends, stage 3 half as much again: parameters travel twice. To the byte
# there are 7 flags in data parallelism (which parameter was used, and whether `batch_size` was set), and padding in the
# others.

# %% [markdown] tags=["half-day"]
# **Your turn.** A batch comes in four *micro-batches*, whose gradients are added up (*accumulation*), and then there
# is one step. Stage 1 sends its gradients once a step. Stage 2 has freed them, so it sends after every backward pass.
# How many units does stage 2 send?

# %% tags=["half-day", "stub"]
lab.predict("units-of-four-micro-batches", None)

# %% tags=["half-day", "solution"]
lab.predict("units-of-four-micro-batches", 5)

# %% tags=["half-day"]
units_of_four = [(name, *row(stage, 4)) for stage, name in enumerate(figures.STAGES)]
headers = ("4 micro-batches", "bytes sent", "formula", "units")
lab.table(units_of_four, headers)

# %% [markdown] tags=["half-day"]
# So with many micro-batches stage 1 may be faster than stage 2. (`no_sync()` of `fully_shard` saves bytes, and costs
# memory: whole gradients stay.)
#
# ## A step of stage 3, seen
#
# **Predict** before you run: the net has three units, `0`, `2` and `4`. In which order are they gathered in a step?

# %% tags=["half-day", "stub"]
lab.predict("gathered-in-order", None)  # such as "0 0 2 2 4 4"

# %% tags=["half-day", "solution"]
lab.predict("gathered-in-order", "0 2 4 4 2 0")

# %% tags=["half-day"]
# %%px
from dtlib.lab.lessons.l06.figures import watch

model, optimizer = at_stage(3)
cross_entropy(model(x[:24]), y[:24]).backward()  # a first pass tells it the order
events = watch(model)
with dtlib.trace() as trace:
    loss = cross_entropy(model(x[:24]), y[:24])
    events.append(("backward", ""))
    loss.backward()

# %% tags=["half-day"]
events = lab.values("events")[0]
figures.units(events, {"0": 8320, "2": 16512, "4": 1290})
order = " ".join(name for what, name in events if what == "gathered")
print("gathered:", order)

# %% [markdown] tags=["half-day"]
# Never more than one unit is whole: that, and not the model's size, is what stage 3 needs beside its shards. The last
# unit is freed and gathered again at once. (For this reason torch's FSDP2 leaves the outermost unit whole after the
# forward pass, unless told otherwise.) The same step on the clock of all ranks. In the gaps they compute; the `all_reduce` at the end tells which parameters any rank has used:

# %% tags=["half-day", "nbval-ignore-output"]
lab.pictures.timeline("trace")
operations = [e.name for e in lab.values("trace")[0].events if e.kind == "operation"]
assert operations.count("all_gather") == 6 and operations.count("reduce_scatter") == 3

# %% [markdown] tags=["half-day"]
# The `all_gather` of a unit stands in the way of its computation: here every rank waits. On an accelerator the next
# unit is gathered *while* this one computes (`prefetch=True`); then two units are whole at a time.

# %% [markdown]
# ## Mixed precision, accumulation, recomputation
#
# ZeRO shares out model states. The other great consumer is *activations*, and three older ideas are about them. A
# deeper net, at stage 3, batch 256 a rank:
#
# - **mixed precision**: 16 bits instead of 32 (here bfloat16);
# - **accumulation**: four micro-batches of 64 one after the other;
# - **recomputation** (*activation checkpointing*): keep the input of each block alone, and compute the block once
#   more in the backward pass.

# %%
# %%px
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.recompute = nn.Linear(64, 128), nn.Linear(128, 10), recompute
        kinds = nn.Linear, nn.ReLU, nn.Linear, nn.ReLU
        self.blocks = nn.ModuleList(
            nn.Sequential(*(kind(128, 128) if kind is nn.Linear else kind() for kind in kinds))
            for _ in range(6)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.last(x)

# %%
# %%px
from torch.utils.flop_counter import FlopCounterMode


def bought(bf16=False, micro_steps=1, recompute=False):
    """Bytes of activations and of model states, and multiplications and additions, of a step."""
    config = {
        "train_micro_batch_size_per_gpu": 256 // micro_steps,
        "gradient_accumulation_steps": micro_steps,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = dtlib.initialize(model=Deep(recompute), config=config)
    pixels = x[:256].to(torch.bfloat16 if bf16 else torch.float32)
    labels = y[:256].chunk(micro_steps)
    pieces = zip(map(torch.clone, pixels.chunk(micro_steps)), map(torch.clone, labels), strict=True)
    with dtlib.memory(engine) as m, FlopCounterMode(display=False) as flops:
        engine.train_batch(pieces)
    states = m.parameters + m.gradients + m.master_weights + m.optimizer_states
    return m.activations, states, flops.get_total_flops()

# %% [markdown]
# **Predict.** In float32, Adam holds 4 + 4 + 8 bytes a parameter. By which factor does mixed precision change the
# *model states*?

# %% tags=["stub"]
lab.predict("factor-on-states", None)

# %% tags=["solution"]
lab.predict("factor-on-states", 1)

# %%
# %%px
cases = {
    "float32": bought(),
    "mixed precision": bought(bf16=True),
    "and 4 micro-batches": bought(bf16=True, micro_steps=4),
    "and recomputation": bought(bf16=True, micro_steps=4, recompute=True),
}

# %%
cases = lab.values("cases")[0]
first = cases["float32"]
rows = []
for name in ("float32", "mixed precision", "and 4 micro-batches", "and recomputation"):
    activations, states, flops = cases[name]
    less, arithmetic = f"{first[0] / activations:.1f}", f"{flops / first[2]:.2f}"
    rows.append((name, activations, less, states, arithmetic))
headers = ("rank 0", "activations (bytes)", "times less", "states (bytes)", "arithmetic")
lab.table(rows, headers)

# %% [markdown]
# **Mixed precision does not make model states smaller**: what 16 bits save, the master weights cost. It halves
# activations (and messages), and accelerators compute faster in 16 bits. Micro-batches cost no arithmetic, but small
# ones keep an accelerator less busy, and stages 2 and 3 send more. Recomputation costs up to a second forward pass:
# with 1 unit forward and 2 units backward, at most a third more.
#
# ## ZeRO-Offload
#
# The optimizer does little arithmetic with much memory. ZeRO-Offload (J. Ren et al., 2021) keeps gradients, master
# weights and Adam's states in the host's memory, and takes the step there:
#
# | bytes a parameter on N ranks | accelerator | host | travel between them, each step |
# |---|---|---|---|
# | stage 2 | 2 + 14/N | 0 | 0 |
# | stage 2 with offload | 2 | 14/N | 2/N down (gradients), 2/N up (parameters) |
#
# An accelerator with 32 GB then has room for 16 billion parameters instead of 2, before activations. The price is the
# host's speed. In the config: `"offload_optimizer": {"device": "cpu"}`. On a computer without a GPU there is only one
# memory, so it is no use here, and `dtlib` says so.

# %% [markdown] tags=["half-day"]
# ## Checkpoints
#
# At stage 3 no rank has the model. Whoever saves "the model of rank 0" saves a quarter. In `dtlib.checkpoint` every
# rank writes its shards, and one index says which file has which elements of which tensor. Five steps on four ranks at
# stage 3; save; five more, for comparison.

# %% tags=["half-day"]
# %%px
import json
import shutil
import tempfile
from pathlib import Path

from dtlib import checkpoint as checkpoints


def engine_at(stage, comm):
    config = {
        "train_batch_size": 96,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
    }
    return dtlib.initialize(model=fresh_net(), config=config, comm=comm)[0]


def steps(engine, begin, end):
    """The losses of these steps, on batches of 96 images in all, however many ranks there are."""
    rank, ranks = engine.comm.rank, engine.comm.size
    slices = [slice(96 * k + rank, 96 * (k + 1), ranks) for k in range(begin, end)]
    return [engine.train_batch(iter([(x[its], y[its])])).item() for its in slices]

# %% tags=["half-day"]
# %%px
engine = engine_at(stage=3, comm=comm)
first_five = steps(engine, 0, 5)
folder = comm.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
checkpoints.save(folder, engine.module, engine.optimizer, comm)
unbroken = steps(engine, 5, 10)
index = json.loads(Path(folder, "index.json").read_text())
if world.rank == 0:
    weight = index["tensors"]["2.weight"]
    print(f"{len(index['files'])} files. Where are the values of 2.weight, {weight['shape']}?")
    for file, elements in weight["roles"]["value"]["pieces"].items():
        print(f"    in the file of {file.partition('-')[0]}: elements {elements}")

# %% [markdown] tags=["half-day"]
# Now a rank is gone: three are left (`comm.split` gives them a communicator of their own), and they go on at stage 1.
# The batch is the same 96 images, 32 a rank. **Predict:** how do the losses differ?

# %% tags=["half-day"]
# %%px
three = comm.split(world.rank < 3)
continued = None
if world.rank < 3:
    engine = engine_at(stage=1, comm=three)
    checkpoints.load(folder, engine.module, engine.optimizer, three)
    continued = steps(engine, 5, 10)
    assert max(abs(a - b) for a, b in zip(continued, unbroken, strict=True)) < 1e-12
comm.barrier()
if world.rank == 0:
    shutil.rmtree(folder)

# %% tags=["half-day"]
rows = zip(range(5, 10), lab.values("unbroken")[0], lab.values("continued")[0], strict=True)
headers = ("loss at step", "4 ranks, stage 3", "3 ranks, stage 1, loaded")
lab.table(rows, headers, floats=".10f")

# %% [markdown] tags=["half-day"]
# Equal to 1e-12: a checkpoint belongs to the model, and to no number of ranks. `checkpoint.export` writes the format
# of `torch.distributed.checkpoint`, for those who go on without dtlib.

# %% [markdown] tags=["two-hours", "half-day"]
# ## The config that fits
#
# Each stage costs something: more messages, more waiting, more code between you and your model. So take **the
# smallest stage that fits**.
#
# **Predict.** 7.5 billion parameters in mixed precision on 64 accelerators of 24 GiB: which stage?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("stage-that-fits", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("stage-that-fits", 2)

# %% tags=["two-hours", "half-day"]
def smallest_stage(parameters, ranks, budget, scheme="mixed_adam"):
    """The smallest stage whose model states fit into so many bytes a rank; None if none does."""
    for stage in range(4):
        if sum(zero_bytes(parameters, ranks, stage, scheme).values()) <= budget:
            return stage


rows = [
    (name, f"{sum(zero_bytes(P, 64, stage).values()) / GIB:.1f}",
     fewest_ranks(P, 24 * GIB, stage) or "on none")
    for stage, name in enumerate(figures.STAGES)
]
headers = ("", "GiB on 64 ranks", "fits 24 GiB from so many ranks")
lab.table(rows, headers, align="lrr")

# %% [markdown] tags=["two-hours", "half-day"]
# Leave room for activations, for messages, and for what the allocator cannot use. Now for real, with our own net in
# float32, and an imaginary accelerator with 200,000 bytes for model states:

# %% tags=["two-hours", "half-day"]
stage = smallest_stage(parameters, 4, 200_000, scheme="adam")
config = {
    "train_batch_size": 96,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage},
}
lab.push(config=config)
by_formula = sum(zero_bytes(parameters, 4, stage, scheme="adam").values())
print(f"Stage {stage}: {by_formula:,} bytes by the formula.")

# %% [markdown] tags=["two-hours", "half-day"]
# `runtime="torch"` runs the same config on torch's own classes: `ZeroRedundancyOptimizer` for stage 1, FSDP2 for
# stages 2 and 3.

# %% tags=["two-hours", "half-day"]
# %%px
training_data = torch.utils.data.TensorDataset(x.float(), y)
losses, measured = {}, {}
for runtime in ("dtlib", "torch"):
    net = fresh_net(torch.float32)
    engine, *_ = dtlib.initialize(net, config, training_data=training_data, runtime=runtime)
    with dtlib.memory(engine) as m:
        losses[runtime] = [engine.train_batch().item() for _ in range(20)]
    measured[runtime] = m.parameters + m.gradients + m.optimizer_states + m.padding
assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-5  # float32

# %% tags=["two-hours", "half-day"]
losses, measured = lab.values("losses")[0], lab.values("measured")[0]
rows = [
    (f"loss at step {step}", *(f"{some[step]:.4f}" for some in losses.values()))
    for step in (0, 9, 19)
]
rows.append(("bytes of model states, rank 0", *(f"{count:,}" for count in measured.values())))
lab.table(rows, ("", *losses))
assert measured["dtlib"] == by_formula <= 200_000

# %% [markdown] tags=["two-hours", "half-day"]
# torch has less here: its stage 2 is FSDP2, which keeps whole parameters from the forward to the backward pass, as
# stage 2 does, but goes back to shards between two steps, and that is when we look.

# %% [markdown] tags=["half-day"]
# ## The way out: FSDP2
#
# torch's own `fully_shard` on these ranks: its backend is dtlib's, so it sends by our collectives, can be stopped, and
# shows its timeline below ours: the same gathers. On GPUs the backend is `"nccl"`, and FSDP2 gathers ahead.

# %% tags=["half-day"]
# %%px
import dtlib.backend
from torch import distributed as dist
from torch.distributed import fsdp

if dist.is_initialized():
    dist.destroy_process_group()  # that of runtime="torch"
dist.init_process_group("dtlib")
mesh = dist.init_device_mesh("cpu", (comm.size,))
fsdp_net = fresh_net()
for module in (*(one for one in fsdp_net if isinstance(one, nn.Linear)), fsdp_net):
    fsdp.fully_shard(module, mesh=mesh)
steps_seen, trained = {}, {}
for name, (model, adam) in {
    "ours": at_stage(3), "fsdp2": (fsdp_net, AdamW(fsdp_net.parameters(), **ADAM)),
}.items():
    trained[name] = train(model, adam.step, adam.zero_grad)
    with dtlib.trace() as steps_seen[name]:
        cross_entropy(model(x[:24]), y[:24]).backward()
ours, fsdp2 = steps_seen.values()
dist.destroy_process_group()
assert (trained["ours"] - trained["fsdp2"]).abs().max() < 1e-12
if world.rank == 0:
    print("Losses of our stage 3 and of FSDP2 are equal, to 1e-12.")

# %% tags=["half-day", "nbval-ignore-output"]
lab.pictures.timeline("ours")
lab.pictures.timeline("fsdp2")
operations = [e.name for e in lab.values("fsdp2")[0].events if e.kind == "operation"]
assert operations.count("all_gather") == 6 and operations.count("reduce_scatter") == 3

# %% [markdown] tags=["two-hours", "half-day"]
# ## What holds on GPUs, and what does not
#
# Seen here, and true there: the values, the bytes that a rank holds and sends, the order in which units are gathered,
# what micro-batches do to stages 2 and 3, and that a checkpoint must not depend on the number of ranks.
#
# Not shown here: speed. These models are small, all ranks share one machine and its cores, and MPI stands where NCCL
# would. On GPUs use torch's FSDP2 or DeepSpeed: they gather the next unit on a stream of its own while this one
# computes, and there that overlap decides whether stage 3 costs anything. Speed here is measured in `python -m
# benchmarks zero`, as a ratio in one run.
#
# ## Summary
#
# - Adam in mixed precision: 2 + 2 + 12 bytes a parameter. Data parallelism holds them on every rank.
# - Stage 1 shares out the 12, stage 2 a 2 as well, stage 3 all 16. The losses stay the same.
# - An all-reduce is a reduce_scatter and an all_gather: so stages 1 and 2 send 2 P (N-1)/N as before, stage 3 sends 3
#   P (N-1)/N.
# - With M micro-batches: 2, M + 1, and 3 M units for stages 1, 2, 3.
# - Mixed precision and recomputation are about activations and speed, not about model states.
# - Checkpoints name elements of tensors, not ranks. Take the smallest stage that fits.
#
# Now the [exercises](../exercises/06_zero_exercises.ipynb). The next lesson, 07 Pipelines, cuts the model between its
# layers instead: then activations travel, not parameters.
#
# ## References
#
# - S. Rajbhandari et al.: ZeRO: memory optimizations toward training trillion parameter models. SC, 2020.
# - Y. Zhao et al.: PyTorch FSDP: experiences on scaling fully sharded data parallel. VLDB 16(12), 2023.
# - J. Ren et al.: ZeRO-Offload: democratizing billion-scale model training. USENIX ATC, 2021.
# - P. Micikevicius et al.: Mixed precision training. ICLR, 2018.
# - T. Chen et al.: Training deep nets with sublinear memory cost. arXiv:1604.06174, 2016.
# - torch's documentation of `torch.distributed.fsdp.fully_shard` (FSDP2).
# - E. Alpaydin, C. Kaynak: Optical recognition of handwritten digits. UCI Machine Learning Repository, 1998.
