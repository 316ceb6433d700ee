# %% [markdown]
# # D Cut the model: pipelines and tensors
#
# Forty minutes. First you cut a model between its layers, into stages; then a single layer, by columns and rows.
# **Your turn**: two schedules (fifteen minutes).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dtlib.lab import digits, explorer
from dtlib.lessons.l07 import figures
from dtlib.schedule import draw, gpipe, one_f_one_b, simulate

# %% [raw]
# 07_pipelines

# %% [raw]
# 07_schedule_puzzle_exercises

# %% [markdown]
# ## 1F1B
#
# The usual order of level 2 is *1F1B* (PipeDream, 2019; DAPPLE, 2021). Backward passes begin as soon as possible, and
# then each rank alternates *one forward, one backward*. Rank r of p keeps p - r activations at most, for any number of
# micro-batches. Here it is beside GPipe:

# %%
both = {"GPipe": simulate(gpipe(4, 8)), "1F1B": simulate(one_f_one_b(4, 8))}
figures.picture(both)

# %% tags=["statement"]
# "Rank r of p keeps p - r activations at most"
# "The bubble is the same, the memory is not."
of_gpipe, eager = row("GPipe", "idle / makespan"), row("1F1B", "idle / makespan")
assert of_gpipe[:3] == eager[:3] and of_gpipe[3:] == [8] * 4 and eager[3:] == [4 - rank for rank in range(4)]

# %% [markdown]
# The bubble is the same, the memory is not. So large trainings run 1F1B or one of its descendants.

# %%
from dtlib.lessons.l08 import figures as tensor_figures

# %% [raw]
# 08_tensor_and_hybrid

# %% tags=["statement"]
# "A pipeline sends little, and waits"
# "Tensor parallelism has no bubble, but sends much"
tensor, data, pipe = (row(axis, "relative to the least")[-1] for axis in ("tensor", "data", "pipe"))
assert tensor > data > pipe == 1

# %% [markdown]
# ## So far
#
# A pipeline sends little, and waits: more micro-batches make the bubble small. Tensor parallelism has no bubble, but
# sends much, and every layer waits for it: it stays within a machine.
