# %% [markdown]
# # 06 ZeRO
#
# Two hours. Data parallelism keeps the same model, gradients and optimizer states on every rank. You divide them among
# the ranks until each keeps 1/N, and count the bytes that it holds and sends.
#
# **Questions.** What fills the memory? What does it cost to divide the model states? Which setting makes a model fit?
#
# **Afterwards you can** predict a model's memory to the byte; read all stages' code; say what each stage sends; save on
# four ranks and load on three; choose a stage.
#
# **You need** [03 Collectives](03_collectives.ipynb) and the first half of [04 Data
# parallelism](04_data_parallel.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from dtlib import lab
from dtlib.lab import digits
from dtlib.lessons.l06 import figures
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import plain
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.theory.zero import GB, GIB, SCHEMES, fewest_ranks, zero_bytes

# %% [markdown] tags=["two-hours", "half-day"]
# ## What fills the memory?
#
# In *mixed precision* the model computes in 16 bits. Adam, the usual optimizer, keeps for each weight running means of
# its gradients and of their squares. Its steps are too small for 16 bits, so there is a *master copy* of the weights in
# 32 bits as well. Together these are the *model states*:

# %% tags=["two-hours", "half-day"]
mixed = SCHEMES["mixed_adam"]
rows = [
    ("parameters", "16 bits", mixed.parameters),
    ("gradients", "16 bits", mixed.gradients),
    ("master weights", "32 bits", mixed.master_weights),
    ("Adam: two running means", "2 x 32 bits", mixed.optimizer_states),
    ("total", "", mixed.total),
]
lab.table(rows, ("", "", "bytes per parameter"))

# %% tags=["statement"]
# "Adam in mixed precision takes 2 + 2 + 12 bytes per parameter"
bytes_of = [row(what)[-1] for what in ("parameters", "gradients", "master weights", "Adam: two running means", "total")]
assert bytes_of == [2, 2, 4, 8, 16]

