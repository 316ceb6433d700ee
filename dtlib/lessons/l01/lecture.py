# %% [markdown]
# # 01 Why distribute
#
# Forty-five minutes. People spread training over many processors because a model does not fit on one, or because
# training on one takes too long. You compute both, see four ways to divide the work, and put nineteen claims on trial.
#
# **Questions.** What is too large, and what too slow? In how many ways can training be divided? Which numbers can you
# believe?
#
# **Afterwards you can** estimate the memory and the time of a training run on the back of an envelope; name the kinds
# of parallelism, who built them, and what each rank holds; find what is wrong with a published number.
#
# **You need** [00 Start here](00_start_here.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
from dtlib.lessons.l01 import claims, figures

# %% [markdown]
# ## What does not fit
#
# Training with Adam, the usual optimizer, in mixed precision keeps 16 bytes per parameter: the parameter and its
# gradient in 16 bits each; a master copy and two running means in 32 bits each. GPT-3 has 175 billion parameters; an
# accelerator has 80 GB.
#
# **Predict.** How many accelerators does it take just to *hold* that, before any *activations* (what a layer keeps for
# the backward pass)? Replace `None`.

# %% tags=["stub"]
lab.predict("gpus-for-the-states", None)

# %% tags=["solution"]
lab.predict("gpus-for-the-states", 35)

# %% [markdown]
# ## What takes too long
#
# A language model with P parameters needs about 6 P operations for each *token* (a word or a piece of one) that it
# trains on: 2 P forward, twice that backward. GPT-3 read 300 billion tokens. On paper an A100, a GPU, does 312 TFLOP/s
# (10¹² operations per second) in 16 bits; in practice it does 45 % of that, when all goes well.
#
# **Predict.** How many years would one A100 need?

# %% tags=["stub"]
lab.predict("years-on-one-gpu", None)

# %% tags=["solution"]
lab.predict("years-on-one-gpu", 71)

# %% [markdown]
# We can check the rule of 6 P where both sides of it are published:

# %%
models = lab.published("models.csv")
rows = []
for row in models:
    if row["tokens_billion"] and row["training_flops"]:
        rule = 6 * float(row["parameters_billion"]) * 1e9 * float(row["tokens_billion"]) * 1e9
        rows.append((row["model"], f"{rule:.2e}", row["training_flops"]))
lab.table(rows, ("model", "6 x parameters x tokens", "published operations"))

# %% tags=["claim"]
# "We can check the rule of 6 P where both sides of it are published"
assert all(abs(float(rule) / float(published) - 1) < 0.02 for _, rule, published in rows)

# %% [markdown]
# ## How it grows
#
# Two claims from a lecture of 2023: the compute of the largest runs doubles every 3.5 months, and language models get
# ten times larger every year. We draw them **as claimed**, from the first model in each series, beside what was
# published. From which year on do the line and the dots part?

# %%
compute = {}
for row in models:
    if row["tokens_billion"]:
        rule = 6 * 1e9 * float(row["parameters_billion"]) * 1e9 * float(row["tokens_billion"])
        compute[row["model"]] = float(row["year"]), rule
    elif row["training_flops"]:
        compute[row["model"]] = float(row["year"]), float(row["training_flops"])
doubling = {2012.75 + months / 12: 5.0e17 * 2 ** (months / 3.5) for months in range(0, 145, 12)}
figures.growth(compute, {"doubling every 3.5 months": doubling}, "operations of the training run")

# %%
sizes = {
    row["model"]: (float(row["year"]), 1e9 * float(row["parameters_billion"]))
    for row in models if row["parameters_billion"] and float(row["year"]) > 2018
}
tenfold = {2018.8 + months / 12: 0.34e9 * 10 ** (months / 12) for months in range(0, 73, 6)}
figures.growth(sizes, {"ten times a year": tenfold}, "parameters")

# %% [markdown]
# **Predict.** Had the doubling gone on until Llama 3.1 405B was released, by how many powers of ten would that run have been
# larger than it was?

