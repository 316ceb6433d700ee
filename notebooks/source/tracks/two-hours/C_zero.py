# %% [markdown]
# # C Keep only your share
#
# Nineteen minutes. Data parallelism keeps the same states on every rank; ZeRO shares them out. **Your turn**: make a
# model fit (five minutes).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch.optim import AdamW

from dtlib.lab import digits
from dtlib.lab.lessons.l06 import figures
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import plain
from dtlib.parallel.zero.plain import Stage1
from dtlib.theory.zero import GB, SCHEMES, zero_bytes

# %% [raw]
# 06_zero

# %% [raw]
# 06_zero_exercises

# %% [markdown]
# ## So far
#
# Each stage shards more, and the result is the same. Stages 1 and 2 send what data parallelism sends, stage 3 sends
# half as much again.
