# %% [markdown]
# # E Feed them, and train two models
#
# Fifteen minutes. Fast accelerators starve on slow input. Then a model that reads digits and one that sums up texts,
# by one config each.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(2)  # no dtlib? Kernel > Change Kernel

# %% [raw]
# 09_data_input

# %% [raw]
# 10_two_models

# %% [markdown]
# ## Afterwards
#
# The [start page](../../start.md) has all lessons and their exercises, clusters and faults among them.
