# %% [markdown]
# # A Four ranks and a sum
#
# Sixteen minutes. You start four processes, run a line of Python on all of them, let them add, bring them to a halt and
# back, and throw darts with them.
#
# Run a cell with Shift+Enter, from top to bottom. **Your turn**: the first sum (three minutes).

# %% [raw]
# 00_start_here

# %% [markdown]
# ## So far
#
# A *rank* is a process with a number, and shares no memory. Ranks work together by collectives: `all_reduce` gives all
# of them the sum. If one rank does not come, the others hang. Press Stop, then `%px dtlib.reset()`.
