# %% [markdown]
# # 07 Pipelines
#
# Ninety minutes. You cut a model between its layers and put the pieces, the *stages*, on different ranks. At first
# all ranks but one wait. So you cut the batch too, and count the time that is still lost. The order of work, the
# *schedule*, is a list: you draw it, check it, and run it.
#
# **Questions.** What do you do with a model that does not fit? How much time does a pipeline lose, and how many
# activations does it keep? Which order of work is best?
#
# **Afterwards you can** cut a model into stages and train it, with the same numbers as one process; compute the
# memory of a pipeline and its idle time, the *bubble*, and say what the bubble is a fraction of; choose among GPipe,
# 1F1B, interleaved 1F1B and ZB-H1.
#
# **You need** [03 Collectives](03_collectives.ipynb) (send, recv) and the first half of [04 Data
# parallelism](04_data_parallel.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [markdown]
# A cell that starts with `%%px --local` runs on the ranks and in the notebook.

# %%
# %%px --local
import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dtlib.lab import digits, explorer
from dtlib.lessons.l07 import figures, live_bytes
from dtlib.parallel.pipeline import plain
from dtlib.schedule import draw, formulas, gpipe, one_f_one_b, parse, simulate, validate

# %% [markdown] tags=["two-hours", "half-day"]
# ## A model that does not fit
#
# A model is too large for one GPU. So put some layers on one, and the rest on another:
#
#     hidden = torch.tanh(self.net1(x.to("cuda:0")))
#     return self.net2(hidden.to("cuda:1"))
#
# With a rank for each GPU, `.to()` becomes a send and a receive. autograd, torch's backward pass, cannot follow a
# tensor across a message, so gradients have to be sent back.
#
# **Predict.** The whole batch goes through two such ranks, forward and back. What percentage of the time does each one
# compute?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("percentage-of-two", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("percentage-of-two", 50)

# %% [markdown] tags=["two-hours", "half-day"]
# Messages are real here, computing is **EMULATED**: a stage sleeps, like a core that waits for its accelerator. A
# backward pass takes twice as long as a forward pass.

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
two = explorer.measure("GPipe", ranks=2, microbatches=1).simulation
figures.picture({"two ranks, one piece (EMULATED)": two})

# %% tags=["statement"]
# "At every moment one of the two waits."
assert abs(found(r"two ranks, one piece [\d.]+ ([\d.]+)%")[0] - 50) < 10

# %% [markdown] tags=["two-hours", "half-day"]
# **At every moment one of the two waits.** The model fits now, but no time is saved.
#
# ## Micro-batches
#
# GPipe (Y. Huang et al., 2019) cuts the batch as well: while rank 1 works on one *micro-batch*, rank 0 works on the
# next. First come all forward passes, then all backward passes, then one optimizer step. Gradients add up to those of
# the whole batch. Here it is as a list of actions for each rank. `2F1` is stage 2, forward, micro-batch 1.

# %% tags=["two-hours", "half-day"]
schedule = gpipe(4, 4)  # ranks, micro-batches
for rank, actions in enumerate(schedule):
    print(f"rank {rank} ", *actions)
print(f"\n{draw(schedule)}")

# %% [markdown] tags=["two-hours", "half-day"]
# `--` continues a backward pass; `..` is idle time, the *bubble*. Papers divide it by two different times. With p ranks and
# m micro-batches, GPipe has
#
# - idle time / **makespan** (how long the step takes): (p-1) / (m+p-1);
# - idle time / **ideal time** (how long it would take if nobody waited): (p-1) / m.
#
# **Predict** for 4 ranks. What percentage of the makespan is lost with 1, with 8 and with 32 micro-batches?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("percentage-lost", {1: None, 8: None, 32: None})

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("percentage-lost", {1: 75, 8: 27.3, 32: 8.6})

# %% tags=["statement"]
# "More micro-batches, smaller bubble."
got = [found(f"{m}: you predicted [\\d.]+, and it came out as ([\\d.]+)")[0] for m in (1, 8, 32)]
assert got == sorted(got, reverse=True)

