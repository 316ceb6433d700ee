# %% [markdown]
# # 10 Two real models
#
# Seventy-five minutes. You train two models with one config each, on our engines and on torch's classes. One model
# reads digits, the other summarises texts. DeepSpeed runs only if you install it; its figures here are stored.
#
# **Questions.** What does a config decide, and what does it leave open? Do the frameworks learn the same, send the
# same, hold the same? Which framework should you choose?
#
# **Afterwards you can** train a model by a config, on any number of ranks and under any of three runtimes; read its
# loss, time and memory; continue from a checkpoint; find a mistake in a listing before you run it.
#
# **You need** [04 Data parallelism](04_data_parallel.ipynb) and the table of stages in [06 ZeRO](06_zero.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(2)  # no dtlib? Kernel > Change Kernel

# %%
import json

from dtlib.lessons.l10 import figures, stage3
from dtlib.training.run import CONFIGS

# %%
# %%px
from tempfile import mkdtemp

import dtlib
import dtlib.deepspeed as deepspeed
import torch
from dtlib.training.run import train
from torch import nn
from torch.nn.functional import cross_entropy

world = dtlib.init()
comm = world.comm


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

# %% [markdown] tags=["half-day"]
# ## One config
#
# A config names the model and data (`workload`), the length (`run`), and the training settings, in the keys of
# DeepSpeed. A config need not contain the number of ranks: `train_batch_size` is the batch of all ranks together, here
# 64, or 32 on each of two ranks. The file is in `notebooks/configs`; `dtlib train vision --config FILE --ranks 2` in a
# terminal does the same as the cells below.

# %% tags=["half-day"]
vision = json.loads((CONFIGS / "vision.json").read_text())
print(json.dumps(vision, indent=1))

# %% [markdown]
# The net is that of many tutorials: 784 inputs, 128 hidden units, 10 outputs, for handwritten digits of 28 x 28 points.
# (The digits are scikit-learn's, of 8 x 8 points, enlarged: you need no download.)
#
# **Predict.** After thirty passes over the training data, it classifies 357 new digits. What fraction is right? (0 to
# 1)

# %% tags=["stub"]
lab.predict("accuracy-on-digits", None)

# %% tags=["solution"]
lab.predict("accuracy-on-digits", 0.97)

# %% [markdown] tags=["half-day"]
# While the ranks train, the output below the cell shows their progress, and draws the loss.

# %% tags=["half-day"]
# %%px
result = train("vision")
if comm.rank == 0:
    print(f"{result['steps']} steps on {result['ranks']} ranks, accuracy {result['accuracy']:.3f}")

# %%
figures.curves({"vision": lab.values("result")[0]}, title="784-128-10 on digits")

# %% [markdown]
# ## Change the stage
#
# The stage of ZeRO is one number in the config. `train` counts the bytes of parameters, gradients and optimizer states
# that a rank holds. The count is made in the second step, when all of these exist.
#
# **Predict.** On these two ranks, what fraction of the bytes of stage 0 does a rank hold at stage 3?

# %% tags=["stub"]
lab.predict("bytes-at-stage-3", None)

# %% tags=["solution"]
lab.predict("bytes-at-stage-3", 0.5)

# %%
# %%px
of_stage = {stage: train("vision", stage=stage, steps=40) for stage in range(4)}

# %% tags=["nbval-ignore-output"]
stages = lab.values("of_stage")[0]
figures.runs({f"stage {stage}": one for stage, one in stages.items()})

# %% tags=["statement"]
# "The loss stays the same, but the bytes held differ."
of = [row(f"stage {stage}", "ms per step") for stage in range(4)]
assert len({loss for loss, *_ in of}) == 1 and [held for *_, held, _ in of] == sorted((held for *_, held, _ in of), reverse=True)
assert of[3][2] == of[0][2] / 2

# %% [markdown]
# The loss stays the same, but the bytes held differ. Do not rank the stages by these times: in a model this small most
# of a step is messages and bookkeeping, and a second run may give another order. Stage 3 sends 1.5 times as much
# (lesson 06), but only a larger model or a slower link shows this.
#
# With `save=` a run writes checkpoints, and `resume=True` continues from the last one, here at another stage:

