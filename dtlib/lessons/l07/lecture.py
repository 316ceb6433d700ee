# %% [markdown]
# # 07 Pipelines
#
# Ninety minutes. You cut a model between its layers and put the pieces, the *stages*, on different ranks. At first only
# one rank works at a time. So you cut the batch too, and count the time that is still lost. The order of work, the
# *schedule*, is a list: you draw it, check it, and run it.
#
# **Questions.** How much time does a pipeline lose, and how many activations does it keep? Which order of work is best?
#
# **Afterwards you can** cut a model into stages and train it, with the same numbers as one process; compute the memory of a
# pipeline and its idle time, the *bubble*; choose a schedule.
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
from dtlib.schedule import draw, formulas, gpipe, parse, simulate, validate

# %% [markdown] tags=["two-hours", "half-day"]
# ## A model that does not fit
#
# A model is too large for one GPU. So put some layers on another, as torch's tutorial does:
#
#     hidden = torch.tanh(self.net1(x.to("cuda:0")))
#     return self.net2(hidden.to("cuda:1"))
#
# With a rank for each GPU, `.to()` becomes a send and a receive. torch's autograd cannot follow a tensor across a
# message, so gradients have to be sent back.
#
# **Predict.** The whole batch passes through two such ranks, forward and back. What percentage of the time does each
# rank compute?

# %% tags=["two-hours", "half-day", "stub"]
lab.predict("percentage-of-two", None)

# %% tags=["two-hours", "half-day", "solution"]
lab.predict("percentage-of-two", 50)

# %% [markdown] tags=["two-hours", "half-day"]
# Messages are real here, but computing is **EMULATED**: a stage sleeps. A backward pass takes twice as long as a
# forward pass.

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
two = explorer.measure("GPipe", ranks=2, microbatches=1).simulation
figures.picture({"two ranks, one batch (EMULATED)": two})

# %% tags=["statement"]
# "At every moment one of the two waits."
assert abs(found(r"two ranks, one batch [\d.]+ ([\d.]+)%")[0] - 50) < 10

# %% [markdown] tags=["two-hours", "half-day"]
# **At every moment one of the two waits.** Now the model fits, but no time is saved.
#
# ## Micro-batches
#
# GPipe (Y. Huang et al., 2019) cuts the batch as well: while rank 1 works on one *micro-batch*, rank 0 works on the
# next. First come all forward passes, then all backward passes, then one optimizer step. Gradients add up to those of
# the whole batch. Here is each rank's list of actions. `2F1` is stage 2, forward, micro-batch 1.

# %% tags=["two-hours", "half-day"]
schedule = gpipe(4, 4)  # ranks, micro-batches
for rank, actions in enumerate(schedule):
    print(f"rank {rank} ", *actions)
print(f"\n{draw(schedule)}")

# %% [markdown] tags=["two-hours", "half-day"]
# `--` continues a backward pass; `..` is idle time, the *bubble*. With p ranks and m micro-batches a rank computes m
# times F and B, and is idle for p - 1 times F and B. Papers divide the idle time in two ways:
#
# - idle time / **makespan** (the time of the step): (p-1) / (m+p-1);
# - idle time / **ideal time** (the time without waiting): (p-1) / m.
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
# More micro-batches, smaller bubble. Why not a thousand? Small micro-batches keep an accelerator less busy. And GPipe
# keeps the *activations* of the whole batch: values that a forward pass stores for its backward pass. Eight
# micro-batches, simulated and measured:

# %% tags=["two-hours", "half-day", "nbval-ignore-output"]
eight = explorer.measure("GPipe", ranks=4, microbatches=8).simulation
figures.picture({"GPipe, simulated": simulate(gpipe(4, 8)), "measured (EMULATED)": eight})
# %% tags=["two-hours", "half-day", "claim"]
# "Both patterns are the same. The extra time is overhead."
assert eight.makespan > simulate(gpipe(4, 8)).makespan  # no sleep is too short

# %% [markdown] tags=["two-hours", "half-day"]
# Both patterns are the same. The extra time is overhead.

# %% [markdown]
# ## Will it hang?
#
# A schedule is a list, so you can write a wrong one that makes all ranks wait forever. `validate` finds this without
# ranks. **Predict:** which of these two orders for 2 ranks hangs?

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
# **Your turn.** Find an order with half the activations and the same time: [the
# puzzle](../exercises/07_schedule_puzzle_exercises.ipynb), levels 1 and 2 (fifteen minutes).
#
# ## 1F1B: the same time, less memory
#
# The usual solution of level 2 is *1F1B* (PipeDream, 2019; DAPPLE, 2021): backward passes begin as soon as possible,
# and then each rank alternates *one forward, one backward*. **Predict** for 8 ranks and 32 micro-batches: for how many
# micro-batches does rank 0 hold activations at most? And rank 7?