# %% [markdown] tags=["two-hours", "half-day"]
# More micro-batches, smaller bubble. Why not a thousand? Small ones keep an accelerator less busy. And GPipe has to
# keep the *activations* of all of them: what a forward pass leaves for its backward pass. Eight, simulated and
# measured:

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
eight = explorer.measure("GPipe", ranks=4, microbatches=8).simulation
figures.picture({"GPipe, simulated": simulate(gpipe(4, 8)), "measured (EMULATED)": eight})
# %% tags=["two-hours", "half-day", "claim"]
# "The pattern is the simulated one. The extra time is overhead."
assert eight.makespan > simulate(gpipe(4, 8)).makespan  # no sleep is too short

# %% [markdown] tags=["two-hours", "half-day"]
# The pattern is the simulated one. The extra time is overhead.

# %% [markdown] tags=["half-day"]
# ## The engine
#
# Now real training. A `LayerSpec` describes a layer that is built later, on the rank that gets it; `PipelineModule`
# cuts the list into stages, with about equally many parameters in each. The names are those of DeepSpeed, Microsoft's
# training library. With fewer stages than ranks, several pipelines run side by side, each on its slice of the batch.

# %% tags=["half-day"]
# %%px
from dtlib.deepspeed.pipe import LayerSpec, PipelineModule


def layers(width=96):
    """Nine layers: 64 pixels in, scores of ten digits out."""
    specs = []
    for inputs in (64, width, width, width):
        specs += [LayerSpec(nn.Linear, inputs, width), LayerSpec(nn.Tanh)]
    return [*specs, LayerSpec(nn.Linear, width, 10)]


comm, losses = dtlib.init().comm, {}
config = {
    "train_batch_size": 96,
    "gradient_accumulation_steps": 8,  # the micro-batches
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
}
for stages in (1, 2, 4):
    net = PipelineModule(layers(), num_stages=stages, loss_fn=cross_entropy).double()
    data = TensorDataset(*digits.load(torch.float64)[0])
    engine, *_ = dtlib.initialize(net, config, training_data=data)
    losses[stages] = [engine.train_batch().item() for _ in range(15)]
    print(f"stages: {stages}, layers {' '.join(net.layers)}; last loss {losses[stages][-1]:.10f}")
    assert max(abs(a - b) for a, b in zip(losses[stages], losses[1], strict=True)) < 1e-12

# %% tags=["statement"]
# "One stage on four ranks is data parallelism."
# "All losses agree to 1e-12"
one, four = "stages: 1, layers 0 1 2 3 4 5 6 7 8; last loss", "stages: 4, layers 0; last loss"
assert count(one) == 4 and len({*rows(one)[0], *rows(four)[0]}) == 1

# %% [markdown] tags=["half-day"]
# One stage on four ranks is data parallelism. All losses agree to 1e-12: **a pipeline does not change the
# mathematics.**

# %% [markdown]
# ## What runs
#
# This is the plain core, from its beginning. `order` says who does what when:

# %%
lab.read(plain)
lab.read(plain.order)

# %% [markdown]
# What travels: a header tells the next rank the shape and type of what will arrive. A rank asks for the next message while it computes:

# %%
lab.read(plain.announce, plain.announced, plain.arriving)

# %% [markdown]
# And one step. Look for the places where ranks talk, and where `detach()` cuts autograd's graph:

# %%
lab.read(plain.step)

# %% [markdown]
# Train one epoch with it, and compare with one process that sees whole batches:

# %%
# %%px
(x, y), test = digits.load(torch.float64)
module = PipelineModule(layers(), num_stages=4).double()
whole = PipelineModule(layers(), 1, comm=comm.split(comm.rank)).double()  # on every rank
sgd, sgd_alone = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (module, whole))
for images, labels in zip(x.split(240), y.split(240), strict=True):
    batch = images if comm.rank == 0 else None, labels if comm.rank == 3 else None
    sgd.zero_grad()
    loss = plain.step(comm, module, *batch, cross_entropy, microbatches=8)
    sgd.step()
    sgd_alone.zero_grad()
    loss_alone = cross_entropy(whole(images), labels)
    loss_alone.backward()
    sgd_alone.step()

theirs = dict(whole.layers.named_parameters())
for name, p in module.layers.named_parameters():  # and their last gradients
    assert (p - theirs[name]).abs().max() < 1e-12
    assert (p.grad - theirs[name].grad).abs().max() < 1e-12
if comm.rank == 3:
    print(f"last loss: the pipeline {loss:.10f}, one process {loss_alone:.10f}")

