# %% [markdown]
# # 05 Large batches: exercises
#
# Four exercises: *predict* (three minutes), *fix* a warm-up (five minutes), *build* the noise scale of a gradient (fifteen
# minutes) and an interval of paired differences (twenty minutes). A check looks at your answer and says what is wrong;
# check again for the next hint.
#
# **You need** the lecture [05 Large batches](../lectures/05_large_batches.ipynb). Answers:
# [solutions](../solutions/05_large_batches_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
from dtlib.workloads import digits

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# A model was trained on 8 ranks with 32 samples each, at rate 0.1. Now there are 128 ranks with 32 samples each.
#
# - Which rate does the linear rule give, and which rate does the square-root rule give?
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
# times as much in step `warmup_steps`, and stays there. The code runs, and the loss falls. But the rate is wrong in
# most of the steps. Fix it.

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
# No loss curve shows such a mistake, so print the rate itself:

# %%
# %%px
if world.rank == 0:
    print([round(warmup_settings(step, 4, 8)["lr"], 3) for step in (0, 1, 2, 3, 4, 5, 1000)])

# %% tags=["statement"]
# "the rate grows in a straight line from 0.02 in step 0 to k times as much in step `warmup_steps`, and stays there"
rates = found(r"\[([\d., ]+)\]", "0.055")
assert rates == [0.02, 0.055, 0.09, 0.125, 0.16, 0.16, 0.16]

# %% [markdown]
# ## Build: which batch is too large?
#
# Beyond the *critical batch* more samples hardly save steps. S. McCandlish et al. (2018) estimate it by the *noise
# scale*, from numbers that data parallelism computes anyway. Each of N ranks has the gradient of b samples. The mean of
# these gradients is the gradient of all B = N b samples. On average, the squared length of a gradient of n samples is
# `true + noise / n`. So two squared lengths determine the two unknowns:
#
# - `small`: the mean over ranks of the squared length of a rank's gradient (b samples each);
# - `large`: the squared length of the mean of the ranks' gradients (B samples);
# - `true = (B * large - b * small) / (B - b)` and `noise = (small - large) / (1 / b - 1 / B)`.
#
# Write `noise_scale(comm, gradient, samples)`, which returns `noise / true` on every rank. `gradient` is a flat tensor,
# the gradient of this rank's mean loss over `samples` samples; do not change its values. All ranks have the same number
# of samples. Use `dist.all_reduce(tensor, group=comm.group)`, which adds in place: once for the gradient, and once for
# its squared length.

# %% tags=["stub"]
# %%px
from torch import distributed as dist


def noise_scale(comm, gradient, samples):
    ...

# %% tags=["solution"]
# %%px
from torch import distributed as dist


def noise_scale(comm, gradient, samples):
    mean, small = gradient.clone(), gradient @ gradient
    dist.all_reduce(mean, group=comm.group)
    dist.all_reduce(small, group=comm.group)
    mean, small = mean / comm.size, small / comm.size
    large, b, B = mean @ mean, samples, comm.size * samples
    true, noise = (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)
    return (noise / true).item()

# %%
lab.check("noise-scale")

# %% [markdown]
# Now measure the noise scale. A net learns the digits, and after some epochs each rank computes its gradient on a third
# of the training images. Guess before you run: does the noise scale grow or shrink while the net learns?

# %%
# %%px
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

torch.manual_seed(0)
images, labels = digits.load()
images, labels = images[:1440].double(), labels[:1440]
net = torch.nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
mine, scales = slice(world.rank, None, world.size), {}
for epoch in range(11):
    if epoch in (0, 5, 10):
        loss = cross_entropy(net(images[mine]), labels[mine])
        own = torch.autograd.grad(loss, list(net.parameters()))
        scales[epoch] = noise_scale(world.comm, parameters_to_vector(own), len(labels[mine]))
    for some in torch.randperm(len(images)).split(16):
        sgd.zero_grad()
        cross_entropy(net(images[some]), labels[some]).backward()
        sgd.step()
if world.rank == 0:
    print("noise scale after 0, 5 and 10 epochs:", *(round(found) for found in scales.values()))

# %% tags=["statement"]
# "The noise scale grows: at first all images pull in the same direction, later each pulls in its own."
start, *later = found(r"after 0, 5 and 10 epochs: ([\d ]+)")
assert min(later) > 4 * start

# %% [markdown]
# The noise scale grows: at first all images pull in the same direction, later each pulls in its own. So late in
# training a larger batch does less harm, and some large runs increase the batch. (With `true` near 0 the estimate is
# useless: average over many steps.)
#
# ## Build: is a rule between the two better?
#
# The lecture compares the rates k^0.5 and k. What about k^0.75? The ranks train 32 networks with each of the three rules,
# at batch 256 (k = 16) and at batch 512 (k = 32). Networks of one seed share their images, their start and their order, so
# these runs are *paired*.
#
# **Predict.** Which of the three rules has the lowest mean error, at each batch? (Training takes up to a minute.)

# %% tags=["stub"]
lab.predict("best-of-three-rules", {256: None, 512: None})  # "k^0.5", "k^0.75" or "k"

# %% tags=["solution"]
lab.predict("best-of-three-rules", {256: "k", 512: "k^0.75"})

# %% tags=["nbval-ignore-output"]
# %%px
POWERS = {"k^0.5": 0.5, "k^0.75": 0.75, "k": 1.0}
seeds = range(world.rank, 32, world.size)