# %%
# %%px
folder = comm.broadcast_object(mkdtemp() if comm.rank == 0 else None)
train("vision", steps=20, save=folder)
rest = train("vision", stage=2, steps=40, save=folder, resume=True)
if comm.rank == 0:
    print(f"{len(rest['losses'])} more steps; last loss {rest['losses'][-1]:.4f},", end=" ")
    print(f"without a break {of_stage[0]['losses'][-1]:.4f}")

# %% tags=["statement"]
# "`resume=True` continues from the last one"
more, last, unbroken = found(r"(\d+) more steps; last loss ([\d.]+), without a break ([\d.]+)")
assert more == 40 - 20 and last == unbroken

# %% [markdown]
# ## Change the runtime
#
# `runtime="torch"` passes the same config to torch's own classes: `DistributedDataParallel`, `ZeroRedundancyOptimizer`,
# FSDP2, its pipelines. `runtime="deepspeed"` passes the config to DeepSpeed; the cell does this if DeepSpeed is
# installed. All run on our collectives here (`dtlib.backend`), so that a trace counts their bytes.
#
# **Predict.** How many curves do you get, `"one curve"` or `"several"`?

# %% tags=["stub"]
lab.predict("curves-of-runtimes", None)

# %% tags=["solution"]
lab.predict("curves-of-runtimes", "one curve")

# %%
# %%px
from importlib.util import find_spec

import dtlib.backend
from torch import distributed as dist

dist.init_process_group("dtlib", init_method="dtlib://")
runtimes = ["dtlib", "torch"] + ["deepspeed"] * (find_spec("deepspeed") is not None)
of_runtime = {name: train("vision", runtime=name, steps=40) for name in runtimes}

# %% tags=["nbval-ignore-output"]
figures.curves(lab.values("of_runtime")[0], title="one config, several runtimes")

# %% tags=["statement"]
# "They compute the same sums."
assert row("dtlib", "one config, several runtimes") == row("torch", "one config, several runtimes")

# %% [markdown]
# They compute the same sums. So runtimes differ only in bytes, memory and time. Some texts say "Horovod, DDP and
# DeepSpeed perform alike". We count at stage 3, where runtimes have most freedom, with a net of 932,362 parameters in
# float32, and AdamW.
#
# **Predict.** On two ranks, how many times the bytes of all parameters does a rank send in a step of stage 3? (Lesson 06:
# parameters are gathered twice, gradients reduced once; each sends (N - 1)/N of these bytes.)

# %% tags=["stub"]
lab.predict("sent-at-stage-3", None)

# %% tags=["solution"]
lab.predict("sent-at-stage-3", 1.5)

# %%
lab.read(stage3.counted)

# %%
# %%px
from dtlib.lessons.l10 import stage3

at_stage_3 = {name: stage3.counted(name) for name in runtimes}
times = at_stage_3["dtlib"]["sent"] / (4 * stage3.PARAMETERS)  # 4 bytes each

# %%
figures.at_stage_3(lab.values("at_stage_3")[0])

# %% tags=["statement"]
# "Three rows send 5.6 MB, 1.5 times the parameters."
ours, torchs, defaults, tuned = (row(name, "of a rank of two, at stage 3") for name in ("dtlib", "torch", "DeepSpeed, its defaults", "DeepSpeed, for this net"))
assert ours[0] == torchs[0] == tuned[0] == 5.6 and round(1.5 * 4 * 932_362 / 1e6, 1) == 5.6
# "sends 3.7 MB, and holds 2 GB"
assert defaults[0] == 3.7 and 2000 < defaults[1] < 2020 and 5e8 * 4 == 2e9
# "at the peak 20 MB against 11"
assert round(tuned[2]) == 20 and round(ours[2]) == round(torchs[2]) == 11