# %% [markdown]
# **Change the order.** With `"1f1b"` a rank does `ranks - 1 - rank` forward passes ahead, and then one forward and one
# backward pass in turn. (Why, you see below.) In the changed order no rank runs ahead: F0 B0 F1 B1, and so on. The
# gradients stay the same. **Predict:** what percentage of the time does a rank compute?

# %% tags=["stub"]
lab.predict("percentage-with-nobody-ahead", None)

# %% tags=["solution"]
lab.predict("percentage-with-nobody-ahead", 25)

# %%
# %%px
def emulated_step():
    """The trace of a step of 8 micro-batches. EMULATED: 20 ms forward, 40 ms backward."""
    first, last = comm.rank == 0, comm.rank == 3
    stage = explorer.EmulatedStage(nn.Linear(64 if first else 32, 32).double(), 0.02, 0.04)
    batch = x[:96] if first else None, y[:96] if last else None
    for _ in range(2):  # the first step of a process takes longer
        comm.barrier()
        with dtlib.trace() as trace:
            plain.step(comm, stage, *batch, cross_entropy, 8, "1f1b")
    return trace

# %%
# %%px
from unittest.mock import patch


def nobody_ahead(schedule, rank, ranks, microbatches):
    return [(kind, m) for m in range(microbatches) for kind in "FB"]


ahead = emulated_step()
with patch.object(plain, "order", nobody_ahead):  # step() asks this one
    traces = ahead, emulated_step()

# %% tags=["nbval-ignore-output"]
of_ranks = zip(*lab.values("traces"), strict=True)
names = ("1F1B", "nobody ahead")
ran = {
    name: figures.measured(dtlib.Timeline(some), unit=0.02)
    for name, some in zip(names, of_ranks, strict=True)
}
figures.picture({f"{name} (EMULATED)": found for name, found in ran.items()})

# %% tags=["statement"]
# "The gradients stay the same."
# "In the changed order no rank runs ahead"
assert row("nobody ahead (EMULATED)", "nobody ahead")[-4:] == [1, 1, 1, 1]

# %% [markdown]
# ## Will it hang?
#
# A schedule is a list, so you can write a wrong one: each rank's order looks reasonable, and yet all ranks wait
# forever. `validate` finds that out without ranks. **Predict:** which of these two orders for 2 ranks hangs?

# %% tags=["stub"]
orders = {
    "A": ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"],
    "B": ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
}
lab.predict("which-hangs", None)

# %% tags=["solution"]
orders = {
    "A": ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"],
    "B": ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
}
lab.predict("which-hangs", "B")

# %%
for name, ranks in orders.items():
    try:
        validate([[parse(action) for action in rank.split()] for rank in ranks])
        print(f"{name} can run.")
    except dtlib.schedule.ScheduleError as problem:
        hangs = name
        print(lab.fold(f"{name}: {problem}"))

# %% tags=["statement"]
# "which of these two orders for 2 ranks hangs?"
assert count("A can run") == 1 and count("B: Ranks wait for each other in a circle") == 1

# %% [markdown]
# The full classes have what the plain core leaves out. Their names are those of `torch.distributed.pipelining`:
# `PipelineStage` is this rank's stage, and one interpreter runs any list of actions.

# %%
lab.read_end(plain)

# %% [markdown]
# ## Memory: 1F1B
#
# GPipe does all forward passes first, so a rank holds the activations of all m micro-batches. *1F1B* (PipeDream, 2019;
# DAPPLE, 2021) begins the backward passes as soon as it can, and then does *one forward, one backward* in turn. **Predict**
# for 8 ranks and 32 micro-batches: of how many micro-batches does rank 0 hold activations at most? And rank 7?

# %% tags=["stub"]
lab.predict("held-with-1f1b", {"rank 0": None, "rank 7": None})

# %% tags=["solution"]
lab.predict("held-with-1f1b", {"rank 0": 8, "rank 7": 1})

# %%
on_eight = simulate(one_f_one_b(8, 32))
print("1F1B, 8 ranks, 32 micro-batches; held by rank:", *on_eight.peak_activations)
both = {"GPipe": simulate(gpipe(4, 8)), "1F1B": simulate(one_f_one_b(4, 8))}
figures.picture(both)

# %% tags=["statement"]
# "The bubble is the same. The memory is not."
gpipe, eager = row("GPipe", "idle / makespan"), row("1F1B", "idle / makespan")
assert gpipe[:3] == eager[:3] and gpipe[3:] == [8] * 4 and eager[3:] == [4, 3, 2, 1]

