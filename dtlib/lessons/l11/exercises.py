# %% [markdown]
# # 11 Beyond one machine: exercises
#
# Three exercises: *predict* (two minutes), *fix* a table of efficiencies (five minutes), and *build* a model that says how
# long a step takes on any number of ranks (twenty-five minutes).
#
# **You need** the lecture [11 Beyond one machine](../lectures/11_beyond_one_machine.ipynb). Answers:
# [solutions](../solutions/11_beyond_one_machine_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# - 5 % of a program's time is serial. How many times as fast can it become, with as many ranks as you like?
# - 512 GPUs run at 90 % efficiency for an hour. How many minutes would one GPU alone need for one GPU's share of that hour?
#
# Replace each `None`.

# %% tags=["stub"]
lab.predict("limit-of-amdahl", None)
lab.predict("minutes-of-an-hour", None)

# %% tags=["solution"]
lab.predict("limit-of-amdahl", 20)
lab.predict("minutes-of-an-hour", 54)

# %% [markdown]
# ## Fix: a table of efficiencies
#
# Somebody measured seconds on several numbers of ranks, and computes efficiencies from them. The function is right
# for the one table that it was tried on: strong scaling that begins at one rank. Published tables often begin at 8
# GPUs, a node, and many show weak scaling: each rank keeps the same work, on few ranks and on many.
#
# Fix it. `seconds` maps ranks to seconds, in any order; `kind` is `"strong"` or `"weak"`. The smallest number of ranks
# in the table counts as 100 %. Return a dictionary of ranks and efficiencies, as fractions with all their
# digits.

# %% tags=["stub"]
# %%px
def efficiency(seconds, kind):
    first = min(seconds)
    return {n: seconds[first] / (n * took) for n, took in seconds.items()}

# %% tags=["solution"]
# %%px
def efficiency(seconds, kind):
    first = min(seconds)
    ideal = {n: first / n if kind == "strong" else 1 for n in seconds}
    return {n: seconds[first] * ideal[n] / took for n, took in seconds.items()}

# %%
lab.check("efficiency-fix")

# %% [markdown]
# ## Build: how long does a step take?
#
# Before you ask for a thousand GPUs, you want to know what they will bring. Write a model of a step of data
# parallelism on `ranks` ranks, a power of two: every rank computes for `compute` seconds; then an all-reduce of
# `count` bytes averages the gradients, by the cheapest of three algorithms. No communication is hidden behind
# computing.
#
# A message of m bytes takes `latency + m / bandwidth` seconds. Adding costs nothing. On N ranks and n bytes:
#
# - the *ring* has 2 (N - 1) rounds, each with an N-th of the bytes;
# - *recursive doubling* has log2 N rounds, each with all the bytes;
# - *Rabenseifner's* has 2 log2 N rounds, and sends the ring's bytes in all, 2 n (N - 1) / N.
#
# One rank computes, and sends nothing. Return the seconds of a step.

# %% tags=["stub"]
# %%px
from math import log2

def step_seconds(ranks, compute, count, latency, bandwidth):
    ...

# %% tags=["solution"]
# %%px
from math import log2

def step_seconds(ranks, compute, count, latency, bandwidth):
    if ranks == 1:
        return compute
    ring = 2 * (ranks - 1) * (latency + count / ranks / bandwidth)
    doubling = log2(ranks) * (latency + count / bandwidth)
    halving = 2 * log2(ranks) * latency + 2 * count * (ranks - 1) / ranks / bandwidth
    return compute + min(ring, doubling, halving)

# %%
lab.check("step-model-build")

# %% [markdown]
# Now ask your model what you would ask a cluster. A model of 25 million parameters has gradients of 100 MB; a rank
# computes for 0.2 seconds; messages take 5 µs and travel at 12.5 GB/s.

# %%
# %%px
if world.rank == 0:
    for n in (1, 8, 64, 512, 4096):
        seconds = step_seconds(n, 0.2, 100e6, 5e-6, 12.5e9)
        print(f"{n:5} ranks: {1e3 * seconds:.1f} ms a step, efficiency {0.2 / seconds:.0%}")

# %% tags=["statement"]
# "That is weak scaling: each rank keeps its batch."
assert [found(f" {n} ranks: [\\d.]+ ms a step, efficiency (\\d+)%")[0] for n in (8, 64, 512, 4096)] == [93] * 4

# %% [markdown]
# That is weak scaling: each rank keeps its batch. The model is kinder than clusters are: nobody else uses this
# network, and no rank is ever late.
#
# ## If you have time
#
# - Strong scaling: give each rank 0.2 / N seconds of computing. From which N on do more ranks make a step *longer*?
# - Let `hidden` seconds of the all-reduce go on while a rank computes, as with buckets. How many ranks keep 95 %
#   then?
# - Send the gradients as 16-bit numbers. What does that bring on 8 ranks, and what on 4,096?
