# %% [markdown]
# # B One sum, and data parallelism
#
# Fifty-five minutes. How ranks add by a ring and by a tree, and what it costs. Then the same sum, over gradients,
# trains one model on all of them. **Your turn**: mend an average (five minutes).

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

# %%
# %px comm = dtlib.reset().comm;

# %% [raw]
# 04_data_parallel

# %% [raw]
# 04_data_parallel_exercises

# %% [markdown]
# ## So far
#
# A ring sends the fewest bytes, a tree needs fewer rounds. Each rank computes gradients on its own rows, `all_reduce`
# averages them, and all take the same step. Buckets hide most of this communication behind the backward pass.
