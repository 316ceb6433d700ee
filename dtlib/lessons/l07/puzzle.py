# %% [markdown]
# # 07 The schedule puzzle
#
# Order the work of a pipeline by hand: 4 stages, one per rank, and 8 micro-batches. Levels 1 and 2 take fifteen minutes
# in all; level 3 takes longer. You need no engines before the duel at the end: a check simulates your order, draws it,
# and compares its time with par, the shortest possible time. At par your order passes; above par you see your score.
# Check again for the next hint. `dtlib browser` shows the same puzzle in a web page.
#
# **You need** the lecture [07 Pipelines](../lectures/07_pipelines.ipynb), up to GPipe's picture. Answers:
# [solutions](../solutions/07_schedule_puzzle_exercises.ipynb).

# %%
from dtlib import lab  # no dtlib? Kernel > Change Kernel

# %%
from dtlib.schedule import draw, gpipe, simulate

# %% [markdown] tags=["two-hours", "half-day"]
# ## The puzzle's rules
#
# - `F3` is the forward pass of micro-batch 3 and takes 1; `B3` is its backward pass and takes 2. Messages take no time.
# - A rank does one action at a time, in the order of its line, each as early as possible.
# - F needs F of the same micro-batch on the previous rank; B needs F on the same rank, and B on the next rank.
# - A rank keeps the activations from F to the end of B. The level limits the number of activations on a rank.

# %% [markdown]
# ## Predict: two stages, three micro-batches
#
# All forward passes run first, then all backward passes. When does the last action end? For how many micro-batches does
# rank 0 keep activations, at most? Use paper, then replace each `None`.

# %% tags=["stub"]
lab.predict("makespan-of-two-stages", None)
lab.predict("activations-of-two-stages", None)

# %% tags=["solution"]
lab.predict("makespan-of-two-stages", 3 * (1 + 2) + (1 + 2))
lab.predict("activations-of-two-stages", 3)

# %%
print(draw(simulate(gpipe(2, 3))))

# %% [markdown] tags=["two-hours", "half-day"]
# ## Level 1: at most 8 activations
#
# Write a line for each of four ranks, with 8 forward and 8 backward passes. `F0-3` stands for `F0 F1 F2 F3`. The check
# draws your order, and passes it at par, the shortest time possible.

# %% tags=["two-hours", "half-day", "stub"]
puzzle = """
F0 F1
F0
F0
F0
"""

# %% tags=["two-hours", "half-day", "solution"]
puzzle = """
F0-7 B0-7
F0-7 B0-7
F0-7 B0-7
F0-7 B0-7
"""

# %% tags=["two-hours", "half-day"]
lab.check("schedule-puzzle")

# %% tags=["statement"]
# "3 + 24 + 6"
assert found(r"Makespan (\d+), par (\d+); bubble \d+%; (\d+) activations") == [33, 3 + 24 + 6, 8]

# %% [markdown] tags=["two-hours", "half-day"]
# <details><summary>Why can no order be faster? (Open this when yours has passed.)</summary>
#
# The last rank has no work until the first micro-batch has passed three stages. Then it is busy for 8 times F and B.
# After that the last micro-batch needs three more backward passes: 3 + 24 + 6. GPipe's order has this makespan.
# </details>
#
# ## Level 2: at most 4 activations
#
# The same par, with half the memory.

# %% tags=["two-hours", "half-day", "stub"]
puzzle_2 = """
F0-3 B0
F0
F0
F0
"""

# %% tags=["two-hours", "half-day", "solution"]
puzzle_2 = """
F0-3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
F0-2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0-1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
F0   B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""

# %% tags=["two-hours", "half-day"]
lab.check("schedule-puzzle-2")

# %% tags=["statement"]
# "The same par, with half the memory."
assert found(r"Makespan (\d+), par (\d+); bubble \d+%; (\d+) activations") == [33, 33, 4]

# %% [markdown]
# Here the ranks keep 4, 3, 2 and 1 activations, and with 100 micro-batches they would keep no more. This order is called
# **1F1B**: after the start each rank does one forward, one backward. The library's list is the same, in another notation:

# %%
from dtlib.schedule import one_f_one_b

print(one_f_one_b(4, 8)[0])
print(simulate(one_f_one_b(4, 8)))

# %% tags=["statement"]
# "Here the ranks keep 4, 3, 2 and 1 activations"
assert found(r"peak activations (\d), (\d), (\d), (\d)") == [4, 3, 2, 1]

# %% [markdown]
# ## Level 3: at most 3 activations
#
# Rank 0 keeps an activation from F0 to the end of B0. This takes four F and four B, 12 in all. With three activations a
# rank does not have enough work for that time. How short can the makespan be? (1F1B with at most 3 activations takes
# 48. Par is 39.)

# %% tags=["stub"]
puzzle_3 = """
F0-2 B0
F0-2 B0
F0
F0
"""

# %% tags=["solution"]
puzzle_3 = """
F0-2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0-2 B0 B1 F3 B2 F4 F5 B3 B4 F6 B5 F7 B6 B7
F0-2 B0-2 F3 F4 B3 F5 B4 B5 F6 F7 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""

