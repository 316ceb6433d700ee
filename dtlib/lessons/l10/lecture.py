# %% [markdown]
# # 10 Two real models
#
# Seventy-five minutes. Two models, one that reads digits and one that summarises texts, are trained by one config each:
# on our engines, on torch's classes and, where it is installed, on DeepSpeed.
#
# **Questions.** What does a config decide, and what not? Do the frameworks learn the same? Do they perform alike?
# Which one should you take?
#
# **Afterwards you can** train a model by a config, on any number of ranks and under any of three runtimes; read its
# loss, time and memory; go on from a checkpoint; find a mistake in a listing before you run it.
#
# **You need** [04 Data parallelism](04_data_parallel.ipynb) and the table of stages in [06 ZeRO](06_zero.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(2)  # no dtlib? Kernel > Change Kernel

# %%
import json

from dtlib.lessons.l10 import figures
from dtlib.training.run import CONFIGS

# %%
# %%px
from tempfile import mkdtemp

import dtlib
import dtlib.deepspeed as deepspeed
import torch
from dtlib.training.run import train
from torch import nn

world = dtlib.init()
comm = world.comm

# %% [markdown] tags=["half-day"]
# ## One config
#
# A config says which model and data (`workload`), how long (`run`), and how to train, in the keys of DeepSpeed. How many
# ranks there are it need not say: `train_batch_size` is that of all together, 32 images each on two ranks. The file is in
# `notebooks/configs`; `dtlib train vision --config FILE --ranks 2` in a terminal does the same as the cells below.

# %% tags=["half-day"]
vision = json.loads((CONFIGS / "vision.json").read_text())
print(json.dumps(vision, indent=1))

# %% [markdown]
# The net is the usual one of tutorials: 784 inputs, 128 hidden units, 10 outputs, for handwritten digits of 28 x 28
# points. (The digits are scikit-learn's, of 8 x 8 points, enlarged: nothing has to be downloaded.)
#
# **Predict.** What fraction of 357 digits that it has never seen does it get right, after thirty passes? (0 to 1)

# %% tags=["stub"]
lab.predict("accuracy-on-digits", None)

# %% tags=["solution"]
lab.predict("accuracy-on-digits", 0.97)

# %% [markdown] tags=["half-day"]
# While the ranks train, the output below the cell says how far they are, and draws the loss.

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
# The stage of ZeRO is one number in the config. `train` counts the bytes of parameters, gradients and optimizer
# states that a rank holds, in the second step, when all of them are there.
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
# "The loss does not move, the bytes do."
of = [row(f"stage {stage}", "ms a step") for stage in range(4)]
assert len({loss for loss, *_ in of}) == 1 and [held for *_, held, _ in of] == sorted((held for *_, held, _ in of), reverse=True)
assert of[3][2] == of[0][2] / 2

# %% [markdown]
# The loss does not move, the bytes do. Do not read an order into the times: in so small a model most of a step is messages
# and bookkeeping, and a second run may give another order. Stage 3 sends half as much again (lesson 06); it takes a larger model
# or a slower link to see that.
#
# With `save=` a run leaves checkpoints, and `resume=True` goes on from the last one, here at another stage:

# %%
# %%px
folder = comm.broadcast_object(mkdtemp() if comm.rank == 0 else None)
train("vision", steps=20, save=folder)
rest = train("vision", stage=2, steps=40, save=folder, resume=True)
if comm.rank == 0:
    print(f"{len(rest['losses'])} steps more; last loss {rest['losses'][-1]:.4f},", end=" ")
    print(f"of the run without a break {of_stage[0]['losses'][-1]:.4f}")

# %% tags=["statement"]
# "`resume=True` goes on from the last one"
more, last, unbroken = found(r"(\d+) steps more; last loss ([\d.]+), of the run without a break ([\d.]+)")
assert more == 40 - 20 and last == unbroken

# %% [markdown]
# ## Change the runtime
#
# `runtime="torch"` gives the same config to torch's own classes: `DistributedDataParallel`,
# `ZeroRedundancyOptimizer`, FSDP2, its pipelines. `runtime="deepspeed"` gives it to DeepSpeed; the cell does so where
# it is installed.
#
# **Predict.** What do you get, `"one curve"` or `"several"`?

