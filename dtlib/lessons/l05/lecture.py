# %% [markdown]
# # 05 Large batches
#
# Forty-five minutes, a side topic. More ranks mean larger batches. You see how large batches change training, which
# rules repair this, where the rules break, and why a figure needs intervals.
#
# **Questions.** Which learning rate fits k times the batch? Up to which batch? Do large batches find worse networks?
#
# **Afterwards you can** scale a rate by the linear and the square-root rule, with warm-up; say where the linear rule
# fails and why; use an interval to distinguish a difference from noise.
#
# **You need** lesson 04: data parallelism averages the gradients of all ranks.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
from dtlib.training.rates import WarmupLR, linear_rule, square_root_rule
from dtlib.workloads import digits
from torch import distributed as dist
from torch import nn

world = dtlib.init()
group = world.comm.group
images, labels = digits.load()
images = images.double()
order = torch.randperm(1280, generator=torch.Generator().manual_seed(5))  # alike on all ranks


def net():
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers).double()


def batch_of(step):
    return order[256 * step % 1280 :][:256]

# %% [markdown] tags=["half-day"]
# ## Why batches grow
#
# A rank works efficiently if it has enough to do between two exchanges of gradients. So the number of samples *per
# rank* stays the same, and people add ranks: N ranks with b samples each take a step on a batch of N b, and an epoch
# has N times fewer steps.
#
# **Predict.** There are 1280 images, and 16 per rank. How many steps does an epoch take on 1 rank, and on 32?

# %% tags=["half-day", "stub"]
lab.predict("steps-of-an-epoch", {1: None, 32: None})

# %% tags=["half-day", "solution"]
lab.predict("steps-of-an-epoch", {1: 80, 32: 2.5})

# %% tags=["half-day"]
table = [(n, 16 * n, 20 * 1280 // (16 * n)) for n in (1, 4, 16, 24, 32)]
lab.table(table, ("ranks", "batch", "steps in 20 epochs"))

# %% tags=["statement"]
# "N ranks with b samples each take a step on a batch of N b, and an epoch has N times fewer steps"
assert row("1", "steps in 20")[1] == 16 * row("16", "steps in 20")[1]

# %% [markdown] tags=["half-day"]
# Fewer steps save time, but with fewer steps of the same rate, training makes less progress.

# %% [markdown]
# ## Ranks or one large batch: the same
#
# Does it matter that the batch is divided among ranks? Four ranks train on 64 images each. The learning rate grows from
# 0.02 to 0.32, a *warm-up*, explained below.

# %%
# %%px
config = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "SGD", "params": {"lr": 0.32, "momentum": 0.9}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.02, "warmup_max_lr": 0.32,
            "warmup_num_steps": 20, "warmup_type": "linear",
        },
    },
}
engine, *_ = dtlib.initialize(model=net(), config=config)
losses, used = [], []
for step in range(30):
    used += engine.get_lr()
    mine = batch_of(step)[world.rank :: world.size]  # 64 of the 256
    losses.append(engine.train_batch(iter([(images[mine], labels[mine])])).item())

# %% [markdown]
# Now one process with all 256 images per step, the same optimizer and schedule, in plain torch:

# %%
# %%px
alone = net()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.32, momentum=0.9)
scheduler = WarmupLR(optimizer, 0.02, 0.32, warmup_num_steps=20, warmup_type="linear")
losses_alone = []
for step in range(30):
    places = batch_of(step)
    loss = nn.functional.cross_entropy(alone(images[places]), labels[places])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses_alone.append(loss.item())

# %%
together, apart = lab.values("losses")[0], lab.values("losses_alone")[0]
used = lab.values("used")[0]
rows = [
    (step, f"{used[step]:.3f}", f"{together[step]:.6f}", f"{apart[step]:.6f}")
    for step in (0, 1, 2, 11, 21, 29)
]
headers = ("step", "rate", "loss, 4 ranks of 64", "loss, 1 process of 256")
lab.table(rows, headers)
assert max(abs(a - b) for a, b in zip(together, apart, strict=True)) < 1e-12
print("The losses of all 30 steps differ by less than 1e-12.")

