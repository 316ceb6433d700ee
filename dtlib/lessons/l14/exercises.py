# %% [markdown]
# # 14 Capstone: exercises
#
# *Predict* (three minutes), *fix* a formula of memory (five minutes), *build* a function that chooses a mesh (fifteen
# minutes), and a race for the fastest plan (seven minutes, or longer). A check looks at your answer and says what is
# wrong; check again for the next hint.
#
# **You need** the lecture [14 Capstone: plan it, run it, explain it](../lectures/14_capstone.ipynb). Answers:
# [solutions](../solutions/14_capstone_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [markdown]
# ## Predict
#
# - There are 64 ranks, with float32 and Adam. How many bytes of model states does a rank hold for each parameter of the
#   model, with ZeRO-1? With ZeRO-3?
# - A pipeline has 4 stages and 8 micro-batches. How many turns does a step have?
# - The same batch is cut into 4 micro-batches. By what factor do the bytes grow that a rank sends in a step, with
#   ZeRO-1? With ZeRO-3?

# %% tags=["stub"]
lab.predict("bytes-a-parameter", {"ZeRO-1 on 64 ranks": None, "ZeRO-3 on 64 ranks": None})
lab.predict("turns-of-a-pipeline", None)
lab.predict("more-micro-batches", {"ZeRO-1": None, "ZeRO-3": None})

# %% tags=["solution"]
lab.predict("bytes-a-parameter", {"ZeRO-1 on 64 ranks": 8.125, "ZeRO-3 on 64 ranks": 0.25})
lab.predict("turns-of-a-pipeline", 11)
lab.predict("more-micro-batches", {"ZeRO-1": 1, "ZeRO-3": 4})

# %% [markdown]
# ## Fix: who shares what out
#
# `held` returns the bytes of model states on a rank, in float32 with Adam. The model's parameters divide evenly. On a
# mesh of data, tensor and pipe axes the result is too low. Fix it.

# %% tags=["stub"]
def held(parameters, data, tensor, pipe, zero):
    ranks = data * tensor * pipe
    own = parameters / (tensor * pipe)
    states = 8 * own / (ranks if zero >= 1 else 1)
    gradients = 4 * own / (ranks if zero >= 2 else 1)
    return 4 * own / (ranks if zero >= 3 else 1) + gradients + states

# %% tags=["solution"]
def held(parameters, data, tensor, pipe, zero):
    own = parameters / (tensor * pipe)
    states = 8 * own / (data if zero >= 1 else 1)
    gradients = 4 * own / (data if zero >= 2 else 1)
    return 4 * own / (data if zero >= 3 else 1) + gradients + states

# %%
lab.check("held-fix")

# %% [markdown]
# ## Build: choose a mesh
#
# `choose(plans, limit, sample, latency, bandwidth)` returns the name of the plan with the shortest step among the plans
# that fit, and None if no plan fits. `plans` maps a name to a dictionary:
#
# - `held`, bytes of model states of a rank; `samples`, samples of a micro-batch; `micro_batches`; `stages`, ranks that
#   divide the layers; `tensor`, ranks that divide each layer;
# - `messages` and `sent`, messages and bytes of a *step*; no two messages overlap.
#
# A turn takes `samples * sample / (stages * tensor)` seconds; a step has `micro_batches + stages - 1` turns.

# %% tags=["stub"]
def choose(plans, limit, sample, latency, bandwidth):
    return None  # your lines here

# %% tags=["solution"]
def choose(plans, limit, sample, latency, bandwidth):
    def seconds(plan):
        turns = plan["micro_batches"] + plan["stages"] - 1
        compute = turns * plan["samples"] * sample / (plan["stages"] * plan["tensor"])
        return compute + plan["messages"] * latency + plan["sent"] / bandwidth

    fitting = [name for name, plan in plans.items() if plan["held"] <= limit]
    return min(fitting, key=lambda name: seconds(plans[name]), default=None)

# %%
lab.check("choose-build")

# %% [markdown]
# ## The race: the fastest plan
#
# Write `my_plan()`, which returns the fields of your `Plan` for the task of the lecture: four ranks, 16 samples,
# 6,000,000 bytes. The check trains three steps with your plan, and counts the bytes that ranks hold and send. The check
# computes the seconds of a step by the formula of the lecture, as if each rank had its own core, with 20 ms per sample.
# Par is the lecture's `pipe 4`. `lab.scores()` keeps your best.
#
# Try plans here, as often as you like:

# %% tags=["stub"]
from dtlib.lessons.l14 import brief
from dtlib.planner import Plan

plan = Plan(data=4, zero=3, batch=16, micro_batch=4)  # yours
print(f"{1000 * brief.predicted(plan, sample=0.02):.0f} ms per step, {brief.held(plan):,} bytes")
print("messages", brief.messages(plan))
print("bytes   ", brief.sent(plan))

# %% tags=["solution"]
from dtlib.lessons.l14 import brief
from dtlib.planner import Plan

plan = Plan(pipe=4, batch=16, micro_batch=2)
print(f"{1000 * brief.predicted(plan, sample=0.02):.0f} ms per step, {brief.held(plan):,} bytes")
print("messages", brief.messages(plan))
print("bytes   ", brief.sent(plan))

# %% [markdown]
# Then submit your best plan:

# %% tags=["stub"]
# %%px
def my_plan():
    return {"data": 4, "zero": 3, "micro_batch": 4}  # yours

# %% tags=["solution"]
# %%px
def my_plan():
    return {"pipe": 4, "micro_batch": 2}

# %%
lab.check("capstone-race")

# %% [markdown]
# ## If you have time
#
# - Halve `brief.LATENCY`, then `brief.BANDWIDTH`, in the cell that tries plans: which mesh wins now?
# - Plan your own model: `lab.plan("config.json of transformers", gpus)`.
# - On a machine with four free cores, run the lecture's comparison again. Where are the pipelines now?