# %% [markdown]
# The bubble is the same. The memory is not.

# %%
figures.in_flight(both)

# %% [markdown]
# Do bytes follow? Every tensor is counted until it is freed (EMULATED stages). **Predict:** with 16 micro-batches instead
# of 8 of the same size, by what factor do rank 1's live bytes grow?

# %% tags=["stub"]
lab.predict("growth-of-live-bytes", {"GPipe": None, "1F1B": None})

# %% tags=["solution"]
lab.predict("growth-of-live-bytes", {"GPipe": 2, "1F1B": 1})

# %% tags=["nbval-ignore-output"]
runs = [(name, m) for name in ("GPipe", "1F1B") for m in (4, 8, 16)]
alive = {(name, m): live_bytes.measure(name, ranks=4, microbatches=m) for name, m in runs}
live_bytes.picture({name: alive[name, 8] for name in ("GPipe", "1F1B")})
lab.table(
    [(f"{name}, {m} micro-batches", *found.peaks) for (name, m), found in alive.items()],
    ("live bytes at most", *(f"rank {rank}" for rank in range(4))),
)

# %% tags=["statement"]
# "With GPipe live bytes grow with micro-batches. With 1F1B they stay"
most = {(name, m): row(f"{name}, {m} micro-batches", "live bytes at most") for name in ("GPipe", "1F1B") for m in (4, 8, 16)}
for rank in range(4):
    assert most["GPipe", 16][rank] > 1.5 * most["GPipe", 8][rank] > 2 * most["GPipe", 4][rank]
    assert most["1F1B", 16][rank] < 1.3 * most["1F1B", 8][rank]

# %% [markdown]
# With GPipe live bytes grow with micro-batches. With 1F1B they stay where they are, because `step` frees what it has
# sent: see `del` and `sending`.
#
# Now our net. *Recomputation* (lesson 06) is another way to save memory: keep only a stage's input, and run its forward
# pass again.

# %%
# %%px
import gc

from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe


def kept_by(kind, recompute=False):
    """Micro-batches in flight, bytes of activations, and live bytes at the peak, of one step."""
    images = x[:640].clone()  # memory of its own
    gc.collect()  # what earlier cells have left behind
    module = PipelineModule(layers(), num_stages=4, partition_method=[0, 2, 4, 6, 9]).double()
    stage = PipelineStage(module, comm.rank, 4, comm)
    schedule = kind(stage, 8, cross_entropy, recompute=recompute)
    with dtlib.memory(module) as m:
        inputs = [images] if comm.rank == 0 else []
        schedule.step(*inputs, target=y[:640] if comm.rank == 3 else None)
    return schedule.peak_in_flight, m.activations, m.peak - m.parameters - m.gradients


kept = {
    "GPipe": kept_by(ScheduleGPipe),
    "1F1B": kept_by(Schedule1F1B),
    "GPipe, recomputing": kept_by(ScheduleGPipe, recompute=True),
}

# %%
every, names = lab.values("kept"), ("GPipe", "1F1B", "GPipe, recomputing")
for at, what in enumerate(("micro-batches in flight", "bytes of activations")):
    rows = [(name, *(kept[name][at] for kept in every)) for name in names]
    lab.table(rows, (what, *(f"rank {rank}" for rank in range(4))))
for name, found in both.items():
    assert [kept[name][0] for kept in every] == found.peak_activations

# %% tags=["statement"]
# "With 1F1B rank 0 still holds 70 %: 327,680 of its bytes are the images"
# "keep only a stage's input, and run its forward pass again"
gpipe, eager, again = (rows(name, "bytes of activations")[1] for name in ("GPipe", "1F1B", "GPipe, recomputing"))
assert round(eager[0] / gpipe[0], 2) == 0.7 and 640 * 64 * 8 == 327_680
assert (eager[0] - 327_680) / (gpipe[0] - 327_680) == 4 / 8 and all(a < b for a, b in zip(again, gpipe, strict=True))
# "GPipe with recomputation keeps less than 1F1B on rank 0, and more on ranks 1 to 3"
assert again[0] < eager[0] and all(more > less for more, less in zip(again[1:], eager[1:], strict=True))

# %% tags=["nbval-ignore-output"]
rows = [(name, *(kept[name][2] for kept in every)) for name in names]
lab.table(rows, ("live bytes at the peak", *(f"rank {rank}" for rank in range(4))))

