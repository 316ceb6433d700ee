# %% [markdown]
# # B One sum, and data parallelism
#
# Forty-five minutes. You see how ranks add by a ring, and what it costs. Then the same sum, over gradients, trains one
# model on all ranks. **Your turn**: fix an average (five minutes). If time is short, read the part on DDP at home.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch

world = dtlib.init()
comm = world.comm

# %% [raw]
# 03_collectives

# %% [raw]
# 04_data_parallel

# %% [raw]
# 04_data_parallel_exercises

# %% tags=["statement"]
# "Where a thread or a network card moves messages meanwhile, buckets hide most of this"
assert found(r"You predicted 5, and it came out as (\d)") == [5]

# %% [markdown]
# ## So far
#
# In a ring no rank sends more than twice the array ([lesson 03](03_collectives.ipynb) has its code, to read at home).
# Each rank computes gradients on its own rows, `all_reduce` averages them, and all take the same step. Where a thread
# or a network card moves messages meanwhile, buckets hide most of this communication behind the backward pass.
