# %% [markdown]
# # E Two models by one config
#
# Seven minutes, most of them the machine's. A model that reads digits and one that sums up texts train on two ranks by
# one config each.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(2)  # no dtlib? Kernel > Change Kernel

# %% [raw]
# 10_two_models

# %% [markdown]
# ## Afterwards
#
# The schedule puzzle's second level, [lesson 02](../../lectures/02_pi.ipynb) on pi and speed-up, and the
# [start page](../../start.md).