def test_errors(batch):
    """In %, one row per rule, a column per seed of this rank."""
    tasks = [digits.task(seed, epochs=20) for seed in seeds] * len(POWERS)
    rates = torch.tensor([0.02 * (batch / 16) ** power for power in POWERS.values() for _ in seeds])
    parameters = digits.train(tasks, batch, rates.expand(20 * 1280 // batch, -1))
    return 100 * digits.test_errors(parameters, tasks).view(len(POWERS), -1)


mine = {
    (batch, rule): row.tolist()
    for batch in (256, 512) for rule, row in zip(POWERS, test_errors(batch), strict=True)
}
dist.all_gather_object(every := [None] * world.size, mine, group=world.comm.group)
of_all_seeds = {run: [error for one in every for error in one[run]] for run in mine}

# %% tags=["nbval-ignore-output"]
errors = lab.values("of_all_seeds")[0]
runs = [(batch, rule) for batch in (256, 512) for rule in ("k^0.5", "k^0.75", "k")]
means = [(*run, f"{sum(errors[run]) / 32:.1f}") for run in runs]
lab.table(means, ("batch", "rule", "mean error (%)"))

# %% [markdown]
# Do these means differ for certain, or would other seeds reverse the order? Write `paired_interval(a, b)`:
#
# - `a[i]` and `b[i]` are the errors of two rules on one seed. There are at least three seeds.
# - Return `low, high, verdict`. `low` and `high` are the ends of the 95 % interval of the mean difference a - b: if the
#   experiment were repeated often with other seeds, 95 of 100 such intervals would contain the true difference.
# - `verdict` is `"not separated"` if 0 is in the interval; otherwise `"lower"` if a is lower than b, or `"higher"` if
#   it is higher.
#
# The mean difference is the middle of the interval. Half the width is the *standard error* of that mean times a
# quantile of Student's t, `stats.t.ppf(probability, degrees of freedom)`. You choose the probability, the degrees of
# freedom, and the numbers from which you compute the standard error. The next cell repeats an experiment 1,000 times:
# run it before you check.

# %% tags=["stub"]
import math
import statistics

from scipy import stats


def paired_interval(a, b):
    return 0.0, 0.0, "not separated"  # your lines here

# %% tags=["solution"]
import math
import statistics

from scipy import stats


def paired_interval(a, b):
    differences = [x - y for x, y in zip(a, b, strict=True)]
    n, middle = len(differences), statistics.mean(differences)
    half = stats.t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    low, high = middle - half, middle + half
    return low, high, "lower" if high < 0 else "higher" if low > 0 else "not separated"

# %%
import random

chance, covered = random.Random(0), 0
for _ in range(1000):  # of 5 seeds each, with a true difference of 1
    b = [chance.gauss(8, 3) for _ in range(5)]
    a = [error + 1 + chance.gauss(0, 0.8) for error in b]
    low, high, _ = paired_interval(a, b)
    covered += low <= 1 <= high
print(f"{covered} of 1,000 intervals hold the true difference; the aim is 95 %.")

# %%
lab.check("paired-interval")

# %% tags=["statement"]
# "95 of 100 such intervals would contain the true difference"
assert 930 <= found(r"([\d,]+) of 1,000 intervals")[0] <= 970

# %% [markdown]
# Now your function judges the three rules. First with 8 seeds, then with all 32:

# %% tags=["nbval-ignore-output"]
rows = []
for batch in (256, 512):
    for other in ("k^0.5", "k"):
        a, b = errors[batch, "k^0.75"], errors[batch, other]
        for seeds in (8, 32):
            low, high, verdict = paired_interval(a[:seeds], b[:seeds])
            rows.append((batch, other, seeds, f"{low:.1f} to {high:.1f}", verdict))
lab.table(rows, ("batch", "k^0.75 against", "seeds", "points", "k^0.75 is"))

a, b = errors[256, "k^0.75"], errors[256, "k^0.5"]
paired = statistics.variance(x - y for x, y in zip(a, b, strict=True))
apart = statistics.variance(a) + statistics.variance(b)
print(f"Without pairs this takes {apart / paired:.1f} times as many seeds.")

# %% tags=["statement"]
# "At batch 512 k^0.75 is lower than both other rules"
# "At batch 256 it lies between them"
# "Without pairs you would need more than twice as many seeds."
assert count(r"(?m)^ *512 .* 32 .*  lower$") == 2
square_root, between, linear = (numbers[-1] for numbers in rows("256", "mean error"))
assert square_root > between > linear
assert found(r"Without pairs this takes ([\d.]+) times")[0] > 2

# %% [markdown]
# At batch 512 k^0.75 is lower than both other rules: the linear rule is beyond its elbow there, and the square root is
# too cautious. At batch 256 it lies between them. Compare the lines with 8 seeds and with 32: fewer seeds separate
# less. An interval that ends near 0 says little, because these are four comparisons. Without pairs you would need more
# than twice as many seeds.
#
# ## If you have time
#
# - Which power of k is the best at batch 512? Try 0.6 and 0.9 on the same seeds. How many comparisons have you made now?
# - Add warm-up (`digits.train` takes a rate for each step). Is k^0.75 with warm-up separated from k^0.75 without?
# - Which rule would you try first with Adam, which divides a gradient by its own size?