# %%
lab.check("schedule-puzzle-3")

# %% tags=["statement"]
# "No formula from a paper gives 39."
# "1F1B with at most 3 activations takes 48. Par is 39."
from dtlib.schedule import parse, simulate

assert found(r"Makespan (\d+), par (\d+); bubble \d+%; (\d+) activations") == [39, 39, 3]
capped = []
for stage in range(4):
    ahead = min(3 - stage, 2)
    order = [f"F{m}" for m in range(ahead)]
    for m in range(8):
        order += [f"F{m + ahead}"] * (m + ahead < 8) + [f"B{m}"]
    capped.append([parse(f"{stage}{action}") for action in order])
assert simulate(capped).makespan == 48

# %% [markdown]
# No formula from a paper gives 39. A search over all orders finds it, and a test of the library repeats the search.
#
# ## Level 4: the backward pass in two halves
#
# `I3` gives the gradient of the input, `W3` the gradients of the weights; each takes 1, and together they replace `B3`.
# The previous rank waits only for I. An activation is kept from F to the end of W. At most 4 activations.

# %% tags=["stub"]
puzzle_4 = """
F0-3 I0 W0
F0
F0
F0
"""

# %% tags=["solution"]
puzzle_4 = """
F0-3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
F0-2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
F0-1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
F0   I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4-7
"""

# %%
lab.check("schedule-puzzle-4")

# %% tags=["statement"]
# "no order takes less than 27"
# "Its idle time, 3 on each rank, is a third of 1F1B's"
assert found(r"Makespan (\d+), par (\d+); bubble (\d+)%; (\d+) activations") == [27, 3 + 24, 11, 4]
assert abs(3 / 27 - 0.111) < 0.001 and (27 - 24) / (33 - 24) == 1 / 3

# %% [markdown]
# The last rank waits for three forward passes and then has 24 units of work: no order takes less than 27. This is ZB-H1.
# Its idle time, 3 on each rank, is a third of 1F1B's, and every rank needs the memory of 1F1B's first rank.
#
# P. Qi, X. Wan, G. Huang and M. Lin, "Zero bubble pipeline parallelism", ICLR 2024.
#
# ## If you have time
#
# - Write an order in which ranks wait for each other in a circle, although each line looks right by itself. What does
#   the check report?
# - What is the shortest time with one activation? With two it is 51: can you find that order?
# - Let the backward pass take three times as long as the forward pass: `simulate(one_f_one_b(4, 8), backward=3)`. Is 1F1B
#   still as fast as GPipe? Is any order faster?

# %% [markdown]
# ## The duel
#
# Now each message takes half a forward pass, and nobody knows par. At most 4 activations; use `F` and `B`, or `F`, `I`
# and `W`. `duel.line` writes an order as one line, for the class to collect. (`lab.scores()` shows your best at the
# levels above.)

# %%
from dtlib.lessons.l07 import duel

duel.line("me", puzzle_2)

# %% [markdown]
# Paste everybody's lines below. Ann's order takes four micro-batches at a time, Ben's takes two.

# %%
four, two = "F0-3 B0-3 F4-7 B4-7", "F0-1 B0-1 F2-3 B2-3 F4-5 B4-5 F6-7 B6-7"
lines = f"""
Ann: {four} | {four} | {four} | {four}
Ben: {two} | {two} | {two} | {two}
"""
winner = duel.rank(lines, message=0.5)

# %% tags=["statement"]
# "Ann's order takes four micro-batches at a time, Ben's takes two."
assert row("Ann", "A message takes 0.5")[-1] == 4 and row("Ben", "A message takes 0.5")[-1] == 2

# %% [markdown]
# The winner beats the other player, but the library's two orders are faster. Is the ranking the same on ranks? Here the
# orders run, with EMULATED stages and network:

# %% tags=["nbval-ignore-output"]
lab.engines(4)
duel.run(winner)