# %% tags=["stub"]
lab.predict("curves-of-runtimes", None)

# %% tags=["solution"]
lab.predict("curves-of-runtimes", "one curve")

# %%
# %%px
from importlib.util import find_spec

runtimes = ["dtlib", "torch"] + ["deepspeed"] * (find_spec("deepspeed") is not None)
of_runtime = {name: train("vision", runtime=name, steps=40) for name in runtimes}

# %% tags=["nbval-ignore-output"]
figures.curves(lab.values("of_runtime")[0], title="one config, several runtimes")

# %% tags=["statement"]
# "They compute the same sums."
assert row("dtlib", "one config, several runtimes") == row("torch", "one config, several runtimes")

# %% [markdown]
# They compute the same sums. So only time and memory are left to compare. "Horovod, DDP and DeepSpeed perform alike",
# says a tutorial. We compare our engine, torch, and `dtlib.horovod`, which has Horovod's API (Horovod itself does not
# build for today's torch).
#
# **Predict.** Are their times per step here within a tenth of each other? Answer "yes" or "no".

# %% tags=["stub"]
lab.predict("perform-alike", None)

# %% tags=["solution"]
lab.predict("perform-alike", "no")

# %%
# %%px
import time
from statistics import median

import dtlib.horovod as hvd
from dtlib.training.initialization import initialize
from torch.nn.functional import cross_entropy

hvd.init()
chance = torch.Generator().manual_seed(world.rank)
x, y = torch.randn(32, 784, generator=chance), torch.randint(0, 10, (32,), generator=chance)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

# %% [markdown]
# Small differences need care: the three take turns, forty times, and the median counts.

# %%
# %%px
def by_engine(runtime):
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    config = {"train_micro_batch_size_per_gpu": 32, "optimizer": sgd}
    engine, *_ = initialize(model=net(), config=config, runtime=runtime)
    return lambda: engine.train_batch(iter([(x, y)]))


def by_horovod():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    sgd = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())

    def step():
        sgd.zero_grad()
        cross_entropy(model(x), y).backward()
        sgd.step()

    return step

# %%
# %%px
steps = {"Horovod's API": by_horovod(), **{name: by_engine(name) for name in ("dtlib", "torch")}}
times = {name: [] for name in steps}
for _ in range(40):
    for name, step in steps.items():
        comm.barrier()
        began = time.perf_counter()
        step()
        times[name].append(time.perf_counter() - began)
seconds = {name: median(some) for name, some in times.items()}

# %% tags=["nbval-ignore-output"]
medians = lab.values("seconds")[0]
lab.table([(name, f"{1e3 * one:.2f}") for name, one in medians.items()], ("", "ms a step"))

# %% [markdown]
# This proves little: a small model on one machine, with messages in shared memory, and neither Horovod itself nor
# DeepSpeed. What differs here is the cost of a *small* message and of bookkeeping. On GPUs, with large models, the
# three move the same bytes through the same NCCL, NVIDIA's collectives, and then the sentence is nearly true. With
# intervals: `python -m benchmarks training`.

# %% [markdown]
# ## A small summariser
#
# The second model summarises. Its data is the documentation of fifty-odd Python libraries: the description of a
# function is the article, the line above it the *reference*. The model is a transformer of 2.6 million parameters that
# can also copy words of the article. It is already trained on most of them. We train it further on one library that it
# has not seen, for two minutes at most.
#
# Though small, it goes through every step of a real one (tokens, a start from a checkpoint, beam search, a measure), in the
# minutes of a lesson. It is not good enough to read instead of the article.
#
# ROUGE-L, from 0 to 1, measures the longest common subsequence of words with the reference. The *lead*, the article's
# first sentence, is what every model must beat.
#
# **Predict.** On functions held out for the test, which has the higher ROUGE-L: "model" or "lead"?

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
# Numbers are one thing, reading is another. Of 24 held-out functions, here are the summary with the highest ROUGE-L, one
# in the middle, and the one with the lowest:

# %%
# %%px
from dtlib.lessons.l10.reading import best_and_worst

three = best_and_worst(folder, comm)
if comm.rank == 0:
    print(three)