# %% tags=["statement"]
# "At the peak recomputation saves a smaller part"
gpipe, again = (rows(name, "bytes of activations")[1] for name in ("GPipe", "GPipe, recomputing"))
at_peak, again_at_peak = (rows(name, "live bytes at the peak")[-1] for name in ("GPipe", "GPipe, recomputing"))
assert all(again[rank] / gpipe[rank] < again_at_peak[rank] / at_peak[rank] < 1 for rank in (1, 2, 3))

# %% [markdown]
# With 1F1B rank 0 still holds 70 %: 327,680 of its bytes are the images. GPipe with recomputation keeps less than 1F1B on rank 0, and more on ranks 1 to 3. At the peak recomputation saves a smaller part: one
# micro-batch is computed, and messages are in flight. A published table: the largest AmoebaNet-D, an image model, that fits on accelerators of 8 GB. The first row is one accelerator
# without GPipe; the others are GPipe, which recomputes, on 2 and on 8.

# %%
columns = {
    "params_gpipe": "parameters",
    "model_memory_GB_gpipe": "model (GB)",
    "peak_activation_GB_gpipe": "activations (GB)",
}
table = lab.published("gpipe_table1_memory.csv")
rows = [(row["experiment"], *(row[column] for column in columns)) for row in table]
title = "GPipe, table 1; memory over all accelerators"
lab.table(rows, ("", *columns.values()), title, align="lrrr")

# %% tags=["statement"]
# "The first row is one accelerator without GPipe; the others are GPipe, which recomputes, on 2 and on 8."
# "Eight accelerators hold 22 times the parameters of one."
assert [row(name, "GPipe, table 1")[0] for name in ("baseline", "pipeline-2", "pipeline-8")] == [82, 542, 1.8]
assert round(1800 / 82) == 22

# %% [markdown]
# Eight accelerators hold 22 times the parameters of one.
#
# ## Other orders
#
# - **Interleaved 1F1B** (D. Narayanan et al., 2021): each rank has v small stages that are not neighbours, so a
#   micro-batch goes around v times; p divides m. Each takes 1/v of the time: v times less
#   idle time, but v times as many messages.
#   (In the picture below v is 2, and a rank's second stage is paler.)
# - **ZB-H1**, zero bubble (P. Qi et al., 2024): a backward pass is split in two. The stage before waits for the
#   gradient of the input (`I`). Nobody waits for the gradients of the weights (`W`), so they fill idle time.

# %% [markdown]
# **Predict:** which of the four has the smallest bubble, and which holds the most bytes of activations on rank 0?
# (Stages of interleaved 1F1B are half as large: two of its activations count as one.)

# %% tags=["stub"]
lab.predict("of-four-schedules", {"smallest bubble": None, "most held": None})

# %% tags=["solution"]
lab.predict("of-four-schedules", {"smallest bubble": "ZB-H1", "most held": "GPipe"})

# %%
four = {name: explorer.simulate(name, ranks=4, microbatches=8) for name in explorer.ORDERS}
figures.picture(four)

# %%
rows, weights = [], {}
for name, found in four.items():
    order = explorer.ORDERS[name]
    sizes = (order.formulas, 4, 8, order.chunks)
    weights[name] = found.peak_activations[0] / order.chunks
    rows.append((name, f"{found.bubble:.1%}", f"{formulas.bubble(*sizes):.1%}", weights[name]))
    assert abs(found.bubble - formulas.bubble(*sizes)) < 1e-12
    assert found.peak_activations[0] == formulas.peak_activations(*sizes)
headers = ("", "idle / makespan, simulated", "by formula", "held by rank 0, in stages of 1F1B")
lab.table(rows, headers)

# %% tags=["statement"]
# "Interleaved: v times less idle time, v times as many messages. ZB-H1: a third of the idle time"
# "Interleaved 1F1B holds 11 activations of half a stage: 5.5."
names = ("GPipe", "1F1B", "interleaved 1F1B", "ZB-H1")
(gpipe, _), (plain, _), (interleaved, _), (zero, _) = (row(name, "simulated    by formula")[:2] for name in names)
assert gpipe == plain == 27.3 and interleaved == 15.8 and zero == 11.1
ideal = {name: row(name, "interleaved 1F1B:")[2] for name in names}
assert row("interleaved 1F1B", "simulated    by formula")[2] == row("interleaved 1F1B", "interleaved 1F1B:")[3] / 2 == 5.5
assert abs(ideal["interleaved 1F1B"] - 37.5 / 2) < 0.1 and abs(ideal["ZB-H1"] - 37.5 / 3) < 0.1