# %% tags=["stub"]
lab.predict("zeros-too-many", None)

# %% tags=["solution"]
lab.predict("zeros-too-many", 4.3)

# %% tags=["statement"]
# "Since 2020 the data have grown more than the models: 300 billion tokens became 15,600 billion."
llama, gpt3 = found(r"Llama 3.1 405B +([\d.e+]+)", "parameters"), found(r"GPT-3 +([\d.e+]+)", "parameters")
assert 1 < llama[0] / gpt3[0] < 15_600 / 300

# %% tags=["statement"]
# "The compute leaves its line between 2018 and 2020, and stays far below it."
# "GPT-3 lies thirteen times above it"
# "In 2022 PaLM is at half of it; later models lie far below."
first, later = found(r"AlphaGo Zero +([\d.e+]+)", "operations")[0], found(r"GPT-3 +([\d.e+]+)", "operations")[0]
doubled = [5e17 * 2 ** (12 / 3.5 * (year - 2012.75)) for year in (2017.8, 2020.4)]  # months as in models.csv
assert 1 / 2 < doubled[0] / first < 2 and doubled[1] / later > 100
near, far = found(r"PaLM +([\d.e+]+)", "parameters")[0], found(r"LLaMA 65B +([\d.e+]+)", "parameters")[0]
tenfold = [0.34e9 * 10 ** (year - 2018.8) for year in (2020.4, 2022.3, 2023.1)]
gpt3 = found(r"GPT-3 +([\d.e+]+)", "parameters")[0]
assert round(gpt3 / tenfold[0]) == 13 and 1.9 < tenfold[1] / near < 2.1 and tenfold[2] / far > 100

# %% [markdown]
# The compute leaves its line between 2018 and 2020, and stays far below it. Until 2020, models are larger than the line
# says (GPT-3 lies thirteen times above it). In 2022 PaLM is at half of it; later models lie far below. A straight line on a
# logarithmic axis fits some years; it is not a law. Since 2020 the data have grown more than the models: 300 billion tokens
# became 15,600 billion.
#
# ## Question the number: ResNet-50
#
# The race that made data parallelism famous: the time to train ResNet-50 on ImageNet.

# %%
columns = ("work", "batch_size", "processor", "processors", "library", "time", "top1_accuracy_pct")
rows = [[row[column] for column in columns] for row in lab.published("resnet50_imagenet.csv")]
lab.table(rows, ("", "batch", "processor", "how many", "library", "time", "right (%)"))

# %% [markdown]
# **Predict.** From the first row to the last: how many times as many processors, and how many times as fast?

# %% tags=["stub"]
lab.predict("from-29-hours-to-72-seconds", {"processors": None, "speed": None})

# %% tags=["solution"]
lab.predict("from-29-hours-to-72-seconds", {"processors": 256, "speed": 1450})

# %% tags=["statement"]
# "This looks faster than linear."
# "Accuracy is not the same either: 76.3 % at batch 8,192, 75.1 % at 81,920."
# "says 74.7 seconds, not 72"
first, second, last = row("He et al."), row("Goyal et al."), row("Yamazaki et al.")
assert (second[0], second[-1], last[0], round(last[-1], 1)) == (8192, 76.3, 81920, 75.1)
assert round(60 * last[-2]) == 72 and 29 * 3600 / 72 > last[-3] / first[-3] == 256

# %% [markdown]
# This looks faster than linear. But the processors differ (in 16 bits a V100 computes several times faster than a
# P100), and so do libraries and precision. Accuracy is not the same either: 76.3 % at batch 8,192, 75.1 % at 81,920.
# And the title of the last row's paper says 74.7 seconds, not 72. Such rows, measured by different people under
# different rules, show what was reached. They show no *efficiency*.
#
# ## Question the number: Megatron
#
# A better table: one group and one kind of GPU. We take the model with 174.6 billion parameters; all its runs have the
# same batch, over all GPUs together. *PTD* combines pipeline, tensor and data parallelism; ZeRO-3 shards the model over
# all ranks. (Both are explained below.)
#
# On 384 GPUs 300 billion tokens take 84 days with PTD, and 90 with ZeRO-3. **Predict.** How many days does each take on
# 1,536 GPUs?

