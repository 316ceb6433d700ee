# %% [markdown]
# # C Large batches, and less memory
#
# Forty-five minutes. More ranks make larger batches: which learning rate do they need? Then ZeRO, which gives each
# rank a shard of the model states. **Your turn**: make a model fit (five minutes).
#
# A cell that starts with `%%px --local` runs on the ranks and in the notebook.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch import nn
from torch.optim import AdamW

from dtlib import lab
from dtlib.lab import digits
from dtlib.lessons.l06 import figures
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import plain
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.theory.zero import GB, SCHEMES, zero_bytes

# %% [raw]
# 05_large_batches

# %% [markdown]
# Every rule ends somewhere: beyond some batch the linear rule's rate is more than the network bears, and runs fail.
# [Lesson 05](../../lectures/05_large_batches.ipynb) shows where, on 32 seeds.

# %% [raw]
# 06_zero

# %% [raw]
# 06_zero_exercises

# %% tags=["statement"]
# "the result is the same"
assert len({row(f"Stage{stage}", "all_gathers per step")[0] for stage in (1, 2, 3)}) == 1

# %% [markdown]
# ## So far
#
# A larger batch needs a larger learning rate, up to a point. Stage 1 shards the optimizer's states, stage 2 the
# gradients too, stage 3 also the parameters; the result is the same.