# %% tags=["statement"]
# "At its best the model writes what a person has written. In the middle it begins well and loses its way"
# "at the worst no word is the reference's"
best, middle, worst = (found(f"{which} of 24, ROUGE-L ([\\d.]+)")[0] for which in ("Best", "Middle", "Worst"))
assert best > 0.7 > 0.5 > middle > 0.2 and worst == 0
assert count(r"Middle of 24(?:.*\n)+?Reference +(\w+)(?:.*\n)+?Model +\1") == 1

# %% [markdown]
# At its best the model writes what a person has written. In the middle it begins well and loses its way; at the worst
# no word is the reference's. The mean of ROUGE-L shows none of this.
#
# **Discuss.** Which summary would you take, and why? What does ROUGE not see?
#
# ## Listings, corrected
#
# Some tutorials of these libraries have listings that cannot run. With `import dtlib.deepspeed as deepspeed` they run
# here, once they are right. This one was meant to train by data parallelism, on two ranks. **Find** what is wrong with
# each numbered line, before you go on to the cell below: it is the program, corrected.
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
    print(f"{engine.global_steps} steps, {len(batch)} rows a rank, ZeRO stage {stage};", end=" ")
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")

# %% tags=["statement"]
# "`train_batch_size` counts all ranks"
assert found(r"(\d+) steps, (\d+) rows a rank, ZeRO stage (\d)") == [1280 / 64, 64 / 2, 2]
first, last = found(r"loss ([\d.]+) at first, ([\d.]+) at last")
assert last < first

# %% [markdown]
# What was wrong:
#
# 1. Ranks exist only after initialisation: first call `init_distributed()`, or `initialize`.
# 2. The last layer has ReLU: scores below 0 become 0, and their gradients too.
# 3. `train_loader` does not exist. `training_data=` makes `initialize` return one.
# 4. 64 rows on *every* rank are a batch of 128 on two ranks, but the config says 64: `train_batch_size` counts all
#    ranks.
# 5. `backward` needs a loss, one number; outputs are 64 x 10.
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
        print(f"Loss {losses[0]:.2f}, after {len(losses)} steps {losses[-1]:.2f}. And called:")
        print(sentence)

# %% tags=["statement"]
# "A rank of a pipeline has only some of the layers, so there is nothing to call: `train_batch` runs the schedule"
first, _, last = found(r"Loss ([\d.]+), after (\d+) steps ([\d.]+)")
assert count("A pipeline is not called on one micro-batch") == 1 and last < first

# %% [markdown]
# The same tutorials launch with `--num_nodes 2 --num_gpus 8` and speak of eight GPUs. `num_gpus` is per node: two times
# eight is sixteen. A config for more GPUs than there are is refused:

# %% tags=["nbval-ignore-output"]
# %%px
try:
    train("vision", {"train_batch_size": 64, "run": {"gpus": 16}})
except dtlib.DtlibError as sentence:
    if world.rank == 0:
        print("Refused:", sentence)

# %% [markdown]
# ## Which one for what?
#
# | you have | take |
# |---|---|
# | a model that fits on a GPU | torch's DDP: nothing to install, and it is what all others are compared with |
# | one that does not | FSDP2, or DeepSpeed's stage 3 where a config file and offload suit you better |
# | layers in a row, slow links | a pipeline: torch's, DeepSpeed's, Megatron-LM's |
# | an old script with `hvd.` | leave it, on `dtlib.horovod` or Horovod; write new ones with torch |
# | a class, and laptops | dtlib |
#
# **Discuss.** Which line is for your own model, and what would make you change?
#
# The tables for [torch](../../docs/reference/conformance/torch.md), [DeepSpeed](../../docs/reference/conformance/deepspeed.md) and
# [Horovod](../../docs/reference/conformance/horovod.md) say what has the same name and arguments, what differs, and what is
# refused.

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("10")

# %% [markdown]
# ## Summary
#
# - One config, any number of ranks, any runtime: the curve is the same. Choose by time and memory, measured on your model.
# - The stage moves memory, not the loss.
# - Compare a model's summaries with the lead, then read some.
# - `train_batch_size` counts all ranks. A loss is one number. A pipeline is not called.
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
