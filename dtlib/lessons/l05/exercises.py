# %% [markdown]
# # 05 Large batches: exercises
#
# Three exercises: *predict* (three minutes), *fix* a warm-up (five minutes), *build* the rate of a step (twenty minutes). A
# check looks at your answer on all ranks and says what is wrong; check again for the next hint.
#
# **You need** the lecture [05 Large batches](../lectures/05_large_batches.ipynb). Answers:
# [solutions](../solutions/05_large_batches_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
from torch import nn

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# A model was trained on 8 ranks with 32 samples each, at rate 0.1. Now there are 128 ranks with 32 samples each.
#
# - Which rate does the linear rule give, which the square-root rule?
# - Warm-up takes 5 epochs of 1,228,800 samples. How many *steps* is that now?
#
# Replace each `None`.

# %% tags=["stub"]
lab.predict("rates-on-128-ranks", {"linear": None, "square root": None})
lab.predict("warm-up-steps", None)

# %% tags=["solution"]
lab.predict("rates-on-128-ranks", {"linear": 1.6, "square root": 0.4})
lab.predict("warm-up-steps", 1500)

# %% [markdown]
# ## Fix: a warm-up with one wrong number
#
# `warmup_settings` gives the settings of SGD in a step: the rate grows in a straight line from 0.02 in step 0 to k
# times as much in step `warmup_steps`, and stays there. It runs, the loss falls, nobody complains; and yet the rate is
# wrong in most of the steps. Fix it.

# %% tags=["stub"]
# %%px
def warmup_settings(step, warmup_steps, k):
    fraction = min(step, warmup_steps - 1) / warmup_steps
    return {"lr": 0.02 + 0.02 * (k - 1) * fraction, "momentum": 0.9}

# %% tags=["solution"]
# %%px
def warmup_settings(step, warmup_steps, k):
    fraction = min(step, warmup_steps) / warmup_steps
    return {"lr": 0.02 + 0.02 * (k - 1) * fraction, "momentum": 0.9}

# %%
lab.check("warmup-fix")

# %% [markdown]
# No loss curve shows such a mistake. The rate itself does, so print it:

# %%
# %%px
if world.rank == 0:
    print([round(warmup_settings(step, 4, 8)["lr"], 3) for step in (0, 1, 2, 3, 4, 5, 1000)])

# %% tags=["statement"]
# "the rate grows in a straight line from 0.02 in step 0 to k times as much in step `warmup_steps`, and stays there"
rates = found(r"\[([\d., ]+)\]", "0.055")
assert rates == [0.02, 0.055, 0.09, 0.125, 0.16, 0.16, 0.16]

# %% [markdown]
# ## Build: scale the rate
#
# Write `scaled_rate(rate, ranks, batch, base_batch, step, warmup_steps)`: the learning rate of a step.
#
# - `rate` is right for a batch of `base_batch` samples, over all ranks together.
# - Now there are `ranks` ranks, with `batch` samples *each*.
# - The linear rule gives the top. Gradual warm-up goes from `rate` in step 0 to the top in step `warmup_steps`, in a straight
#   line; from there on the rate is constant. `warmup_steps` may be 0: then there is no warm-up.

# %% tags=["stub"]
# %%px
def scaled_rate(rate, ranks, batch, base_batch, step, warmup_steps):
    return rate  # your lines here

# %% tags=["solution"]
# %%px
def scaled_rate(rate, ranks, batch, base_batch, step, warmup_steps):
    top = rate * ranks * batch / base_batch
    if step >= warmup_steps:
        return top
    return rate + (top - rate) * step / warmup_steps

# %%
lab.check("scale-the-rate")

# %% [markdown]
# Put it to use: three ranks with 64 digits each, starting from the rate 0.02 at batch 16. `LambdaLR` multiplies the
# optimizer's rate, 1 here, by what a function of the step returns.

# %%
# %%px
from dtlib.workloads import digits

images, labels = digits.load()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
sgd = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}
config = {"train_batch_size": 192, "optimizer": sgd}
engine, _, loader, _ = dtlib.initialize(
    model=net, config=config,
    training_data=torch.utils.data.TensorDataset(images[:1280], labels[:1280]),
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: scaled_rate(0.02, world.size, 64, 16, step, warmup_steps=30)
    ),
)
losses = [engine.train_batch().item() for _ in range(120)]
with torch.no_grad():
    error = (net(images[1280:]).argmax(1) != labels[1280:]).double().mean().item()

# %% tags=["nbval-ignore-output"]
losses, error = lab.values("losses")[0], lab.values("error")[0]
print(f"loss {losses[0]:.2f} in the first step, {losses[-1]:.2f} in the last")
print(f"test error {error:.1%}")
assert losses[-1] < losses[0] / 4
assert error < 0.2

# %% [markdown]
# ## If you have time
#
# - Give each rank twice as many samples (`train_batch_size` 384, `batch` 128). Which rate results, and is it beyond
#   the elbow?
# - In the lecture, try a rate *between* the two rules at batch 512: k to the power 0.75. Compare it on paired seeds.
# - Which rule would you try first with Adam, which divides a gradient by its own size? Try it, with several seeds.
