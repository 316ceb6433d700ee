# %% [markdown]
# # A Ranks, a sum, and pi
#
# Thirty-five minutes. You start four processes, let them add, make them hang, and bring them back. Then you estimate
# pi with them, from a Python loop to many ranks, and see what a speed-up is worth.
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
# from i alone, so any rank can compute it, and no two ranks count the same one. A speed-up is measured against the best
# program on one rank, and ends where the cores end.