# %% tags=["stub"]
lab.predict("days-on-1536", {"PTD": None, "ZeRO-3": None})

# %% tags=["solution"]
lab.predict("days-on-1536", {"PTD": 23, "ZeRO-3": 74})

# %%
table = {}
for row in lab.published("megatron_ptd_vs_zero3.csv"):
    name = f"{row['scheme'].split()[0]}, {float(row['params_billion']):.0f} billion"
    table.setdefault(name, {})[int(row["gpus"])] = float(row["achieved_tflops_per_gpu"])
figures.throughput(table)

# %% tags=["claim"]
# "take 84 days with PTD, and 90 with ZeRO-3"
runs = lab.published("megatron_ptd_vs_zero3.csv")
days = {(row["scheme"][:3], row["gpus"], row["params_billion"]): row["days_for_300B_tokens"] for row in runs}
assert [days[way, "384", "174.6"] for way in ("PTD", "ZeR")] == ["84", "90"]

# %% [markdown]
# Do the days follow from the speed of each GPU? These runs save memory by *recomputation*: the backward pass repeats
# the forward pass. So a token costs 8 P operations instead of 6 P.

# %%
worst = 0
for row in lab.published("megatron_ptd_vs_zero3.csv"):
    work = 8 * 1e9 * float(row["params_billion"]) * 300e9
    days = work / (float(row["achieved_tflops_per_gpu"]) * 1e12 * int(row["gpus"])) / 86_400
    worst = max(worst, abs(days / float(row["days_for_300B_tokens"]) - 1))
print(f"Every row agrees with its own formula within {worst:.0%}.")

# %% tags=["statement"]
# "the authors' own system wins"
for size, ptd_gpus, gpus in (("175", "384", "384"), ("175", "1,536", "1,536"), ("530", "2,240", "2,240")):
    assert row(f"PTD, {size} billion", gpus)[-1] > 0
by_gpus = {(way, r[0]): r[1] for way in ("PTD", "ZeRO-3") for r in rows(f"{way}, 175 billion")}
assert all(by_gpus["PTD", gpus] > by_gpus["ZeRO-3", gpus] for gpus in (384, 768, 1536))

# %% [markdown]
# The arithmetic is honest, and the authors' own system wins. But ZeRO-3 ran *without* model parallelism and with ever
# fewer samples per GPU, and that makes it slow. **Discuss.** What would be a fair comparison?
#
# ## Four ways to cut
#
# One model with four layers, on four ranks. Each column is a rank: the samples that it sees, and its part of each layer.
# What is hatched is gathered while its layer computes. Below stands what travels:

# %%
figures.kinds()

# %% [markdown]
# Here each layer has 64 x 64 weights. **Predict.** How many weights does rank 0 keep with each way? (With ZeRO-3:
# between two steps.)

# %% tags=["stub"]
lab.predict("weights-on-rank-0", {"data": None, "ZeRO-3": None, "pipeline": None, "tensor": None})

# %% tags=["solution"]
lab.predict("weights-on-rank-0", {"data": 16384, "ZeRO-3": 4096, "pipeline": 4096, "tensor": 4096})

# %%
# %%px
import dtlib
import torch
from dtlib.parallel.data import DataParallel
from dtlib.parallel.tensor import ColumnParallelLinear
from dtlib.parallel.zero.sharded import fully_shard
from torch import nn

world = dtlib.init()
comm = world.comm


def layers():
    torch.manual_seed(0)
    return [nn.Linear(64, 64, bias=False) for _ in range(4)]


