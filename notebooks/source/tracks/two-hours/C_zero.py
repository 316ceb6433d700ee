# %% [markdown]
# # C Keep only your share
#
# Twenty-two minutes. Data parallelism keeps the same states on every rank; ZeRO shards them. **Your turn**: make a
# model fit (five minutes).
#
# A cell that starts with `%%px --local` runs on the ranks and in the notebook.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch.optim import AdamW

from dtlib.lab import digits
from dtlib.lessons.l06 import figures
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import plain
from dtlib.parallel.zero.plain import Stage1
from dtlib.theory.zero import GB, SCHEMES, zero_bytes

# %% [raw]
# 06_zero

# %% tags=["statement"]
# "it sends three parts where the others send two: 1.5 times as much"
# "In a step with one micro-batch, stages 1 and 2 send as much as data parallelism."
from dtlib.theory.zero import zero_wire_elements

parts = [zero_wire_elements(4_000, 4, stage) / 3_000 for stage in range(4)]
assert parts == [2, 2, 2, 3]

# %% [markdown]
# Two keys are new. `gradient_accumulation_steps` cuts the batch into *micro-batches*, and adds their gradients;
# `gradient_clipping` limits the gradient's length. In a step with one micro-batch, stages 1 and 2 send as much as data
# parallelism. Stage 3 gathers each layer's parameters twice, for the forward and for the backward pass, so it sends
# three parts where the others send two: 1.5 times as much.

# %% [raw]
# 06_zero_exercises

# %% [markdown]
# ## So far
#
# Each stage shards more, and the result stays the same: take the lowest stage that fits.
