# %% [markdown]
# # C Keep only your share
#
# Nineteen minutes. Data parallelism keeps the same states on every rank. ZeRO gives each rank a shard of them. You count
# the bytes, and find a setting that fits. **Your turn**: make a model fit (five minutes).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [raw]
# 06_zero

# %% [raw]
# 06_zero_exercises

# %% [markdown]
# ## So far
#
# Stage 1 shards the optimizer's states, stage 2 the gradients too, stage 3 also the parameters. The result is the
# same. Stages 1 and 2 send what data parallelism sends, stage 3 half as much again.
