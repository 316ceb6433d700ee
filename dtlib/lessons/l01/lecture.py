# %% [markdown]
# # 01 Why distribute
#
# Thirty-five minutes. People spread training over many processors because a model does not fit on one, or because
# training on one takes too long. You compute both, count both on ranks, see four ways to divide the work, and put six
# claims on trial.
#
# **Questions.** What is too large, and what too slow? In how many ways can training be divided? Which numbers can you
# believe?
#
# **Afterwards you can** estimate the memory and the time of a training run on the back of an envelope; name the kinds
# of parallelism, who built them, and which part of the model each rank holds; find what is wrong with a published
# number.
#
# **You need** [00 Start here](00_start_here.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %% [markdown]
# ## What does not fit
#
# Training with Adam, the usual optimizer, in mixed precision keeps 16 bytes per parameter: the parameter and its
# gradient in 16 bits each; a master copy and two running means in 32 bits each. x
# accelerator has 80 GB.
#
# **Predict.** How many accelerators does it take just to *hold* these states? Do not count *activations*, the values
# that a layer stores for the backward pass. Replace `None`.

# %% tags=["stub"]
lab.predict("gpus-for-the-states", None)

# %% tags=["solution"]
lab.predict("gpus-for-the-states", 35)

# %% [markdown]
# ## What takes too long
#
# A language model with P parameters needs about 6 P operations for each *token* (a word or a part of a word) that it
# trains on: 2 P in the forward pass, twice as many in the backward pass. GPT-3 read 300 billion tokens. On paper an
# A100, a GPU, computes 312 TFLOP/s (10¹² operations per second) in 16 bits. In practice it reaches 45 % of this, if all
# goes well.
#
# **Predict.** How many years would one A100 need?

# %% tags=["stub"]
lab.predict("years-on-one-gpu", None)

# %% tags=["solution"]
lab.predict("years-on-one-gpu", 71)

# %% [markdown]
# ## Count both on ranks
#
# You need not believe the numbers 16 and 6: count them. Each rank takes one training step with a small net. We list the
# tensors that must stay in memory, and add up their bytes. torch's own counter counts the operations. Rank r has four
# layers of width 128 (r + 1). The input requires a gradient, as it would inside a larger model.
#
# **Predict.** Rank 3 has four layers of 512 x 512 weights, and 64 samples. How many *million*
# operations do its forward and its backward pass take?

# %% tags=["stub"]
lab.predict("operations-of-a-step", None)

# %% tags=["solution"]
lab.predict("operations-of-a-step", 403)

# %%
# %%px
import dtlib
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

world = dtlib.init()
comm = world.comm
width = 128 * (world.rank + 1)
net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))).bfloat16()
master = [parameter.detach().float() for parameter in net.parameters()]  # in 32 bits
optimizer = torch.optim.Adam(master)
samples = torch.randn(64, width, dtype=torch.bfloat16, requires_grad=True)
with FlopCounterMode(display=False) as counter:
    net(samples).float().square().mean().backward()
for parameter, copy in zip(net.parameters(), master, strict=True):
    copy.grad = parameter.grad.float()
optimizer.step()
optimizer.zero_grad()  # the gradients in 32 bits do not stay

# %%
# %%px
P = sum(parameter.numel() for parameter in net.parameters())
stay = [*net.parameters(), *(parameter.grad for parameter in net.parameters()), *master]
for state in optimizer.state.values():
    stay += [state["exp_avg"], state["exp_avg_sq"]]  # the two running means
counted = P, sum(tensor.nbytes for tensor in stay) / P, counter.get_total_flops() / P / len(samples)

# %%
counts = lab.values("counted")  # one of each rank
rows = [
    (rank, f"{parameters:,}", f"{size:.2f}", f"{work:.2f}")
    for rank, (parameters, size, work) in enumerate(counts)
]
headers = ("rank", "parameters", "bytes per parameter", "operations per parameter and sample")
lab.table(rows, headers)

