# %% [markdown]
# # D Cut the model: pipelines and tensors
#
# Thirty-five minutes. First you cut a model between its layers, into stages; then a single layer, by columns and
# rows. **Your turn**: a schedule, level 1 (five minutes).

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
from dtlib.lab.lessons.l07 import figures
from dtlib.schedule import draw, formulas, gpipe, one_f_one_b, simulate

# %% [raw]
# 07_pipelines

# %% [raw]
# 07_schedule_puzzle_exercises

# %%
from dtlib.lab.lessons.l08 import figures

# %% [raw]
# 08_tensor_and_hybrid

# %% [markdown]
# ## So far
#
# A pipeline sends little, and waits: more micro-batches make the bubble small. Tensor parallelism has no bubble, but
# sends much, and every layer waits for it: it stays within a machine.
