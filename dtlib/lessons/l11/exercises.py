# %% [markdown]
# # 11 Beyond one machine: exercises
#
# *Predict* (two minutes), *fix* a batch script (eight minutes), *fix* a table of efficiencies (ten minutes), and
# *build* a model of the time of a step on any number of ranks (twenty-five minutes).
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
# - 512 GPUs work for 60 minutes at 90 % efficiency, each on its 512th of the work. How many minutes would one GPU alone
#   need for a 512th of the work?

# %% tags=["stub"]
lab.predict("limit-of-amdahl", None)
lab.predict("minutes-of-an-hour", None)

# %% tags=["solution"]
lab.predict("limit-of-amdahl", 20)
lab.predict("minutes-of-an-hour", 54)

# %% [markdown]
# ## Fix: a batch script
#
# This script asks Slurm for two machines with four GPUs each, for half an hour. All eight GPUs should train together,
# with 8 cores for each rank. The script has four faults, and Slurm does not report any of the four. Fix them.

# %% tags=["stub"]
# %%px
job = r"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=30:00:00
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
export OMP_NUM_THREADS=8
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=2 --nproc-per-node=4 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint=localhost:29500 \
    train.py --resume checkpoints
"""

# %% tags=["solution"]
# %%px
job = r"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=00:30:00
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
export OMP_NUM_THREADS=8
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=2 --nproc-per-node=4 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:29500" \
    train.py --resume checkpoints
"""

# %%
lab.check("job-fix")

# %% [markdown]
# ## Fix: a table of efficiencies
#
# `seconds` are the measured seconds of *this* rank, for several numbers of ranks: a dictionary, with the same keys on
# all ranks. A run takes as long as its slowest rank. The function was tried with one table only: strong scaling that
# begins at one rank, on one rank. For this table it is right. But published tables often begin at 8 GPUs, a node, and
# many show weak scaling: each rank keeps the same work, for any number of ranks.
#
# Fix it. `kind` is `"strong"` or `"weak"`. The smallest number of ranks in the table counts as 100 %. Every rank
# returns a dictionary of ranks and efficiencies, as fractions with all their digits. Compute the slowest rank's seconds
# with `dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=comm.group)`, in float64.

# %% tags=["stub"]
# %%px
import torch
from torch import distributed as dist


def efficiency(comm, seconds, kind):
    first = min(seconds)
    return {n: seconds[first] / (n * took) for n, took in seconds.items()}

# %% tags=["solution"]
# %%px
import torch
from torch import distributed as dist


def efficiency(comm, seconds, kind):
    ranks = sorted(seconds)
    slowest = torch.tensor([seconds[n] for n in ranks], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=comm.group)
    took, first = dict(zip(ranks, slowest.tolist(), strict=True)), ranks[0]
    ideal = {n: first / n if kind == "strong" else 1 for n in ranks}
    return {n: took[first] * ideal[n] / took[n] for n in ranks}

# %%
lab.check("efficiency-fix")

# %% [markdown]
# ## Build: how long does a step take?
#
# Before you request a thousand GPUs, you want to know how much faster they will be. Write a model of a step of data
# parallelism on `ranks` ranks, a power of two: every rank computes for `compute` seconds; then an all-reduce of `count`
# bytes averages the gradients, by the cheapest of three algorithms. No communication overlaps with computing.
#
# A message of m bytes takes `latency + m / bandwidth` seconds. Adding costs nothing. On N ranks and n bytes:
#
# - the *ring* has 2 (N - 1) rounds, each with an N-th of the bytes;
# - *recursive doubling* has log2 N rounds, each with all the bytes;
# - *Rabenseifner's* has 2 log2 N rounds, and sends as many bytes as the ring in all, 2 n (N - 1) / N.
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
# Now use your model instead of a cluster. A network of 500 million parameters has gradients of 2 GB; a rank computes
# for 0.2 seconds; messages take 5 µs and travel at 12.5 GB/s.

# %%
# %%px
if world.rank == 0:
    for n in (1, 8, 64, 512, 4096):
        seconds = step_seconds(n, 0.2, 2e9, 5e-6, 12.5e9)
        print(f"{n:5} ranks: {1e3 * seconds:.1f} ms per step, efficiency {0.2 / seconds:.0%}")

# %% tags=["statement"]
# "With 2 GB, even eight ranks wait more than half of the time."
few, many = (found(f" {n} ranks: [\\d.]+ ms per step, efficiency (\\d+)%")[0] for n in (8, 4096))
assert few < 50 and few - many < 5

# %% [markdown]
# With 2 GB, even eight ranks wait more than half of the time. This is weak scaling: each rank keeps its batch. Real
# clusters are slower than the model: other jobs use the same network, and some ranks are late.
#
# ## If you have time
#
# - Strong scaling: give each rank 0.2 / N seconds of computing. From which N on do more ranks make a step *longer*?
# - Let `hidden` seconds of the all-reduce overlap with computing, as with buckets. Up to how many ranks is the
#   efficiency 95 % then?
# - Send the gradients as 16-bit numbers. How much time does this save on 8 ranks, and on 4,096?