# %% tags=["statement"]
# "Both rules hold on each rank, whatever the width."
assert all(row(f"{rank}", "bytes per")[1:] == [16, 6] for rank in range(4))

# %% [markdown]
# Both rules hold on each rank, whatever the width. Now use the two rules; a click shows the answer.
#
# **Question 1.** To *run* GPT-3, and not to train it, you keep its parameters in 16 bits and nothing else. How many
# accelerators of 80 GB do you need?
#
# <details><summary>Answer 1</summary>350 GB, so five. Seven eighths of the 16 bytes belong to training.</details>
#
# **Question 2.** Llama 3.1 has 405 billion parameters and read 15.6 trillion tokens. How many days does this take if
# 16,384 GPUs compute 400 TFLOP/s each?
#
# <details><summary>Answer 2</summary>6 x 405 billion x 15.6 trillion = 3.8 x 10²⁵ operations; that takes 5.8 million seconds,
# or 67 days.</details>

# %% tags=["claim"]
# "350 GB, so five. Seven eighths of the 16 bytes belong to training."
# "3.8 x 10²⁵ operations; that takes 5.8 million seconds, or 67 days"
assert -(-2 * 175 // 80) == 5 and (16 - 2) / 16 == 7 / 8
work = 6 * 405e9 * 15.6e12
assert f"{work:.1e}" == "3.8e+25" and round(work / 16384 / 400e12 / 1e5) == 58
assert round(work / 16384 / 400e12 / 86400) == 67

# %% [markdown]
# ## How it grows
#
# A lecture of 2023 says that the compute of the largest runs doubles every 3.5 months. (OpenAI had found 3.4 months,
# for the years 2012 to 2018.) We draw this growth **as claimed**, as a line from the first run, beside published runs.
# In which year do the line and the dots separate?

# %%
from dtlib.lessons.l01 import claims, figures

compute = {}
for row in lab.published("models.csv"):
    if row["tokens_billion"]:
        rule = 6 * 1e9 * float(row["parameters_billion"]) * 1e9 * float(row["tokens_billion"])
        compute[row["model"]] = float(row["year"]), rule
    elif row["training_flops"]:
        compute[row["model"]] = float(row["year"]), float(row["training_flops"])
doubling = {2012.75 + months / 12: 5.0e17 * 2 ** (months / 3.5) for months in range(0, 145, 12)}
figures.growth(compute, {"doubling every 3.5 months": doubling}, "operations of the training run")

# %% [markdown]
# **Predict.** Suppose that the doubling had continued until Llama 3.1 405B was released. By how many powers of ten
# would that run have been larger than it was?

# %% tags=["stub"]
lab.predict("zeros-too-many", None)

# %% tags=["solution"]
lab.predict("zeros-too-many", 4.3)

# %% tags=["statement"]
# "The compute leaves its line between 2018 and 2020, and stays far below it."
first, later = found(r"AlphaGo Zero +([\d.e+]+)", "operations")[0], found(r"GPT-3 +([\d.e+]+)", "operations")[0]
doubled = [5e17 * 2 ** (12 / 3.5 * (year - 2012.75)) for year in (2017.8, 2020.4)]  # months as in models.csv
assert 1 / 2 < doubled[0] / first < 2 and doubled[1] / later > 100

# %% tags=["claim"]
# "Since 2020 the data have grown more than the models: 300 billion tokens became 15,600 billion, 175 billion parameters 405."
models = {row["model"]: row for row in lab.published("models.csv")}
size, tokens = "parameters_billion", "tokens_billion"
assert [float(models["GPT-3"][what]) for what in (size, tokens)] == [175, 300]
assert [float(models["Llama 3.1 405B"][what]) for what in (size, tokens)] == [405, 15600]

# %% [markdown]
# The compute leaves its line between 2018 and 2020, and stays far below it. A straight line on a logarithmic axis fits some
# years; it is not a law. Since 2020 the data have grown more than the models: 300 billion tokens became 15,600 billion, 175
# billion parameters 405.
#
# ## Question the number: ResNet-50
#
# One race made data parallelism famous: who trains ResNet-50 on ImageNet in the shortest time?

# %%
columns = ("work", "batch_size", "processor", "processors", "library", "time", "top1_accuracy_pct")
rows = [[row[column] for column in columns] for row in lab.published("resnet50_imagenet.csv")]
lab.table(rows, ("", "batch", "processor", "how many", "library", "time", "right (%)"))

# %% [markdown]
# **Predict.** Compare the last row with the first. How many times as many processors does it use, and how many times as
# fast is it?

# %% tags=["stub"]
lab.predict("from-29-hours-to-72-seconds", {"processors": None, "speed": None})

# %% tags=["solution"]
lab.predict("from-29-hours-to-72-seconds", {"processors": 256, "speed": 1450})

# %% tags=["statement"]
# "This looks faster than linear."
# "Accuracy is not the same either: 76.3 % at batch 8,192, 75.1 % at 81,920."
# "but the last row's paper says 74.7 seconds, not 72"
first, second, last = row("He et al."), row("Goyal et al."), row("Yamazaki et al.")
assert (second[0], second[-1], last[0], round(last[-1], 1)) == (8192, 76.3, 81920, 75.1)
assert round(60 * last[-2]) == 72 and 29 * 3600 / 72 > last[-3] / first[-3] == 256

# %% [markdown]
# This looks faster than linear. But the processors differ (in 16 bits a V100 computes several times faster than a
# P100), and so do libraries and precision. Accuracy is not the same either: 76.3 % at batch 8,192, 75.1 % at 81,920.
# And 1.2 minutes are 72 seconds, but the last row's paper says 74.7 seconds, not 72. Different people measured these
# rows under different rules. The rows show which times were reached. They show no *efficiency*.
#
# **Question 3.** Compare GPU-hours: processors times hours, in the first row and in the last. Which run needed fewer, and by
# which factor?
#
# <details><summary>Answer 3</summary>8 x 29 = 232 and 2,048 x 0.02 = 41: a factor of 5.7 for the last row. Its V100s compute
# several times faster in 16 bits.</details>

# %% tags=["claim"]
# "8 x 29 = 232 and 2,048 x 0.02 = 41: a factor of 5.7 for the last row"
assert 8 * 29 == 232 and round(2048 * 0.02) == 41 and round(232 / (2048 * 0.02), 1) == 5.7

# %% [markdown]
# ## Four ways to cut
#
# One model with four layers, on four ranks. Each column is a rank: the samples that it sees, and its part of each
# layer. A rank has the hatched weights only while their layer computes. The line below each panel says which data
# travel.

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
from dtlib.parallel.data import DataParallel
from dtlib.parallel.tensor import ColumnParallelLinear
from dtlib.parallel.zero.sharded import fully_shard


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

# %% tags=["statement"]
# "Three of the four keep equally few weights."
assert [count(f"{way}: you predicted {n:,}|{way}: you predicted {n}") for way, n in (
    ("data", 16384), ("ZeRO-3", 4096), ("pipeline", 4096), ("tensor", 4096))] == [1] * 4

# %% [markdown]
# | way | what is communicated | look at it first if | who built it, and when it was first made public |
# |---|---|---|---|
# | data: lesson 04 | gradients, once a step | the model fits, training takes too long | DistBelief (Google, 2012: *asynchronous* workers, which do not wait for one another); the ring for gradients (Baidu, 2017); Horovod (Uber, 2017) |
# | sharded data: lesson 06 | per micro-batch, gradients, and parameters up to twice | the weights fit, Adam's states do not | ZeRO (Microsoft, 2019) in DeepSpeed; torch's FSDP |
# | pipeline: lesson 07 | activations at the cuts, and their gradients | many layers, slow links between machines | GPipe (Google, 2018), PipeDream (Microsoft, 2018) |
# | tensor: lesson 08 | activations in every layer | one layer is too large, links inside the machine are fast | Mesh-TensorFlow (Google, 2018), Megatron-LM (NVIDIA, 2019) |
#
# Three of the four keep equally few weights. To choose between them, ask which data travel, and how often. [Lesson
# 11](11_beyond_one_machine.ipynb) shows the whole decision chart.
#
# **Question 4.** A layer has 12,288 x 12,288 weights in 16 bits. Which is larger: its gradient, or the activations of 2,048 tokens
# at its output?
#
# <details><summary>Answer 4</summary>The gradient: 302 MB against 50 MB. With six times as many tokens the two are
# equal. Over one InfiniBand card of 50 GB/s 302 MB take 6 ms.</details>

# %% tags=["claim"]
# "302 MB against 50 MB. With six times as many tokens the two are equal."
assert round(302 / 50) == 6 and round(2 * 12288**2 / 1e6) == 302 and round(2 * 2048 * 12288 / 1e6) == 50 and 12288 / 2048 == 6

# %% [markdown]
# ## Two ways compared: Megatron's table
#
# One group measured two ways on the same kind of GPU. We look at the model with 174.6 billion parameters. All its runs
# have the same batch size, counted over all GPUs. *PTD* combines pipeline, tensor and data parallelism; ZeRO-3 shards
# data.
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
# The arithmetic is honest, and the authors' own system wins. But ZeRO-3 ran *without* model parallelism. With more GPUs
# it also had fewer samples per GPU. Both reasons make ZeRO-3 slow. **Discuss.** What would be a fair comparison?
#
# ## Six claims on trial
#
# These claims are from a lecture, a newsletter and a tutorial (`data/claims.csv` has more). **Your verdict?** Choose
# one of: `"holds"`, `"does not hold"`, `"it depends"`, `"cannot be said"`. The fourth is about throughput. The last is
# about a command of DeepSpeed, which starts processes on two machines.

# %% tags=["stub"]
lab.predict("verdicts", {
    "compute doubles every 3.5 months": None,
    "data parallelism spreads one model over GPUs": None,
    "DeepSpeed trains models of 100 billion parameters": None,
    "DeepSpeed is 4 to 5 times faster than others": None,
    "more GPUs give faster convergence": None,
    "--num_nodes 2 --num_gpus 8 uses 8 GPUs": None,
})

# %% tags=["solution"]
lab.predict("verdicts", {
    "compute doubles every 3.5 months": "it depends",
    "data parallelism spreads one model over GPUs": "does not hold",
    "DeepSpeed trains models of 100 billion parameters": "holds",
    "DeepSpeed is 4 to 5 times faster than others": "cannot be said",
    "more GPUs give faster convergence": "it depends",
    "--num_nodes 2 --num_gpus 8 uses 8 GPUs": "does not hold",
})

# %%
lab.table(claims.CLAIMS, ("claim", "verdict", "how we know"))

# %% tags=["statement"]
# "## Six claims on trial"
# "You compute both, count both on ranks, see four ways to divide the work, and put six claims on trial."
# "The last is about a command of DeepSpeed, which starts processes on two machines."
verdicts = "does not hold|cannot be said|it depends|holds"
assert count(f"  (?:{verdicts})  ") == 6 and count("--num_gpus counts the GPUs of one node") == 1

# %% [markdown]
# You may disagree. More important are the questions that you ask about each claim: on which machine, with which batch,
# compared with what?
#
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("01")

# %% [markdown]
# ## Summary
#
# - Two walls: 16 bytes per parameter do not fit, 6 P operations per token take too long.
# - Four cuts: the batch, the weights' storage, between layers, within layers. They can be combined.
# - A claim needs its setting: which machine, which batch, compared with what, measured by whom.
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