# %% tags=["stub"]
lab.predict("held-with-1f1b", {"rank 0": None, "rank 7": None})

# %% tags=["solution"]
lab.predict("held-with-1f1b", {"rank 0": 8, "rank 7": 1})

# %%
from dtlib.schedule import one_f_one_b

on_eight = simulate(one_f_one_b(8, 32))
print("1F1B, 8 ranks, 32 micro-batches; activations on ranks 0 to 7:", *on_eight.peak_activations)
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
# Do bytes show the same? A tensor's bytes count until it is freed (EMULATED stages). **Predict:** with 16 micro-batches
# instead of 8 of the same size, by what factor do rank 1's live bytes grow?

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
    ("peak of live bytes", *(f"rank {rank}" for rank in range(4))),
)

# %% tags=["statement"]
# "With GPipe, live bytes grow with the number of micro-batches"
most = {(name, m): row(f"{name}, {m} micro-batches", "peak of live bytes") for name in ("GPipe", "1F1B") for m in (4, 8, 16)}
for rank in range(4):
    assert most["GPipe", 16][rank] > 1.5 * most["GPipe", 8][rank] > 2 * most["GPipe", 4][rank]
    assert most["1F1B", 16][rank] < 1.3 * most["1F1B", 8][rank]

# %% [markdown]
# With GPipe, live bytes grow with the number of micro-batches (1.78 times, not 2: messages in flight do not grow). With
# 1F1B they stay the same.

# %% [markdown] tags=["half-day"]
# ## The engine
#
# Now train a real model. A `LayerSpec` describes a layer that is built later, on its own rank. `PipelineModule` cuts
# the list into stages with about equally many parameters, as in DeepSpeed. With fewer stages than ranks, several
# pipelines run at once, each on its slice of the batch.

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
# The *plain core* is a short pipeline. Its `order` lists each rank's actions:

# %%
from dtlib.parallel.pipeline import plain

lab.read(plain)
lab.read(plain.order)

# %% [markdown]
# A header gives the next rank the shape and type of a tensor. A rank posts the next receive while it computes:

# %%
lab.read(plain.announce, plain.announced, plain.arriving)

# %% [markdown]
# In one step, find the lines that exchange messages, and the `detach()` that cuts autograd's graph:

# %%
lab.read(plain.step)

# %% [markdown]
# Train one epoch with it, and compare with one process that sees whole batches:

# %%
# %%px
from dtlib.parallel.pipeline import plain

(x, y), test = digits.load(torch.float64)
module = PipelineModule(layers(), num_stages=4).double()
whole = PipelineModule(layers(), 1, comm=comm.split(comm.rank)).double()  # on every rank
sgd, sgd_alone = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (module, whole))
for images, labels in zip(x.split(240), y.split(240), strict=True):
    batch = images if comm.rank == 0 else None, labels if comm.rank == 3 else None
    sgd.zero_grad()
    loss = plain.step(comm.group, module, *batch, cross_entropy, microbatches=8)
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
# dtlib's `PipelineStage`, `ScheduleGPipe` and `Schedule1F1B` have what the plain core leaves out. torch's classes have
# the same names, run on the same ranks, and compute the same:

# %%
# %%px
from torch import distributed as dist
from torch.distributed import pipelining

import dtlib.backend

if not dist.is_initialized():
    dist.init_process_group("dtlib", init_method="dtlib://")  # on GPUs: "nccl"
piece, ours = (PipelineModule(layers(), num_stages=4).double() for _ in range(2))
place = pipelining.PipelineStage(piece, comm.rank, 4, torch.device("cpu"))
schedule = pipelining.Schedule1F1B(place, n_microbatches=8, loss_fn=cross_entropy)
inputs, target = [x[:240]] * (comm.rank == 0), y[:240] if comm.rank == 3 else None
losses_1f1b = []
schedule.step(*inputs, target=target, losses=losses_1f1b)
loss = plain.step(comm.group, ours, *(inputs or [None]), target, cross_entropy, 8)
for p, q in zip(piece.parameters(), ours.parameters(), strict=True):
    assert (p.grad - q.grad).abs().max() < 1e-12
if comm.rank == 3:
    print(f"loss, torch: {sum(losses_1f1b) / 8:.10f}, ours: {loss:.10f}")