# %% [markdown]
# Three rows send 5.6 MB, 1.5 times the parameters. DeepSpeed with its defaults sends 3.7 MB, and holds 2 GB: its bucket
# for gradients has space for 500 million numbers, and parameters that it needs again soon stay whole after the forward
# pass. These defaults are for models a thousand times as large. With settings for this net it sends as much as the
# others, and holds more buffers: at the peak 20 MB against 11. **So read the defaults before you compare runtimes.**
#
# Time is different: on laptops it is mostly the cost of *small* messages and of bookkeeping. On GPUs, with large
# models, all three send these bytes through NCCL, NVIDIA's collectives. `python -m benchmarks training` measures times
# with intervals.

# %% [markdown]
# ## A small summariser
#
# The second model summarises. Its data are the documentation of more than fifty Python libraries. The description of a
# function is the article, and the line above the description is the *reference*. The model is a transformer of 2.6
# million parameters that can also copy words of the article. It is already trained on most of these libraries. We train
# it further on a library that it has not seen, for two minutes at most.
#
# This small model has every step of a real one: tokens, a start from a checkpoint, beam search, a measure. Its
# summaries are not good enough to replace the article.
#
# ROUGE-L, from 0 to 1, measures the longest common subsequence of words with the reference. Every model must beat the
# *lead*, the article's first sentence.
#
# **Predict.** On the test functions, which has the higher ROUGE-L: "model" or "lead"?

# %% tags=["stub"]
lab.predict("best-rouge", None)

# %% tags=["solution"]
lab.predict("best-rouge", "model")

# %%
# %%px
folder = comm.broadcast_object(mkdtemp() if comm.rank == 0 else None)
tuned = train("summarization", save=folder)
if comm.rank == 0:
    print(f"ROUGE-L {tuned['rouge_l']:.2f}, lead {tuned['lead_rouge_l']:.2f}")

# %% [markdown]
# A number is not enough: also read some summaries. From 24 test functions, here are the summary with the highest
# ROUGE-L, one in the middle, and the lowest:

# %%
# %%px
from dtlib.lessons.l10.reading import best_and_worst

three = best_and_worst(folder, comm)
if comm.rank == 0:
    print(three)

# %% tags=["statement"]
# "The best summary is the same as the human one. The middle one begins well and then goes wrong"
# "the worst has no word of the reference"
best, middle, worst = (found(f"{which} of 24, ROUGE-L ([\\d.]+)")[0] for which in ("Best", "Middle", "Worst"))
assert best > 0.7 > 0.5 > middle > 0.2 and worst == 0
assert count(r"Middle of 24(?:.*\n)+?Reference +(\w+)(?:.*\n)+?Model +\1") == 1

# %% [markdown]
# The best summary is the same as the human one. The middle one begins well and then goes wrong; the worst has no word
# of the reference. The mean of ROUGE-L shows none of this.
#
# **Discuss.** Which summary would you choose, and why? Which qualities does ROUGE not measure?
#
# ## Listings, corrected
#
# Some tutorials of these libraries have listings that cannot run. Once corrected, they run here with `import
# dtlib.deepspeed as deepspeed`. This listing should train by data parallelism, on two ranks. **Find** the mistake in
# each numbered line before you run the next cell, which has the corrected program.
#
#     print(deepspeed.comm.get_rank())                     # 1
#     net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10), nn.ReLU())     # 2
#     engine, _, _, _ = deepspeed.initialize(model=net, config={"train_batch_size": 64, ...})
#     for images, labels in train_loader:                  # 3
#         outputs = engine(images)                         # 4, of 64 images
#         engine.backward(outputs)                         # 5
#         engine.step()

# %%
# %%px
deepspeed.init_distributed()
labels, noise = torch.arange(1280) % 10, torch.Generator().manual_seed(0)
images = torch.randn(10, 784, generator=noise)[labels] + torch.randn(1280, 784, generator=noise)
data = torch.utils.data.TensorDataset(images, labels)
config = {
    "train_batch_size": 64,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 2},
}
engine, _, train_loader, _ = deepspeed.initialize(model=net(), config=config, training_data=data)
losses = []
for batch, classes in train_loader:
    loss = cross_entropy(engine(batch), classes)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if world.rank == 0:
    stage = engine.zero_optimization_stage()
    print(f"{engine.global_steps} steps, {len(batch)} rows per rank, ZeRO stage {stage};", end=" ")
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")