# %% tags=["statement"]
# "N ranks are one process with N times the batch"
# "Why does the loss go up again?"
# "The learning rate grows from 0.02 to 0.32"
steps = [row(f"{step}", "loss, 4 ranks") for step in (0, 1, 2, 11, 21, 29)]
assert all(together == apart for _, together, apart in steps)
assert float(found(r"differ by less than (\d+e[-+]\d+)")[0]) <= 1e-12
assert steps[0][0] == 0.02 and steps[-1][0] == 0.32 and steps[-1][1] > 1.2 * steps[-2][1]
# the first two steps have the lowest rate
assert steps[0][0] == steps[1][0] < steps[2][0]

# %% [markdown]
# So ranks do not matter: N ranks *are* one process with N times the batch. Layers that look at the whole batch, such as
# BatchNorm, are the exception. Why does the loss go up again? At the full rate some steps overshoot.
#
# From here on each rank may train its own networks. Their batch is as large as that of N ranks.

# %% [markdown] tags=["half-day"]
# ## The rules
#
# k small steps with rate η move the parameters by η (g₁ + g₂ + ... + gₖ). One step with k times the batch moves them by
# η' (g₁ + ... + gₖ) / k, if the gradients have not changed much meanwhile. The two are equal for η' = k η: the **linear
# rule**. This holds only if the gradients change little.
#
# The **square-root rule** looks at noise: the mean of k times as many samples has a standard deviation √k times
# smaller, and a rate √k times larger compensates for this.
#
# **Predict.** The rate is 0.02 at batch 16. Which rates do the two rules give for batch 256?

# %% tags=["half-day", "stub"]
lab.predict("rates-at-256", {"linear": None, "square root": None})

# %% tags=["half-day", "solution"]
lab.predict("rates-at-256", {"linear": 0.32, "square root": 0.08})

# %% [markdown] tags=["half-day"]
# **Gradual warm-up** uses the linear rule's rate, but not from the beginning: at first gradients change quickly, and k
# small steps do not equal one large step. For five epochs the rate grows from η to k η in a straight line (P. Goyal
# et al., 2017). In torch: `lr_scheduler.LinearLR(optimizer, start_factor=1 / k, total_iters=steps)`.

# %%
# %%px
RATE, BASE, IMAGES, EPOCHS = 0.02, 16, 1280, 20


