# %% [markdown]
# # B Average the gradients
#
# Twenty-six minutes. How four ranks add numbers by a ring; and how the same sum, over gradients, trains one model on all
# of them. **Your turn**: mend an average (five minutes).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [raw]
# 03_collectives

# %% [markdown]
# The first half of the ring has a name of its own, `reduce_scatter`: each rank then holds one chunk of the sum. The
# second half is `all_gather`. You will meet both again.

# %% [raw]
# 04_data_parallel

# %% [raw]
# 04_data_parallel_exercises

# %% [markdown]
# ## So far
#
# Each rank computes gradients on its own rows, `all_reduce` averages them, and all take the same step: one model, as if
# one process had seen all rows. Averaging in buckets *during* the backward pass hides most of its time.