dist.destroy_process_group()

# %% tags=["statement"]
# "torch's classes have the same names, run on the same ranks, and compute the same:"
assert len(set(found(r"loss, torch: ([\d.]+), ours: ([\d.]+)"))) == 1

# %% [markdown]
# ## Bytes of two nets, and recomputation
#
# *Recomputation* keeps only the input of a layer or a stage, and runs its forward pass again. For a transformer's layer,
# with batch b, s tokens, width h and a heads, V. Korthikanti et al. (2022) count, for 16 bits:
#
# - s b h (34 + 5 a s / h) bytes; the second term counts the attention scores;
# - 2 s b h, the input, if the layer is recomputed.
#
# **Question 1.** GPT-3 (96 layers, s = 2,048, h = 12,288, a = 96) runs by 1F1B on 8 ranks, one sequence per
# micro-batch. How many GB of activations does rank 0 hold? And with recomputed layers?
#
# <details><summary>Answer 1</summary>12 layers of 8 micro-batches, 2.87 GB each: 275 GB. Recomputed: 50 MB each, 4.8 GB.</details>
#
# Count the bytes of our nine layers (a perceptron), and of four transformer blocks (b = 8, s = h = 64, a = 4), one per
# rank. Without dropout, 34 becomes 32; torch's attention keeps no scores, so the second term is zero; 32 bits
# double the rest. So a block keeps 64 s b h, or 4 s b h if recomputed.

# %% tags=["claim"]
# "12 layers of 8 micro-batches, 2.87 GB each: 275 GB. Recomputed: 50 MB each, 4.8 GB"
s, h, a = 2048, 12288, 96
layer = s * h * (34 + 5 * a * s / h)
assert round(layer / 1e9, 2) == 2.87 and round(96 * layer / 1e9) == 275
assert round(2 * s * h / 1e6) == 50 and round(96 * 2 * s * h / 1e9, 1) == 4.8

# %%
# %%px
import gc

from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe
from dtlib.workloads import decoder

blocks = decoder.workload({"layers": 4, "hidden": 64, "heads": 4, "seq": 64}).layers
text = torch.randint(256, (64, 64), generator=torch.Generator().manual_seed(0))
NETS = {
    "perceptron": (layers(), [0, 2, 4, 6, 9], x[:640].float(), y[:640], cross_entropy),
    "transformer": (blocks, [0, 2, 3, 4, 6], text, text, decoder.loss_fn),
}
KINDS = {
    "GPipe": (ScheduleGPipe, False),
    "1F1B": (Schedule1F1B, False),
    "GPipe, recomputing": (ScheduleGPipe, True),
    "1F1B, recomputing": (Schedule1F1B, True),
}

# %%
# %%px
def kept_by(net, kind, recompute=False):
    """Return the most micro-batches in flight, and the most bytes of activations, in a step."""
    specs, cuts, inputs, target, loss_fn = NETS[net]
    inputs = inputs.clone()  # memory of its own
    gc.collect()  # tensors of earlier cells
    module = PipelineModule(specs, num_stages=4, partition_method=cuts)
    stage = PipelineStage(module, comm.rank, 4, comm)
    schedule = kind(stage, 8, loss_fn, recompute=recompute)
    with dtlib.memory(module) as m:
        schedule.step(*[inputs][: comm.rank == 0], target=target if comm.rank == 3 else None)
    return schedule.peak_in_flight, m.activations


kept = {(net, name): kept_by(net, *how) for net in NETS for name, how in KINDS.items()}

# %%
every = lab.values("kept")
rows = [(f"{net}, {name}", *(kept[net, name][1] for kept in every)) for net, name in every[0]]
lab.table(rows, ("bytes of activations", *(f"rank {rank}" for rank in range(4))))
for net, name in every[0]:
    flights = [kept[net, name][0] for kept in every]
    assert flights == both[name.split(",")[0]].peak_activations

# %% tags=["statement"]
# "Rank 1 has one block, and keeps 64.5 s b h for each micro-batch in flight: 8 with GPipe, 3 with 1F1B."
# "With recomputation it keeps the block's input, 4 s b h, and all 64.5 s b h only during a micro-batch's backward pass."
gpipe, eager, again = (row(f"transformer, {name}", "bytes of activations")[1] / (64 * 8 * 64)
                       for name in ("GPipe", "1F1B", "GPipe, recomputing"))