def flat(rate, batch):
    return torch.full((EPOCHS * IMAGES // batch,), rate)


def warmed_up(rate, batch):
    done = torch.arange(EPOCHS * IMAGES // batch) / (5 * IMAGES / batch)
    return RATE + (rate - RATE) * done.clamp(max=1)


RULES = {
    "no scaling": lambda batch: flat(RATE, batch),
    "square root": lambda batch: flat(square_root_rule(RATE, batch, BASE), batch),
    "linear": lambda batch: flat(linear_rule(RATE, batch, BASE), batch),
    "linear, warm-up": lambda batch: warmed_up(linear_rule(RATE, batch, BASE), batch),
}
schedules = {name: rule(256) for name, rule in RULES.items()}

# %%
from dtlib.lessons.l05 import figures as large_batches

large_batches.rates(lab.values("schedules")[0])  # for batch 256

# %% [markdown]
# ## Many networks at once
#
# The networks are small (64-64-64-10), and the data are scikit-learn's digits. One run proves nothing, so we train with
# 32 seeds for each batch and each rule. Networks with the same batch are trained together, stacked in one tensor. They
# share no parameters, so each gets its own gradient.

# %%
from dtlib.workloads import digits

lab.read(digits.forward, digits.losses)

# %% [markdown]
# A *seed* determines the 1280 training images (the other 517 are the test), the network's initial weights, and the
# order of the images. Runs of the same seed are *paired*. Every run has twenty epochs; a batch may begin in one epoch
# and end in the next. Each rank takes 8 of the 32 seeds.
#
# **Predict.** Batch 256 is 16 times the base. Which rule has the lowest test error: "no scaling", "square root" or
# "linear"? And at batch 512? (The run takes up to a minute.)

# %% tags=["stub"]
lab.predict("lowest-error", {256: None, 512: None})

# %% tags=["solution"]
lab.predict("lowest-error", {256: "linear", 512: "square root"})

# %% tags=["nbval-ignore-output"]
# %%px
BATCHES = (16, 64, 256, 384, 512)
seeds = range(world.rank, 32, world.size)


def test_errors(batch, rules):
    """In %, one row per rule, a column per seed of this rank."""
    tasks = [digits.task(seed, IMAGES, EPOCHS) for seed in seeds] * len(rules)
    schedules = [RULES[rule](batch) for rule in rules for _ in seeds]
    parameters = digits.train(tasks, batch, torch.stack(schedules, 1))
    return 100 * digits.test_errors(parameters, tasks).view(len(rules), len(seeds))


mine = {}
for batch in BATCHES:
    rules = list(RULES) if batch > BASE else ["no scaling"]  # k = 1: all rules are the same
    for rule, ended in zip(rules, test_errors(batch, rules), strict=True):
        mine[batch, rule] = ended.tolist()
dist.all_gather_object(every := [None] * world.size, mine, group=group)
of_all_seeds = {run: [error for one in every for error in one[run]] for run in mine}

# %% tags=["nbval-ignore-output"]
errors = lab.values("of_all_seeds")[0]
large_batches.errors(errors, base_batch=16)

# %% [markdown]
# A large mark is the mean over 32 seeds, with its 95 % interval. A small dot is one network; the grey band is batch 16.
#
# We say that two rules differ if the interval of their *paired* differences does not contain 0. Otherwise they are *not
# separated*, which does not mean equal. In sixteen such comparisons about one would look different by chance, so an
# interval that ends near 0 says little. The next cell prints sentences from the intervals:

# %% tags=["nbval-ignore-output"]
from dtlib.lessons.l05 import intervals

PAIRS = [
    ("square root", "no scaling"), ("linear", "square root"), ("linear, warm-up", "linear"),
]
for batch in (64, 256, 384, 512):
    print(f"Batch {batch}")
    for first, second in PAIRS:
        a, b = errors[batch, first], errors[batch, second]
        print("   ", intervals.compared(first, a, second, b))
    a, b = errors[batch, "linear"], errors[16, "no scaling"]
    print("   ", intervals.compared("linear", a, "batch 16", b))

# %% tags=["claim"]
# "At batch 384 and 512 the order has changed"
for batch in (256, 512):
    at = [errors[batch, rule] for rule in ("no scaling", "square root", "linear")]
    best, second, last = sorted(at, key=sum)  # and any two are separated
    assert intervals.difference(best, second)[2] < 0 and intervals.difference(second, last)[2] < 0

# %% tags=["statement"]
# "At this size warm-up has not been shown to help at any batch."
# "In sixteen such comparisons"
# "Both rules win much of that back, the linear rule more."
# "At batch 384 and 512 the order has changed: the linear rule is behind the square-root rule."
assert count("is (?:lower|higher) than|not separated") == 16
assert count(r"linear, warm-up (is|and)") == 4 and not count("linear, warm-up is lower than linear")


def at(batch, rule):
    return found(rf"{batch} \({batch // 16}\).*? {rule} ([\d.]+)", "interval of the mean")[0]


assert at(256, "no scaling") > at(256, "square root") > at(256, "linear")
assert all(at(batch, "linear") > at(batch, "square root") for batch in (384, 512))

# %% [markdown]
# At batch 256 there are a sixteenth of the steps, and without scaling a network makes less progress. Both rules win
# much of that back, the linear rule more. At batch 384 and 512 the order has changed: the linear rule is behind the
# square-root rule. The linear rule's **elbow** is somewhere between 256 and 384.
#
# ## The elbow
#
# What causes the elbow? Imagine a valley with curvature λ. A step of rate η along its steepest direction multiplies the
# distance from the bottom by 1 - η λ: for η above 2 / λ the distance grows. With momentum β the limit is 2 (1 + β) / λ.
# So a network has a largest rate, for any batch. `digits.sharpness` measures λ, the *sharpness*: the largest eigenvalue
# of the Hessian of the training loss. Here we measure it for batch 16, at the start and after one, three and ten
# epochs.

# %% tags=["nbval-ignore-output"]
# %%px
tasks = [digits.task(seed, IMAGES, EPOCHS) for seed in seeds[:4]]
on_the_way = []
for epochs in (0, 1, 3, 10):
    parameters = digits.train(tasks, BASE, torch.full((80 * epochs, len(tasks)), RATE))
    on_the_way.append(digits.sharpness(parameters, tasks, rounds=25).mean())
dist.all_reduce(on_the_way := torch.stack(on_the_way) / world.size, group=group)

# %% tags=["nbval-ignore-output"]
on_the_way = lab.values("on_the_way")[0].tolist()
rows = [
    (epochs, f"{sharp:.1f}", f"{2 * 1.9 / sharp:.2f}", f"{2 * 1.9 / sharp / 0.02:.0f}")
    for epochs, sharp in zip((0, 1, 3, 10), on_the_way, strict=True)
]
lab.table(rows, ("epochs", "sharpness", "largest rate", "k"))
smallest = 2 * 1.9 / max(on_the_way) / 0.02
print(f"By this argument the linear rule ends near k = {smallest:.0f}, batch {16 * smallest:.0f}.")

# %% tags=["statement"]
# "take it as a rough guide"
# "this network starts in a flat place and is steepest some epochs later"
assert row("0", "sharpness")[0] < row("1", "sharpness")[0] < row("3", "sharpness")[0] > row("10", "sharpness")[0]
k = found(r"ends near k = (\d+)")[0]
assert 8 < k < 64

# %% [markdown]
# The figure shows failure at smaller batches. The argument is about a parabola, so take it as a rough guide.
#
# ## Does warm-up help?
#
# At the elbow a mean says little: a network learns, or it does not. So we count. **A run has failed if it ends with a
# test error above 20 %.** The fraction of failures gets Wilson's interval.
#
# **Predict.** In how many of 32 runs does the linear rule fail at batch 512? An answer within 5 is right.

# %% tags=["stub"]
lab.predict("failed-at-512", None)

# %% tags=["solution"]
lab.predict("failed-at-512", 30)

# %% tags=["nbval-ignore-output"]
counts = {
    (batch, rule): (sum(error > 20 for error in errors[batch, rule]), 32)
    for batch in (64, 256, 384, 512) for rule in ("linear", "linear, warm-up")
}
large_batches.failures(counts)
assert intervals.rate(*counts[64, "linear"])[2] < intervals.rate(*counts[512, "linear"])[1]
print(intervals.rates_compared(
    "Batch 512", counts[512, "linear"], "batch 64", counts[64, "linear"]
), "(linear rule, no warm-up).")
for batch in (256, 384, 512):
    first, second = counts[batch, "linear, warm-up"], counts[batch, "linear"]
    sentence = intervals.rates_compared("with warm-up", first, "without warm-up", second)
    print(f"Batch {batch}: {sentence}")

# %% tags=["statement"]
# "Where a printed comparison says "not separated", warm-up has not been shown to help at this size."
assert count(r"Batch \d+: with warm-up and without warm-up: not separated") == 3

# %% [markdown]
# Near the elbow seeds differ so much that with five seeds warm-up could appear to help or to hurt. **Where a
# printed comparison says "not separated", warm-up has not been shown to help at this size.** Our guess: this
# network starts in a flat place and is steepest some epochs later, so a slow start only delays the trouble.

# %% [markdown]
# Warm-up did help ResNet-50 on ImageNet, with batch 8192 on 256 GPUs.

# %%
rows = [
    (row["table"], row["batch"], row["setting"], row["top1_error_pct"], row["sd"])
    for row in lab.published("goyal2017.csv")
]
title = "P. Goyal et al., arXiv:1706.02677: error in % on ImageNet, standard deviation of 5 runs"
lab.table(rows, ("table", "batch", "setting", "error", "sd"), title)

# %% tags=["statement"]
# "Gradual warm-up brings batch 8192 to within 0.14 points of batch 256 (standard deviation 0.12)"
# "without it, more than a point is lost"
# "constant warm-up (a small rate, then a jump) is worse than none"
goyal = {way: found(f"{way} +([\\d.]+) +([\\d.]+)", "Goyal") for way in ("small batch", "no warm-up", "constant warm-up", "gradual warm-up")}
assert round(goyal["gradual warm-up"][0] - goyal["small batch"][0], 2) == 0.14 and goyal["small batch"][1] == 0.12
assert goyal["no warm-up"][0] - goyal["gradual warm-up"][0] > 1
assert goyal["constant warm-up"][0] > goyal["no warm-up"][0]

# %% [markdown]
# Gradual warm-up brings batch 8192 to within 0.14 points of batch 256 (standard deviation 0.12); without it, more than a
# point is lost; *constant* warm-up (a small rate, then a jump) is worse than none.

# %% tags=["statement"]
# "From worst to best: none, square root, linear. Our digits agree up to batch 256."
errors = [found(f"2a 8192 {rule} +([\\d.]+)", "Goyal")[0] for rule in ("no scaling", "square root", "linear")]
assert errors == sorted(errors, reverse=True)

# %% [markdown]
# From worst to best: none, square root, linear. Our digits agree up to batch 256.
#
# ## The generalisation gap
#
# Another worry: with large batches, even networks that fit their training data perfectly are worse on *new* data, and
# lie in *sharper* valleys (N. S. Keskar et al., 2017). Accuracy in %; F1 is dense, on MNIST; C1 and C3 convolutional, on
# CIFAR-10 and CIFAR-100:

# %%
rows = [
    (r["network"], r["train_SB"], r["train_LB"], f"{r['test_SB']} ± {r['test_SB_sd']}",
     f"{r['test_LB']} ± {r['test_LB_sd']}")
    for r in lab.published("keskar2017_table2.csv")
]
headers = ("network", "train, small", "train, large", "test, small batch", "test, large batch")
title = "N. S. Keskar et al., arXiv:1609.04836, table 2 (small: 256; large: 10 % of the data; Adam)"
lab.table(rows, headers, title, align="lrrrr")

# %% tags=["statement"]
# "with large batches, even networks that fit their training data perfectly are worse on new data"
assert all(row(network, "Keskar")[2] > row(network, "Keskar")[4] for network in ("F1", "C1", "C3"))

# %% [markdown]
# On the plain digits the gap would be smaller than the noise, so we make the task hard. There are only 600 training
# images. A fifth of their labels are wrong, and a network can only memorise these. We compare batch 16 at rate 0.04
# with batch 600 (all images), once at the same rate and once at six times that rate. Each run continues until its
# training loss is 0.01, because sharpness falls with the loss. There are sixteen paired seeds.
#
# **Predict** the order of the three cases in test error, and in sharpness. Then run the cell; it takes up to a minute.

# %% tags=["nbval-ignore-output"]
# %%px
def fitted(batch, rate, epochs):
    """All seeds, trained to a loss of 0.01: test error in %, sharpness, training loss."""
    few = range(world.rank, 16, world.size)
    tasks = [digits.task(seed, train=600, epochs=epochs, noise=0.2) for seed in few]
    schedule = torch.full((600 * epochs // batch, len(tasks)), rate)
    parameters = digits.train(tasks, batch, schedule, until=0.01)
    series = {
        "error": 100 * digits.test_errors(parameters, tasks),
        "sharpness": digits.sharpness(parameters, tasks),
        "loss": digits.train_losses(parameters, tasks),
    }
    dist.all_gather_object(every := [None] * world.size, series, group=group)
    return {what: torch.cat([one[what] for one in every]).tolist() for what in series}


found = {
    "batch 16": fitted(16, rate=0.04, epochs=200),
    "batch 600, six times the rate": fitted(600, rate=0.24, epochs=3000),
    "batch 600, same rate": fitted(600, rate=0.04, epochs=3000),
}

# %% tags=["nbval-ignore-output"]
found = lab.values("found")[0]
large_batches.gap(found)  # a small dot is a network; the large mark is the mean

# %% tags=["nbval-ignore-output"]
names = ("batch 16", "batch 600, same rate", "batch 600, six times the rate")
small, same, six = (found[name] for name in names)
for what, unit in (("error", "points of test error"), ("sharpness", "in sharpness")):
    a, b, c = small[what], same[what], six[what]
    print(intervals.compared("Batch 600, same rate,", b, "batch 16", a, unit))
    print(intervals.compared("Batch 600, six times the rate,", c, "batch 16", a, unit))
    print(intervals.compared("Six times the rate", c, "the same rate", b, unit))

# %% tags=["claim"]
# "at the same training loss"
assert intervals.difference(same["sharpness"], small["sharpness"])[1] > 0
assert intervals.difference(same["error"], small["error"])[1] > 0
assert max(same["loss"] + six["loss"] + small["loss"]) < 0.02

# %% tags=["statement"]
# "batch 600 does worse on new images than batch 16, and lies in a sharper valley, at the same training loss"
runs = {run: row(run, "training loss") for run in ("batch 16", "batch 600, same rate", "batch 600, six times the rate")}
small = runs.pop("batch 16")
assert all(run[0] > small[0] and run[3] > small[3] and run[6] < 0.02 for run in runs.values())
assert count("is higher than batch 16 by") == 4

# %% [markdown]
# With wrong labels to memorise, batch 600 does worse on new images than batch 16, and lies in a sharper valley, at the
# same training loss. This does not prove that one causes the other: sharpness can change while a network's outputs stay
# the same (L. Dinh et al., 2017). **Discuss:** do Keskar's table and Goyal's contradict each other?
#
# ## Beyond SGD
#
# With Adam, which divides by the gradients' size, the square-root rule fits better (S. Malladi et al., 2022). LARS and
# LAMB give each layer its own rate, for batches of 32,768 and more. And every task has a *critical batch*: beyond this
# size, more samples hardly save steps (S. McCandlish et al., 2018). You estimate it in the exercises.

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("05")

# %% [markdown]
# ## Summary
#
# - N ranks are one process with N times the batch: the same losses, and N times fewer steps per epoch.
# - Linear rule: k times the batch, k times the rate. Square-root rule: √k times. Warm-up: begin at η, grow to k η.
# - The linear rule has an elbow: on a parabola a rate above 2 (1 + β) / λ diverges.
# - At this size warm-up has not been shown to help at any batch. For ResNet-50 at batch 8192 it gains a point.
# - One run proves nothing: pair seeds, and give intervals.
#
# Now the [exercises](../exercises/05_large_batches_exercises.ipynb).
#
# ## References
#
# - P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour. arXiv:1706.02677, 2017.
# - N. S. Keskar et al.: On large-batch training for deep learning: generalization gap and sharp minima. ICLR 2017.
# - L. Dinh et al.: Sharp minima can generalize for deep nets. ICML 2017.
# - S. McCandlish et al.: arXiv:1812.06162. S. Malladi et al.: arXiv:2205.10287. Y. You et al.: arXiv:1708.03888, 1904.00962.
# - E. B. Wilson: Probable inference, the law of succession, and statistical inference. JASA 22, 1927.