# %% [markdown]
# Interleaved 1F1B holds 11 activations of half a stage: 5.5. Here is the published table. ZB2P and ZBV are further
# zero-bubble schedules, which this library does not have. One row divides by the ideal time, the others by the
# makespan: always ask which.

# %%
rows = [
    (r["schedule"], r["bubble"], r["activation_memory_vs_1F1B"], r["comm_volume_vs_1F1B"])
    for r in lab.published("pipeline_schedule_formulas.csv")
]
title = "P. Qi et al. (README beside their code); D. Narayanan et al., 2021"
lab.table(rows, ("", "bubble", "activations", "bytes sent"), title)

# %% tags=["statement"]
# "One row divides by the ideal time, the others by the makespan"
# "ZB2P and ZBV are further zero-bubble schedules, which this library does not have."
assert count(r"bubble time / ideal") == 1 and count(r"\(p-1\)/\(m\+p-1\)") == 1

# %% [markdown]
# And the same four on the ranks, measured (EMULATED stages, real messages):

# %% tags=["nbval-ignore-output"]
runs = {name: explorer.measure(name, ranks=4, microbatches=8) for name in explorer.ORDERS}
figures.picture({f"{name}, measured": run.simulation for name, run in runs.items()})
for name, run in runs.items():
    assert run.peaks == four[name].peak_activations

# %% tags=["claim"]
# "And the same four on the ranks, measured (EMULATED stages, real messages):"
assert all(run.simulation.makespan > four[name].makespan for name, run in runs.items())

# %% [markdown]
# ## Explore
#
# Move the sliders; the button runs what you see on the ranks. Try fewer micro-batches than ranks. Then let messages
# take as long as a forward pass: which order suffers most? (Without ranks, in a web page: `dtlib browser`.)

# %% tags=["nbval-ignore-output"]
explorer.explore()

# %% [markdown]
# ## What holds on GPUs, and what does not
#
# Also true on GPUs: values, schedules, activations in flight, waits, and the bubble with your own times.
# Not shown here: speed, as stages slept. On GPUs the best m is not the largest, stages are never quite equal, and NCCL sends while kernels run. Use `torch.distributed.pipelining`, Megatron-LM or
# DeepSpeed there.
#
# **Discuss.** You have two machines with eight GPUs each, a slow network between them, and a model that does not fit
# on one GPU. Where do you cut, and why there?

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("07")

# %% [markdown]
# ## Summary
#
# - Data parallelism copies the model, a pipeline cuts it between layers. Activations travel, and their gradients.
# - With m micro-batches, p ranks lose (p-1)/(m+p-1) of the makespan, which is (p-1)/m of the ideal time.
# - Rank r of p holds the activations of all m micro-batches with GPipe, and of at most p - r with 1F1B. The bubble is the
#   same.
# - Interleaved: v times less idle time, v times as many messages. ZB-H1: a third of the idle time, if F, I and W take
#   equally long.
# - A pipeline sends activations at the cuts, and more of them with a larger batch. ZeRO-3 sends all parameters twice and
#   all gradients once for each micro-batch. If the activations at the cuts are fewer bytes,
#   the pipeline wins on a slow network. ZeRO-3 has no bubble.
# - A schedule is a list: check it, time it, draw it, run it. The gradients equal those of one process, to 1e-12.
#
# Now the [exercises](../exercises/07_pipelines_exercises.ipynb), and a puzzle: [be the
# schedule](../exercises/07_schedule_puzzle_exercises.ipynb). [07b](07b_pipelines_in_earnest.ipynb) shows what the
# formulas miss; lesson 08 cuts single layers.
#
# ## References
#
# - Y. Huang et al.: GPipe: efficient training of giant neural networks using pipeline parallelism. NeurIPS, 2019.
# - D. Narayanan et al.: PipeDream. SOSP, 2019. S. Fan et al.: DAPPLE. PPoPP, 2021.
# - D. Narayanan et al.: Efficient large-scale language model training on GPU clusters using Megatron-LM. SC, 2021.
# - P. Qi, X. Wan, G. Huang, M. Lin: Zero bubble pipeline parallelism. ICLR, 2024.