# %% tags=["statement"]
# "`train_batch_size` counts all ranks' samples"
assert found(r"(\d+) steps, (\d+) rows per rank, ZeRO stage (\d)") == [1280 / 64, 64 / 2, 2]
first, last = found(r"loss ([\d.]+) at first, ([\d.]+) at last")
assert last < first

# %% [markdown]
# These were the mistakes:
#
# 1. Ranks exist only after initialisation: first call `init_distributed()`, or `initialize`.
# 2. The last layer has ReLU: scores below 0 become 0, and their gradients too.
# 3. `train_loader` does not exist. `training_data=` makes `initialize` return one.
# 4. 64 rows on *every* rank make a batch of 128 on two ranks, but the config says 64: `train_batch_size` counts all
#    ranks.
# 5. `backward` needs a loss, one number; outputs are a table with ten scores for each row.
#
# Another listing cuts the model into stages, and then *calls* it: `outputs = engine(images)`. A rank of a pipeline
# has only some of the layers, so there is nothing to call: `train_batch` runs the schedule, a whole step.

# %%
# %%px
from dtlib.deepspeed.pipe import LayerSpec, PipelineModule

layers = [LayerSpec(nn.Linear, 784, 128), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 128, 10)]
model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.CrossEntropyLoss())
config = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}
engine, *_ = deepspeed.initialize(model=model, config=config, training_data=data)
losses = [engine.train_batch().item() for _ in range(10)]
try:
    engine(images)
except dtlib.DtlibError as sentence:
    if world.rank == 0:
        print(f"Loss {losses[0]:.2f}, after {len(losses)} steps {losses[-1]:.2f}. Wrong call:")
        print(sentence)

# %% tags=["statement"]
# "A rank of a pipeline has only some of the layers, so there is nothing to call: `train_batch` runs the schedule"
first, _, last = found(r"Loss ([\d.]+), after (\d+) steps ([\d.]+)")
assert count("A pipeline is not called on one micro-batch") == 1 and last < first

# %% [markdown]
# ## Which one for what?
#
# | you have | take |
# |---|---|
# | a model that fits on a GPU | torch's DDP: nothing to install, and the usual baseline |
# | a larger model | FSDP2, or DeepSpeed's stage 3 if you prefer a config file or need offload |
# | layers in a row, slow links | a pipeline: torch's, DeepSpeed's, Megatron-LM's |
# | an old script with `hvd.` | keep it, on `dtlib.horovod` or Horovod; write new scripts with torch |
# | a class, and laptops | dtlib |
#
# **Discuss.** Which line fits your own model, and why would you change?
#
# The tables for [torch](../../docs/reference/conformance/torch.md),
# [DeepSpeed](../../docs/reference/conformance/deepspeed.md) and [Horovod](../../docs/reference/conformance/horovod.md)
# list the same names and arguments, the differences, and the features that dtlib refuses.

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("10")

# %% [markdown]
# ## Summary
#
# - One config, any number of ranks, any runtime: the curve is the same. Choose by time and memory, measured on your model.
# - The stage changes memory and bytes sent, not the loss. At stage 3 runtimes send the same, but their peak memory
#   differs.
# - Compare a model's summaries with the lead, then read some.
# - `train_batch_size` counts all ranks' samples. A loss is one number. A pipeline is not called.
#
# Now the [exercises](../exercises/10_two_models_exercises.ipynb).
#
# ## References
#
# - J. Rasley et al.: DeepSpeed: system optimizations enable training deep learning models with over 100 billion
#   parameters. KDD, 2020.
# - A. Sergeev, M. Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow. arXiv:1802.05799, 2018.
# - S. Li et al.: PyTorch distributed. VLDB 13(12), 2020.
# - A. See et al.: Get to the point: summarization with pointer-generator networks. ACL, 2017.
# - C.-Y. Lin: ROUGE: a package for automatic evaluation of summaries. ACL workshop, 2004.