def weights_of(module):
    return sum(weight.numel() for weight in module.parameters())


sharded = nn.Sequential(*layers())
fully_shard(sharded, comm)
held = {
    "data": weights_of(DataParallel(nn.Sequential(*layers()), comm)),
    "ZeRO-3": weights_of(sharded),
    "pipeline": weights_of(layers()[comm.rank]),
    "tensor": sum(weights_of(ColumnParallelLinear(64, 64, comm, bias=False)) for _ in range(4)),
}

# %% [markdown]
# | | what travels | who built it (and when it was first made public) |
# |---|---|---|
# | data | gradients, once a step | parameter servers, DistBelief (Google, 2012: *sharded* over servers and *asynchronous*); the ring for gradients (Baidu, 2017); Horovod (Uber, 2017); torch's DDP |
# | sharded data | gradients, and parameters up to twice | ZeRO (Microsoft, 2019) in the library DeepSpeed; torch's FSDP |
# | pipeline | activations at the cuts, and their gradients | GPipe (Google, 2018), PipeDream (Microsoft, 2018) |
# | tensor | activations in every layer | Megatron-LM (NVIDIA, 2019); Mesh-TensorFlow (Google, 2018) |
# | any of them | | TF-Replicator (DeepMind, 2019): one step function, on any number of devices |
#
# Three of the four keep equally few weights. What travels, and how often, decides between them:
#
# | what stops you | look first at |
# |---|---|
# | the model fits, training takes too long | data |
# | the weights fit, Adam's states do not | sharded data (ZeRO) |
# | one layer is too large, links inside the machine are fast | tensor |
# | many layers, slow links between machines | pipeline |
#
# Lessons 04, 06, 08 and 07 measure them in this order; [11](11_beyond_one_machine.ipynb) has the whole chart.
#
# Horovod also runs under Keras and TensorFlow 2, with the same steps. Old torch tutorials build pipelines from remote
# calls (RPC); `torch.distributed.pipelining` has replaced them.
#
# ## Who needs it
#
# Not only language models. Six examples from science:
#
# | field | what is large |
# |---|---|
# | climate: extreme weather in simulations (T. Kurth et al., arXiv:1810.01993) | maps of 1152 x 768 with 16 channels; 27,360 GPUs |
# | cosmology: CosmoFlow (A. Mathuriya et al., arXiv:1808.04728) | volumes of 128³; 8,192 nodes without a GPU |
# | brains: neurons traced through slices (W. Dong et al., arXiv:1905.06236) | images of petabytes; 2,048 nodes |
# | fusion: disruptions predicted (J. Kates-Harbeck et al., Nature 568, 2019) | years of signals of a reactor |
# | gravitational waves (A. Khan et al., Phys. Lett. B 808, 2020) | millions of simulated waves; 1,536 GPUs |
# | viruses: GenSLMs (M. Zvyagin et al., IJHPCA 37, 2023) | whole genomes as sentences, models to 25 billion |
#
# Some projects train beside a running simulation, because its output is too large to store, or to read twice.
# Proteomics and medical images of high resolution meet another limit: the activations of one sample fill a GPU, so the
# *sample* is cut.
#
# ## In any language
#
# MPI, which carries the ranks' messages, joins processes of any language. In R, with the package Rmpi, a rank's number
# is one call, and the sum over all ranks another (from `notebooks/pi.R`, which lesson 02 reads):
#
# ```r
# library(Rmpi)
# rank <- mpi.comm.rank(0)
# size <- mpi.comm.size(0)
# inside <- 0
# # for each block of n of this rank's points:
# inside <- inside + sum(runif(n)^2 + runif(n)^2 < 1)
# share <- mpi.allreduce(inside, type = 2, op = "sum", comm = 0) / points
# if (rank == 0) cat(sprintf("pi is about %.6f, standard error %.6f\n", 4 * share, error))
# ```
#
# ## Claims on trial
#
# `data/claims.csv` has fourteen claims from an article, a lecture, a newsletter and a tutorial. The first says that 10⁸
# points of Monte Carlo pi take a minute on one GPU. On one core here, without a GPU:

