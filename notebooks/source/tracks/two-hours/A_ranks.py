# %% [markdown]
# # A Four ranks and a sum
#
# Fifteen minutes. Run cells with Shift+Enter, from the top. **Your turn**: the first sum (three minutes).

# %% [raw]
# 00_start_here

# %% [markdown]
# ## So far
#
# A *rank* is a process with a number. Ranks share no memory and work together through *collectives*. If one rank is
# missing, the others hang: press Stop, then run `%px dtlib.reset()`.
