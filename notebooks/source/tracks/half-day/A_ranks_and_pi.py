# %% [markdown]
# # A Ranks, a sum, and pi
#
# Thirty-five minutes. You start four processes. They add numbers, hang, and recover. Then you estimate pi, first with a
# Python loop, then on many ranks, and learn to judge a speed-up.
#
# Run a cell with Shift+Enter, from top to bottom. **Your turn**: the first sum (three minutes).

# %% [raw]
# 00_start_here

# %%
import time

from dtlib import pi

# %% [raw]
# 02_pi

# %% [markdown]
# ## So far
#
# A *rank* is a process with a number, and shares no memory. Ranks work together by collectives. Point i is computed
# from i alone, so any rank can compute it, and no two ranks count the same point. A speed-up is measured against the
# best program on one rank, and ends at the number of cores.