# %% tags=["nbval-ignore-output"]
# %%px
import time

from dtlib import pi

if world.rank == 0:
    pi.count_compiled(0, 1)  # compile first
    began = time.perf_counter()
    estimate = pi.Estimate(10**8, pi.count_compiled(0, 10**8))
    seconds = time.perf_counter() - began
    print(f"pi is about {estimate.pi:.4f}; {seconds:.2f} s on one core")

# %% tags=["claim"]
# %%px
# "On one core here, without a GPU:"
if world.rank == 0:
    assert seconds < 20

# %% [markdown]
# **Predict.** The last claim is about a command of DeepSpeed. How many GPUs does `deepspeed --num_nodes 2 --num_gpus 8`
# use?

# %% tags=["stub"]
lab.predict("gpus-of-two-nodes", None)

# %% tags=["solution"]
lab.predict("gpus-of-two-nodes", 16)

# %% [markdown]
# Five more claims from the same texts. **Your verdict?** One of: `"holds"`, `"does not hold"`, `"it depends"`, `"cannot
# be said"`.

# %% tags=["stub"]
lab.predict("verdicts", {
    "more GPUs give faster convergence": None,
    "data parallelism spreads one model over GPUs": None,
    "updates must sit on a parameter server": None,
    "DeepSpeed needs no refactoring": None,
    "almost all data can be parallelised, and not all models": None,
})

# %% tags=["solution"]
lab.predict("verdicts", {
    "more GPUs give faster convergence": "it depends",
    "data parallelism spreads one model over GPUs": "does not hold",
    "updates must sit on a parameter server": "does not hold",
    "DeepSpeed needs no refactoring": "it depends",
    "almost all data can be parallelised, and not all models": "it depends",
})

# %% [markdown]
# And here are all nineteen, each with a verdict and a reason, those five last. The first verdict is on what a GPU
# needs: the authors' program may well have taken a minute. You may disagree: most of them return in a later lesson.

# %%
rows = [
    (" ".join(filter(None, (row["claim"], row["figure"], row["unit"]))), *verdict)
    for row, verdict in zip(lab.published("claims.csv"), claims.OF_THE_TEXTS, strict=True)
]
lab.table([*rows, *claims.MORE], ("claim", "verdict", "how we know"))

# %% tags=["statement"]
# "`data/claims.csv` has fourteen claims"
# "put nineteen claims on trial"
verdicts = "does not hold|cannot be said|it depends|holds"
assert count(f"  (?:{verdicts})  ") == 14 + 5 and count("right\\.", "server: you predicted") == 5
# The last claim is about a command of DeepSpeed.
assert count("--num_gpus counts those of one node") == 1

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("01")

# %% [markdown]
# ## Summary
#
# - Two walls: 16 bytes per parameter do not fit, 6 P operations per token take too long.
# - Four cuts: the batch, the weights' storage, between layers, within layers. They can be combined.
# - A claim needs its setting: which machine, which batch, against what, measured by whom.
#
# Next: [02 MPI and pi](02_pi.ipynb), ranks at work.
#
# ## References
#
# - J. Kaplan et al.: Scaling laws for neural language models. arXiv:2001.08361, 2020 (6 P operations per token).
# - D. Amodei and D. Hernandez: AI and compute. OpenAI, 2018.
# - D. Narayanan et al.: Efficient large-scale language model training on GPU clusters using Megatron-LM. SC, 2021, table 2.
# - M. Yamazaki et al.: Yet another accelerated SGD: ResNet-50 training on ImageNet in 74.7 seconds. arXiv:1903.12650, 2019.
# - J. Dean et al.: Large scale distributed deep networks. NeurIPS, 2012. A. Gibiansky: Bringing HPC techniques to deep
#   learning. Baidu, 2017.