# %% tags=["two-hours", "half-day", "statement"]
# "Together these are the *model states*:"
# "(A GB is 10⁹ bytes. A GiB, as `nvidia-smi` counts, is 2³⁰: 7 % more.)"
assert sum(row(what)[-1] for what in ("parameters", "gradients", "master weights", "Adam: two running means")) == 16
assert row("total") == [16] and round(100 * (2**30 / 1e9 - 1)) == 7

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** A model has 7.5 billion parameters. How many GB of model states does each of 64 ranks hold, with data
# parallelism? (A GB is 10⁹ bytes. A GiB, as `nvidia-smi` counts, is 2³⁰: 7 % more.)

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("gigabytes-a-rank", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("gigabytes-a-rank", 120)

# %% [markdown] tags=["two-hours", "half-day"]
# More ranks do not help. **ZeRO** (*zero redundancy optimizer*, S. Rajbhandari et al., 2020) *shards* states, that is,
# splits them: stage 1 shards the optimizer, stage 2 the gradients as well, stage 3 the parameters too. Each rank keeps:

# %% tags=["two-hours", "half-day"]
figures.shards(ranks=4)

# %% tags=["two-hours", "half-day", "statement"]
# "stage 1 shards the optimizer, stage 2 the gradients as well, stage 3 the parameters too"
kept = [row(name, "on each of 4 ranks") for name in ("data parallelism", "stage 1", "stage 2", "stage 3")]
assert kept == [[2, 2, 12], [2, 2, 12, 4], [2, 2, 4, 12, 4], [2, 4, 2, 4, 12, 4]]

# %% [markdown] tags=["two-hours", "half-day"]
# ## Stage 1: each rank updates a quarter
#
# In data parallelism every rank takes the same optimizer step, on all parameters. In stage 1 each rank updates one
# quarter and sends it to the others.

# %%
lab.read(plain)
lab.read(plain.Unit, plain.Stage1.__init__, plain.Stage1.gradient_is_ready)

# %% [markdown] tags=["two-hours", "half-day"]
# The parameters of a *unit* are sent together. `unit.flat` holds them, padded by `unit.padding`; `unit.shard` is this
# rank's slice, or *shard*. In `step`, `reduce` gives each rank its shard of the mean gradient, Adam updates the shard,
# and `update_parameters` gathers all new values on every rank.

# %% tags=["two-hours", "half-day"]
lab.read(plain.Stage1.step, plain.Stage1.reduce, plain.Stage1.update_parameters)

# %% [markdown] tags=["two-hours", "half-day"]
# **Predict.** We train by data parallelism, then with stage 1, both in float64. How many bytes does stage 1 send,
# divided by the bytes of data parallelism? Think of the ring.

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("bytes-of-stage-1", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("bytes-of-stage-1", 1)

# %% tags=["two-hours", "half-day"]
# %%px
comm, ADAM = dtlib.init().comm, {"lr": 0.01, "eps": 1e-4}
(x, y), _ = digits.load(torch.float64)


def fresh_net(dtype=torch.float64):
    torch.manual_seed(0)
    return digits.net(128, dtype, layers=2)


model = DataParallel(fresh_net(), comm, algorithm="ring")
adam = AdamW(model.parameters(), **ADAM)
with dtlib.trace() as trace:
    expected = digits.train(model, comm, adam.step, adam.zero_grad)
sent_by_data_parallelism = trace.sent()[1]

model = fresh_net()
zero = Stage1(comm, model, AdamW, **ADAM)
with dtlib.trace() as trace:
    losses = digits.train(model, comm, zero.step)
sent_by_stage_1 = trace.sent()[1]
assert (losses - expected).abs().max() < 1e-12
if comm.rank == 0:
    print(f"Last of ten losses: data parallelism {expected[-1]:.12f}, stage 1 {losses[-1]:.12f}.")
    sent = f"data parallelism {sent_by_data_parallelism:,}, stage 1 {sent_by_stage_1:,}"
    print(f"Bytes sent: {sent}.")

# %% tags=["statement"]
# "Losses are equal, bytes almost equal, and each rank keeps a quarter of the optimizer states."
plain, stage_1 = found(r"Bytes sent: data parallelism ([\d,]+), stage 1 ([\d,]+)")
assert plain - stage_1 == 480
assert abs(stage_1 / plain - 1) < 0.001 and len(set(found(r"ten losses: data parallelism ([\d.]+), stage 1 ([\d.]+\d)"))) == 1
assert row("stage 1", "on each of 4 ranks")[-2:] == [12, 4]

# %% [markdown] tags=["two-hours", "half-day"]
# A ring all-reduce *is* a reduce_scatter followed by an all_gather, and stage 1 puts the optimizer's step between the
# two. **Losses are equal, bytes almost equal, and each rank keeps a quarter of the optimizer states.** (Data
# parallelism sends 480 bytes more, mostly flags of used parameters.)

# %% [markdown] tags=["half-day"]
# ## Stages 2 and 3
#
# Stage 1 keeps all gradients until the step, although a rank needs only its shard of the mean. So stage 2 reduces them
# *during* the backward pass, and frees them.

# %%
lab.read(plain.Stage2)

# %% [markdown] tags=["half-day"]
# Now the parameters. A unit (here: a linear layer) needs its weights twice: forward and backward. At other times a rank
# keeps only its quarter. *Gather before use, free after use*.

# %%
lab.read(plain.Stage3)

# %% [markdown] tags=["half-day"]
# All three stages, with one unit for each linear layer:

# %% tags=["half-day"]
# %%px
def of_plain(kind):
    """Losses of ten steps; all_gathers per step; bytes of flat memory between steps."""
    model = fresh_net()
    units = [module for module in model if isinstance(module, nn.Linear)]
    zero = kind(comm, model, AdamW, units, **ADAM)
    with dtlib.trace() as trace:
        losses = digits.train(model, comm, zero.step)
    assert (losses - expected).abs().max() < 1e-12
    gathers = [e for e in trace.events if e.name == "all_gather" and e.dtype == "float64"]
    return losses, len(gathers) // 10, sum(u.flat.untyped_storage().nbytes() for u in zero.units)


of_stage = {kind.__name__: of_plain(kind) for kind in (Stage1, Stage2, Stage3)}
if comm.rank == 0:
    rows = [(name, f"{some[9]:.12f}", *rest) for name, (some, *rest) in of_stage.items()]
    headers = ("", "last loss", "all_gathers per step", "bytes of whole weights between steps")
    lab.table(rows, headers)

# %% tags=["half-day", "statement"]
# "A unit (here: a linear layer) needs its weights twice: forward and backward."
assert [row(f"Stage{stage}", "all_gathers per step")[1:] for stage in (2, 3)] == [[3, 208_992], [2 * 3, 0]]

# %% tags=["statement"]
# "`Stage3` gathers three units twice per step."
assert row("Stage3")[1:] == [2 * 3, 0] and row("Stage2")[1] == 3

# %% [markdown]
# `Stage3` gathers three units twice per step. torch's stage 3, FSDP2, gathers each once if
# `reshard_after_forward=False`, and holds more. Our file leaves out:

# %%
lab.read_end(plain)

# %% [markdown] tags=["half-day"]
# ## Memory, to the byte
#
# `dtlib.memory` counts each storage of a rank once. The model is in bfloat16, with master weights; `dtlib.initialize`
# reads the stage from a config, as DeepSpeed does.
#
# **Predict.** On four ranks, how many bytes of model states per parameter does a rank hold at stage 2?

# %% tags=["half-day", "stub"]
lab.predict("bytes-at-stage-2", None)

# %% tags=["half-day", "solution"]
lab.predict("bytes-at-stage-2", 5.5)

# %% tags=["half-day"]
# %%px
def counted(stage, comm):
    config = {
        "train_micro_batch_size_per_gpu": 24,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = dtlib.initialize(model=fresh_net(), config=config, comm=comm)
    for _ in range(2):  # the second has Adam's states
        with dtlib.memory(engine) as m:
            engine.train_batch(iter([(x[:24].bfloat16(), y[:24].clone())]))
    return m


reports = {s: counted(s, comm.split(0)) for s in range(4)}  # on a new communicator: no old buffers
lines_of = {stage: report.lines for stage, report in reports.items()}
sizes_of = {stage: report.sizes[0] for stage, report in reports.items()}
if comm.rank == 0:
    display(reports[2].with_formula(stage=2, scheme="mixed_adam"))

# %% tags=["statement"]
# "In each line with a formula, count and formula agree."
# "The model states are 2 + 0.5 + 1 + 2 = 5.5 bytes per parameter."
lines = {what: row(what, "mixed_adam") for what in ("parameters", "gradients", "master weights", "optimizer states", "padding")}
assert all(numbers[0] == numbers[-1] for numbers in lines.values()) and sum(n[1] for n in lines.values()) == 5.5
assert row("communication", "mixed_adam")[1] < 0.1

# %% [markdown] tags=["half-day"]
# In each line with a formula, count and formula agree. The model states are 2 + 0.5 + 1 + 2 = 5.5 bytes per parameter.
# *Padding* makes shards equal. *Peak* is the largest number of bytes at any time; it must fit. The bars end at the peak;
# *other tensors* are not model states:

# %% tags=["half-day"]
held, sizes = lab.values("lines_of")[0], lab.values("sizes_of")[0]
parameters = held[0]["parameters"] // 2  # 16 bits each
figures.bars(dict(zip(figures.STAGES, held.values(), strict=True)), title="Peak of rank 0 of 4")
for stage, counted in held.items():
    assert all(counted[line] == count for line, count in zero_bytes(sizes[stage], 4, stage).items())

# %% tags=["statement"]
# "The peak falls from stage to stage."
of_rank_0 = [row(name, "Peak of rank 0")[-5:] for name in ("data parallelism", "stage 1", "stage 2", "stage 3")]
peaks, states = [bar[-1] for bar in of_rank_0], [sum(bar[:3]) for bar in of_rank_0]
assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
assert peaks[0] / peaks[3] < states[0] / states[3]

# %% [markdown] tags=["half-day"]
# The peak falls from stage to stage. From stage 2 to 3 it falls little: one of our three units is 63 %
# of the net, and is whole while it computes.

# %% [markdown] tags=["two-hours", "half-day"]
# ## 64 ranks
#
# The paper's first figure (7.5 billion parameters), redrawn: bars are the formula, lines the published numbers.

# %% tags=["two-hours", "half-day"]
P, rows = 7_500_000_000, lab.published("zero_figure1_7p5B_Nd64.csv")
figure_1 = {name: float(row["GB"]) for name, row in zip(figures.STAGES, rows, strict=True)}
groups = {
    name: {line: count / GB for line, count in zero_bytes(P, 64, stage).items()}
    for stage, name in enumerate(figures.STAGES)
}
figures.bars(groups, "GB", figure_1, "7.5 billion parameters, on each of 64 ranks")

# %% tags=["statement"]
# "bars are the formula, lines the published numbers"
rows_of = {name: row(name, "on each of 64 ranks")[-1] for name in ("stage 1", "stage 2", "stage 3")}
assert rows_of == {"stage 1": 31.4, "stage 2": 16.6, "stage 3": 1.9}
assert [numbers[-1] for numbers in rows("published", "on each of 64 ranks")][1:] == list(rows_of.values())

# %% [markdown]
# ## What it costs: bytes on the wire
#
# We count the numbers that a rank sends in one step, in units of P (N-1)/N; P is the number of parameters. A
# reduce_scatter or an all_gather by a ring is 1 unit, an all_reduce 2.
#
# **Predict.** How many units does stage 3 send?

# %% tags=["stub"]
lab.predict("units-of-stage-3", None)

# %% tags=["solution"]
lab.predict("units-of-stage-3", 3)

# %%
# %%px
from contextlib import nullcontext

from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.sharded import fully_shard


def at_stage(stage):
    """A fresh net in the library's full class for this stage, and its optimizer."""
    model = fresh_net()
    if stage == 0:
        model = DataParallel(model, comm, algorithm="ring")
    if stage in (1, 2):
        return model, ZeroOptimizer(model.parameters(), AdamW, comm, stage=stage, **ADAM)
    if stage == 3:
        for module in (*(one for one in model if isinstance(one, nn.Linear)), model):
            fully_shard(module, comm)
    return model, AdamW(model.parameters(), **ADAM)


def sent_in_a_step(stage, micro_steps=1):
    """Bytes that this rank sends for gradients and parameters."""
    model, optimizer = at_stage(stage)
    with dtlib.trace() as trace:
        for left in reversed(range(micro_steps)):
            with model.no_sync() if stage == 0 and left else nullcontext():
                (cross_entropy(model(x[:24]), y[:24]) / micro_steps).backward()
        optimizer.step()
    operations = ("all_reduce",) if stage == 0 else ("reduce_scatter", "all_gather")
    return sum(trace.sent(operation)[1] for operation in operations)


sent_bytes = {(stage, m): sent_in_a_step(stage, m) for stage in range(4) for m in (1, 4)}

# %%
from dtlib.theory import zero as theory

sent = lab.values("sent_bytes")[0]
# 15 flags travel with gradients: one for each of 6 parameters, and 9 that compare the ranks.
flat = {0: parameters + 15, 1: parameters, 2: parameters, 3: [8320, 16512, 1290]}


def row(stage, micro_steps=1):
    """What rank 0 sent, by the formula, and in units of P (N-1)/N."""
    formula = 8 * theory.zero_wire_elements(flat[stage], 4, stage, micro_steps)  # float64
    assert formula == sent[stage, micro_steps]
    return sent[stage, micro_steps], formula, f"{sent[stage, micro_steps] / (6 * parameters):.3f}"


table = lab.published("zero_comm_volume.csv")
paper = {line["scheme"]: line["volume_in_units_of_P"] for line in table}
names = ("DP all-reduce", "ZeRO-1", "ZeRO-2", "ZeRO-3")
units_sent = [(figures.STAGES[stage], *row(stage), paper[name]) for stage, name in enumerate(names)]
lab.table(units_sent, ("", "bytes sent", "formula", "units of P", "published"))

# %% tags=["statement"]
# "Stages 1 and 2 send as much as data parallelism; stage 3 sends 1.5 times as much"
units = {name: row(name, "published")[-2] for name in ("data parallelism", "stage 1", "stage 2", "stage 3")}
assert [round(one, 2) for one in units.values()] == [2, 2, 2, 3]

# %% [markdown]
# Stages 1 and 2 send as much as data parallelism; stage 3 sends 1.5 times as much, because it sends parameters twice.
#
# **Predict.** Now gradients of four *micro-batches* add up before a step. Stage 1 sends them once. Stage 2 frees them, so it
# sends in every backward pass. How many units does stage 2 send?

# %% tags=["stub"]
lab.predict("units-of-four-micro-batches", None)

# %% tags=["solution"]
lab.predict("units-of-four-micro-batches", 5)

# %%
units_of_four = [(name, *row(stage, 4)) for stage, name in enumerate(figures.STAGES)]
lab.table(units_of_four, ("4 micro-batches", "bytes sent", "formula", "units of P"))

# %% tags=["statement"]
# "So with many micro-batches stage 1 may be faster than stage 2."
# "With M micro-batches: 2, M + 1, and 3 M units for stages 1, 2, 3."
assert [round(row(f"stage {stage}", "4 micro-batches")[-1]) for stage in (1, 2, 3)] == [2, 4 + 1, 3 * 4]

# %% [markdown]
# So with many micro-batches stage 1 may be faster than stage 2.
#
# **Question 1.** A model has 70 billion parameters, in 16 bits on the wire. How many GB of states does each of 64 GPUs
# hold at stage 3? How long does a network card of 50 GB/s need for 3 P (N-1)/N?
#
# <details><summary>Answer 1</summary>16 x 70 / 64 = 17.5 GB. 3 x 140 GB x 63/64 = 413 GB take 8.3 s.</details>
#
# **Question 2.** SGD with momentum in float32 has 4 + 4 + 4 bytes per parameter. How many does each of 8 ranks
# hold at stage 1?
#
# <details><summary>Answer 2</summary>4 + 4 + 4/8 = 8.5.</details>
#
# ## Hybrid sharding
#
# Links between machines are slow, so let each machine hold all shards (torch's *HSDP*). `Stage3` shards inside a
# machine; one all-reduce per shard remains, across machines. Let our four ranks be two machines of two.
#
# **Predict.** What does a rank send to the other machine in a step, divided by the bytes of all parameters?

# %% tags=["claim"]
# "16 x 70 / 64 = 17.5 GB. 3 x 140 GB x 63/64 = 413 GB take 8.3 s."
# "4 + 4 + 4/8 = 8.5."
assert 16 * 70 / 64 == 17.5 and round(3 * 140 * 63 / 64) == 413 and round(413 / 50, 1) == 8.3

# %% tags=["stub"]
lab.predict("sent-across-machines", None)

# %% tags=["solution"]
lab.predict("sent-across-machines", 0.5)

# %%
# %%px
from torch import distributed as dist

mesh = dtlib.init().mesh(machine=2, card=2)  # ranks 0 and 1 are one machine, 2 and 3 the other
across = mesh["machine"]


class Hybrid(Stage3):
    def reduce(self, unit):
        super().reduce(unit)  # the mean over the accelerators of this machine
        dist.all_reduce(unit.shard.grad, group=across.group)
        unit.shard.grad /= across.size

# %%
# %%px
def kept_and_sent(kind, group):
    """Bytes of shards, bytes sent in a step for units, and bytes sent by an all_reduce."""
    model = fresh_net()
    units = [module for module in model if isinstance(module, nn.Linear)]
    zero = kind(group, model, AdamW, units, **ADAM)
    losses = digits.train(model, comm, zero.step)
    assert (losses - expected).abs().max() < 1e-12
    with dtlib.trace() as trace:
        cross_entropy(model(x[:24]), y[:24]).backward()
        zero.step()
    sent = [e for e in trace.events if e.dtype == "float64"]
    reduced = sum(e.bytes for e in sent if e.name == "all_reduce")
    return sum(u.shard.nbytes for u in zero.units), sum(e.bytes for e in sent) - reduced, reduced


flat, hybrid = kept_and_sent(Stage3, comm.group), kept_and_sent(Hybrid, mesh["card"].group)

# %%
# Rank 1's numbers. In the ring of four ranks only rank 1 sends from its machine to the other;
# in the hybrid both ranks of a machine send, hence 2 times.
whole, parts = (lab.values(name)[1] for name in ("flat", "hybrid"))
rows = [("stage 3", *whole, whole[1]), ("hybrid", *parts, 2 * parts[2])]
headers = ("", "shards", "sent for units", "sent by all_reduce", "bytes that leave a machine")
lab.table(rows, headers)

# %% tags=["statement"]
# "The losses are the same. Shards are twice as large, and less than half as many bytes leave a machine."
flat, hybrid = row("stage 3", "leave a machine"), row("hybrid", "leave a machine")
assert hybrid[0] / flat[0] > 1.99 and hybrid[3] < flat[3] / 2 and hybrid[1] == 3 * hybrid[0]

# %% [markdown]
# The losses are the same. Shards are twice as large, and less than half as many bytes leave a machine.
#
# ## A step of stage 3, seen
#
# **Predict.** The net has three units, `0`, `2` and `4`. In which order are they gathered in a step?

# %% tags=["stub"]
lab.predict("gathered-in-order", None)  # such as "0 0 2 2 4 4"

# %% tags=["solution"]
lab.predict("gathered-in-order", "0 2 4 4 2 0")

# %%
# %%px
model, optimizer = at_stage(3)
cross_entropy(model(x[:24]), y[:24]).backward()  # the first pass records the order
dist.barrier(comm.group)
events = figures.watch(model)
loss = cross_entropy(model(x[:24]), y[:24])
figures.note(events, "backward")
loss.backward()
figures.note(events, "end")

# %% tags=["nbval-ignore-output"]
events = lab.values("events")[0]
figures.units(events, {"0": 8320, "2": 16512, "4": 1290}, itemsize=8, ranks=4)
order = " ".join(name for what, name, _ in events if what == "gathered")

# %% tags=["statement"]
# "At most one unit is whole at a time."
assert count(r"(?m)^gathered \d") == count(r"(?m)^gathered (\d) +\1 ") == 6

# %% [markdown]
# At most one unit is whole at a time.
#
# ## Mixed precision, accumulation, recomputation
#
# *Activations*, which the forward pass keeps for the backward pass, fill memory too. They shrink with 16 bits, with
# micro-batches, and with *recomputation* (activation checkpointing), which keeps only the input of each block and
# computes the rest again in the backward pass. We measure a perceptron and a transformer.
#
# **Predict.** With Adam, float32 takes 4 + 4 + 8 bytes per parameter. By which factor does mixed precision change this?

# %% tags=["stub"]
lab.predict("factor-on-states", None)

# %% tags=["solution"]
lab.predict("factor-on-states", 1)

# %%
# %%px
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from dtlib.workloads import decoder


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint_sequential(self, 6, x, use_reentrant=False)


def transformer(again=False):
    blocks = [decoder.Block(64, 4, "full" if again else "none") for _ in range(4)]
    return nn.Sequential(decoder.Embedding(64, 64), *blocks, nn.Linear(64, 256, bias=False))


def perceptron(again=False):
    return (Recomputed if again else nn.Sequential)(*digits.net(128, layers=12))


text = torch.randint(256, (16, 64), generator=torch.Generator().manual_seed(0))  # bytes
NETS = {
    "perceptron": (perceptron, x[:256].float(), y[:256], cross_entropy),
    "transformer": (transformer, text, text, decoder.loss_fn),
}


def bought(net, bf16=False, micro_steps=1, again=False):
    """Return bytes (activations, model states, peak) and arithmetic of a step at stage 3."""
    make, inputs, targets, loss_fn = NETS[net]
    inputs = inputs.bfloat16() if bf16 and inputs.is_floating_point() else inputs
    config = {
        "train_micro_batch_size_per_gpu": len(inputs) // micro_steps,
        "gradient_accumulation_steps": micro_steps,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = dtlib.initialize(model=make(again), config=config)
    flops, m = FlopCounterMode(display=False), dtlib.memory(engine)
    for counter in (flops, m):  # a step for each
        both = zip(inputs.chunk(micro_steps), targets.chunk(micro_steps), strict=True)
        with counter:
            engine.train_batch(((some.clone(), labels.clone()) for some, labels in both), loss_fn)
    states = m.parameters + m.gradients + m.master_weights + m.optimizer_states
    return m.activations, states, m.peak, flops.get_total_flops()


HOW = {
    "float32": {},
    "mixed precision": {"bf16": True},
    "and 4 micro-batches": {"bf16": True, "micro_steps": 4},
    "and recomputation": {"bf16": True, "micro_steps": 4, "again": True},
}
cases = {f"{net}, {name}": bought(net, **how) for net in NETS for name, how in HOW.items()}

# %%
of_rank_0 = lab.values("cases")[0]
for net in ("perceptron", "transformer"):
    rows, first = [], of_rank_0[f"{net}, float32"]
    for name in ("float32", "mixed precision", "and 4 micro-batches", "and recomputation"):
        stored, states, peak, flops = of_rank_0[f"{net}, {name}"]
        less, arithmetic = f"{first[0] / stored:.1f}", f"{flops / first[3]:.2f}"
        rows.append((name, stored, less, states, peak, arithmetic))
    lab.table(rows, (net, "stored (bytes)", "reduced by", "states (bytes)", "peak", "operations"))

# %% tags=["statement"]
# "Mixed precision does not make model states smaller"
# "It halves activations and messages."
# "Recomputation costs at most one more forward pass: a third more arithmetic."
# "The transformer gains most: its activations are many times as large as its states, the perceptron's only a few times."
kept = {}
for at, net in enumerate(("perceptron", "transformer")):
    first, mixed, again = (rows(name, "transformer  ")[at] for name in ("float32", "mixed precision", "and recomputation"))
    assert mixed[2] == first[2] and mixed[1] >= 1.9 and 1 < again[4] < 4 / 3
    kept[net] = first[0] / first[2], again[1]
assert kept["transformer"][0] > 15 and kept["perceptron"][0] < 6 and kept["transformer"][1] > kept["perceptron"][1]

# %% [markdown]
# **Mixed precision does not make model states smaller**: the master weights cost what 16 bits save. It halves
# activations and messages. Recomputation costs at most one more forward pass: a third more arithmetic. The transformer
# gains most: its activations are many times as large as its states, the perceptron's only a few times.

# %% [markdown]
# ## Checkpoints
#
# At stage 3 no rank has the whole model. With `dtlib.checkpoint` (in torch: `torch.distributed.checkpoint`) every rank
# writes its shards, and an index says where each shard is. Four ranks take five steps at stage 3, save, and take five
# more. Then one rank is lost. The other three load, and continue at stage 1 with the same batches.
#
# **Predict:** how do their losses differ from the four ranks' losses?

# %%
# %%px
import shutil
import tempfile
from pathlib import Path

from dtlib import checkpoint


def engine_at(stage, comm):
    optimizer = {"type": "AdamW", "params": ADAM}
    config = {"train_batch_size": 96, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    return dtlib.initialize(model=fresh_net(), config=config, comm=comm)[0]


def steps(engine, begin, end):
    """The losses of these steps, on batches of 96 images in all, for any number of ranks."""
    rank, ranks = engine.comm.rank, engine.comm.size
    slices = [slice(96 * k + rank, 96 * (k + 1), ranks) for k in range(begin, end)]
    return [engine.train_batch(iter([(x[its], y[its])])).item() for its in slices]


engine = engine_at(stage=3, comm=comm)
first_five = steps(engine, 0, 5)
folders = [tempfile.mkdtemp() if comm.rank == 0 else None]
dist.broadcast_object_list(folders, group_src=0, group=comm.group)
folder = folders[0]
checkpoint.save(folder, engine.module, engine.optimizer, comm)
unbroken = steps(engine, 5, 10)
if comm.rank == 0:
    print("Saved:", *sorted(path.name.partition("-")[0] for path in Path(folder).iterdir()))

# %%
# %%px
three = comm.split(comm.rank < 3)
if comm.rank < 3:
    engine = engine_at(stage=1, comm=three)
    checkpoint.load(folder, engine.module, engine.optimizer, three)
    continued = steps(engine, 5, 10)
dist.barrier(comm.group)
if comm.rank == 0:
    shutil.rmtree(folder)
    headers = ("loss at step", "4 ranks, stage 3", "3 ranks, stage 1, loaded")
    lab.table(list(zip(range(5, 10), unbroken, continued, strict=True)), headers, floats=".10f")

# %% tags=["statement"]
# "All ten decimals agree"
assert all(len(set(row(f"{step}", "3 ranks, stage 1"))) == 1 for step in range(5, 10))

# %% [markdown]
# All ten decimals agree: a checkpoint belongs to the model, not to its ranks.

# %% [markdown] tags=["two-hours", "half-day"]
# ## The config that fits
#
# Each stage costs messages, waiting, or extra code. So take **the lowest stage that fits**, and leave memory for
# activations.
#
# **Predict.** 7.5 billion parameters in mixed precision, on 64 accelerators of 24 GiB each: which stage?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("stage-that-fits", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("stage-that-fits", 2)

# %%
rows = [
    (name, f"{sum(zero_bytes(P, 64, stage).values()) / GIB:.1f}",
     fewest_ranks(P, 24 * GIB, stage) or "none fits")
    for stage, name in enumerate(figures.STAGES)
]
lab.table(rows, ("", "GiB on 64 ranks", "fewest ranks of 24 GiB"), align="lrr")

# %% tags=["statement"]
# "7.5 billion parameters in mixed precision, on 64 accelerators of 24 GiB each: which stage?"
assert found(r"You predicted (\d+), and it came out as (\d+)") == [2, 2]

# %% [markdown] tags=["two-hours", "half-day"]
# A *config* describes the training with DeepSpeed's keys: `train_batch_size` counts all ranks' samples, `stage` is
# ZeRO's. `runtime="torch"` runs the same config on torch's own classes, here FSDP2 (*fully sharded data parallel*).

# %% tags=["two-hours", "half-day"]
# %%px
config = {
    "train_batch_size": 96,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": ADAM},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}
data, losses = torch.utils.data.TensorDataset(*digits.load()[0]), {}
for runtime in ("dtlib", "torch"):
    net = fresh_net(torch.float32)
    engine, *_ = dtlib.initialize(net, config, training_data=data, runtime=runtime)
    with dtlib.memory(engine) as m:
        losses[runtime] = [engine.train_batch().item() for _ in range(20)]
    if comm.rank == 0:
        held = m.parameters + m.gradients + m.optimizer_states + m.padding
        print(f"{runtime:5}  last loss {losses[runtime][-1]:.4f}, {held:,} bytes", end="")
        print(f" of model states, {m.peak:,} bytes at the peak")
assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-5  # float32

# %% tags=["statement"]
# "The same losses. Between steps, FSDP2 holds only shards"
(ours, held), (theirs, by_torch) = (found(f"{name} +last loss ([\\d.]+), ([\\d,]+) bytes") for name in ("dtlib", "torch"))
assert ours == theirs and by_torch < held

# %% [markdown] tags=["two-hours", "half-day"]
# The same losses. Between steps, FSDP2 holds only shards, ours whole parameters.

# %% [markdown]
# ## The same in torch: FSDP2
#
# torch's `fully_shard` sends through our collectives. Its timeline, below ours, has the same gathers. FSDP2 sends 1 %
# more: it pads the last layer's ten rows to twelve, so that shards are equal. (Our `all_reduce` of 20 bytes checks that
# ranks agree.)

# %%
# %%px
import dtlib.backend
from torch.distributed import fsdp

if dist.is_initialized():
    dist.destroy_process_group()  # the process group of runtime="torch"
dist.init_process_group("dtlib", init_method="dtlib://")
mesh, fsdp_net = dist.init_device_mesh("cpu", (comm.size,)), fresh_net()
for module in (*(one for one in fsdp_net if isinstance(one, nn.Linear)), fsdp_net):
    fsdp.fully_shard(module, mesh=mesh)
both = {"ours": at_stage(3), "fsdp2": (fsdp_net, AdamW(fsdp_net.parameters(), **ADAM))}
for name, (model, adam) in both.items():
    assert (digits.train(model, comm, adam.step, adam.zero_grad) - expected).abs().max() < 1e-12
    with dtlib.trace() as both[name]:
        with dtlib.phase("forward"):
            loss = cross_entropy(model(x[:24]), y[:24])
        with dtlib.phase("backward"):
            loss.backward()
ours, fsdp2 = both.values()
dist.destroy_process_group()

# %% tags=["nbval-ignore-output"]
lab.pictures.timeline("ours", "fsdp2", rank=0, ends={"forward": ""})
operations = [e.name for e in lab.values("fsdp2")[0].events if e.kind == "operation"]
assert operations.count("all_gather") == 6 and operations.count("reduce_scatter") == 3

# %% tags=["statement"]
# "has the same gathers"
# "FSDP2 sends 1 % more: it pads the last layer's ten rows to twelve, so that shards are equal."
assert rows("0  all_gather", "over")[0][0] == 6
ours, theirs = (numbers[-1] for numbers in rows("0  reduce_scatter"))
# 8 bytes a number, 3/4 of each layer's; ours pads its 1,290 to the next multiple of four
assert (ours, theirs) == (6 * (8320 + 16512 + 1292), 6 * (8320 + 16512 + 12 * 129)) and round(theirs / ours, 2) == 1.01

# %% [markdown]
# ## What holds on GPUs, and what does not
#
# These also hold on GPUs: values, bytes held and sent, the order of the gathers. Speed does not. On GPUs use
# FSDP2 or DeepSpeed: they hide gathers behind computation.
#
# **Discuss.** Your model fits at stage 1 with micro-batches of 4, and at stage 3 with 32. Which do you choose?

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("06")

# %% [markdown]
# ## Summary
#
# - Adam in mixed precision takes 2 + 2 + 12 bytes per parameter, and data parallelism holds them on every rank.
# - Stage 1 shards the 12, stage 2 the gradients' 2 as well, stage 3 all 16. The losses stay the same.
# - Stages 1 and 2 send 2 P (N-1)/N, stage 3 sends 3 P (N-1)/N.
# - With M micro-batches: 2, M + 1, and 3 M units for stages 1, 2, 3.
# - A checkpoint does not depend on the number of ranks.
#
# Now the [exercises](../exercises/06_zero_exercises.ipynb).
#
# ## References
#
# - S. Rajbhandari et al.: ZeRO: memory optimizations toward training trillion parameter models. SC, 2020.
# - Y. Zhao et al.: PyTorch FSDP. VLDB 16(12), 2023.
# - P. Micikevicius et al.: Mixed precision training. ICLR, 2018. T. Chen et al.: Training deep nets with sublinear memory
#   cost. arXiv:1604.06174, 2016.
