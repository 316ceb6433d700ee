# %% [markdown]
# # E Feed them, and train by a config
#
# Twenty minutes, then the quiz. Two ranks are enough here, so the first cell starts new ones. Fast accelerators starve
# on slow input: you see one starve, and learn how to prevent it. Then one file with the keys of DeepSpeed trains a
# model that reads digits. One page shows which cut suits which model.
#
# **Questions.** How many bytes per second does a model need? What is in a config? Which cut is for your own model?

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(2)  # no dtlib? Kernel > Change Kernel

# %%
import json
import tempfile
from pathlib import Path

from dtlib.storage import Loader, mlperf, open_samples, page_cache, write
from dtlib.storage.utilisation import EmulatedAccelerator, measure
from dtlib.training.run import CONFIGS

lab_folder = tempfile.TemporaryDirectory(prefix="dtlib-09-")
folder = Path(lab_folder.name)

# %%
# %%px
import dtlib
from dtlib.training.run import train

world = dtlib.init()
comm = world.comm

# %% [raw]
# 09_data_input

# %% tags=["statement"]
# "The fast one waits for most of its time"
assert found(r"fast accelerator: AU (\d+)%")[0] < 50

# %% [markdown]
# The fast accelerator waits most of the time: you paid for ten times the speed, and get far fewer than ten times the
# samples. One remedy is *prefetch*: a thread reads the next batches while this one computes.
#
# **Guess.** Which accelerator does prefetch help more?

# %% tags=["nbval-ignore-output"]
for name, seconds in (("slow accelerator", 0.06), ("fast accelerator", 0.006)):
    print(f"{name}, two batches ahead: {fed(shards, large, compute=seconds, prefetch=2)}")

# %% tags=["statement"]
# "the fast accelerator computes too little to hide much"
slow, fast = (found(f"{which} accelerator, two batches ahead: AU (\\d+)%")[0] for which in ("slow", "fast"))
assert fast < 50 < slow

# %% [markdown]
# Prefetch hides reading behind computing, and the fast accelerator computes too little to hide much: it needs faster
# storage. [Lesson 09](../../lectures/09_data_input.ipynb) measures other formats, workers, and a local copy.

# %% [raw]
# 10_two_models

# %% [markdown]
# ## Which cut, when?
#
# The chart asks questions about the cuts of this half-day and two more. Read it from top to bottom. If the answer is
# yes, move right. If it is no, or not enough, move down. Discuss for two minutes with your neighbour: a model of 13
# billion parameters, mixed-precision Adam, eight GPUs of 80 GB in one machine (a *node*). What is your answer to the
# first question, and where do you stop?

# %%
lab.chart()

# %% [markdown]
# 16 bytes per parameter make 208 GB: no GPU holds that. With ZeRO-1 a GPU holds 52 + 156/8 = 72 GB, and has 8 left for
# activations; with ZeRO-2 it holds 26 + 182/8 = 49 GB. So stop at ZeRO-2, if 31 GB are enough for the activations: with
# one micro-batch per step it sends no more than data parallelism. Then answer the same questions for your own model.

# %% [markdown]
# ## Quiz
#
# Answer six questions alone. Each answer is explained.

# %% tags=["nbval-ignore-output"]
lab.quiz("half-day")

# %% [markdown]
# ## Afterwards
#
# The [start page](../../start.md) has all lessons and their exercises: [two real models](../../lectures/10_two_models.ipynb)
# under three runtimes, clusters, and faults among them.
