# %% [markdown]
# # D One model over two devices
#
# Eighteen minutes. The layers are cut into stages, and a batch into micro-batches, so that the stages work at the same
# time. **Your turn**: a schedule, level 1 (five minutes).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [raw]
# 07_pipelines

# %% [raw]
# 07_schedule_puzzle_exercises

# %% [markdown]
# ## So far
#
# A pipeline sends little and waits: with N stages and m micro-batches it is idle (N-1)/(m+N-1) of the time. More
# micro-batches make the bubble small.