assert (gpipe, eager, again) == (8 * 64.5, 3 * 64.5, 8 * 4 + 64.5 - 4)
# "The perceptron gains little by it."
gpipe, again = (row(f"perceptron, {name}", "bytes of activations")[1] for name in ("GPipe", "GPipe, recomputing"))
assert again / gpipe > 1 / 2

# %% [markdown]
# Rank 1 has one block, and keeps 64.5 s b h for each micro-batch in flight: 8 with GPipe, 3 with 1F1B. (0.5: statistics
# of norms and attention.) With recomputation it keeps the block's input, 4 s b h, and all 64.5 s b h only during a
# micro-batch's backward pass. The perceptron gains little by it.

# %% [markdown]
# ## Other orders
#
# - **Interleaved 1F1B** (D. Narayanan et al., 2021): each rank has v small stages that are not neighbours, so a
#   micro-batch goes around v times (below v is 2, and a rank's second stage is paler). m must be a multiple of p. This
#   has 1/v of the idle time, but v times as many messages.
# - **ZB-H1**, zero bubble (P. Qi et al., 2024): a backward pass is split in two. The previous stage waits for the
#   gradient of the input (`I`). No stage waits for the gradients of the weights (`W`), so they fill idle time.
#
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
headers = ("", "idle / makespan, simulated", "by formula", "activations of rank 0, in 1F1B stages")
lab.table(rows, headers)

# %% tags=["statement"]
# "Interleaved: 1/v of the idle time, v times as many messages. ZB-H1: a third of the idle time"
# "Interleaved 1F1B holds 11 activations of half a stage, which count as 5.5."
names = ("GPipe", "1F1B", "interleaved 1F1B", "ZB-H1")
(gpipe, _), (plain, _), (interleaved, _), (zero, _) = (row(name, "simulated    by formula")[:2] for name in names)
assert gpipe == plain == 27.3 and interleaved == 15.8 and zero == 11.1
ideal = {name: row(name, "interleaved 1F1B:")[2] for name in names}
assert row("interleaved 1F1B", "simulated    by formula")[2] == row("interleaved 1F1B", "interleaved 1F1B:")[3] / 2 == 5.5
assert abs(ideal["interleaved 1F1B"] - 37.5 / 2) < 0.1 and abs(ideal["ZB-H1"] - 37.5 / 3) < 0.1

# %% [markdown]
# Interleaved 1F1B holds 11 activations of half a stage, which count as 5.5.
#
# ## Explore
#
# The button runs the drawn schedule on the ranks. Try fewer micro-batches than ranks. Let messages take as long as a
# forward pass: which order suffers most?

# %% tags=["nbval-ignore-output"]
explorer.explore()

# %% [markdown]
# ## What holds on GPUs, and what does not
#
# Also true on GPUs: values, schedules, activations in flight, waits, and the bubble with your own times. Speed was not
# shown, because stages slept. On GPUs use `torch.distributed.pipelining`, Megatron-LM or DeepSpeed.
#
# **Discuss.** You have two machines of eight GPUs, a slow network between them, and a model too large for one GPU.
# Where do you cut, and why there?

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("07")

# %% [markdown]
# ## Summary
#
# - A pipeline cuts the model between layers. Activations travel, and their gradients.
# - With m micro-batches, p ranks lose (p-1)/(m+p-1) of the makespan, which is (p-1)/m of the ideal time.
# - Rank r holds activations of all m micro-batches with GPipe, of at most p - r with 1F1B. The bubble is the same.
# - Interleaved: 1/v of the idle time, v times as many messages. ZB-H1: a third of the idle time, if F, I and W take
#   equally long.
# - A transformer's layer keeps s b h (34 + 5 a s / h) bytes in 16 bits, and 2 s b h if it is recomputed.
# - A schedule is a list: check it, time it, draw it, run it. The gradients equal those of one process.
#
# Now the [exercises](../exercises/07_pipelines_exercises.ipynb), and level 3 of the puzzle.
# [07b](07b_pipelines_in_earnest.ipynb) shows what the formulas miss.
#
# ## References
#
# - Y. Huang et al.: GPipe. NeurIPS, 2019.
# - D. Narayanan et al.: PipeDream. SOSP, 2019. S. Fan et al.: DAPPLE. PPoPP, 2021.
# - D. Narayanan et al.: Efficient large-scale language model training on GPU clusters. SC, 2021.
# - P. Qi, X. Wan, G. Huang, M. Lin: Zero bubble pipeline parallelism. ICLR, 2024.
# - V. Korthikanti et al.: Reducing activation recomputation in large transformer models. arXiv:2205.05198, 2022.
