# %% [markdown]
# # 10 Two real models: exercises
#
# Four exercises: *predict* GPUs (one minute), *choose* a config that fits (ten minutes), *fix* a run that is not faster
# on two ranks (five minutes), *build* your own workload (thirty minutes). A check looks at your answer on all ranks.
#
# **You need** the lecture [10 Two real models](../lectures/10_two_models.ipynb). Answers:
# [solutions](../solutions/10_two_models_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import dtlib
import torch
from dtlib.workloads import digits
from dtlib.workloads.workload import Workload
from torch import nn
from torch.nn.functional import cross_entropy

world = dtlib.init()

# %% [markdown] tags=["half-day"]
# ## Predict: how many GPUs?
#
# `deepspeed --num_nodes 3 --num_gpus 4 train.py` starts a rank for each GPU. How many ranks train?

# %% tags=["half-day", "stub"]
lab.predict("gpus-of-the-listing", None)

# %% tags=["half-day", "solution"]
lab.predict("gpus-of-the-listing", 12)

# %% [markdown] tags=["half-day"]
# ## Choose: 200 MB a rank
#
# A model of 24 million parameters is trained with AdamW on these three ranks, in batches of 96; a rank has at most 8
# samples in memory at a time. Each rank has 200 MB (200 x 10^6 bytes) for parameters, gradients and the optimizer.
# Which config fits, and sends no more than data parallelism does? Nothing is trained here: the check uses formulas.

# %% tags=["half-day", "stub"]
# %%px
config = {
    "train_batch_size": 96,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}

# %% tags=["half-day", "solution"]
# %%px
config = {
    "train_batch_size": 96,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}

# %% tags=["half-day"]
lab.check("fits-200-mb")

# %% [markdown] tags=["half-day"]
# Stage 2 fits in float32 as well, but with four micro-batches it sends gradients four times. Stage 3 fits easily, and sends most.
#
# ## Fix: two ranks, no faster
#
# Each rank trains on `images[places_of(...)]`, and gradients are averaged. The losses are right, but two ranks take as
# long as one. Why? Fix `places_of`: it returns the places in the data that *this* rank takes in a step. All ranks
# together take `batch` places, beginning at `step * batch`; `batch` need not be a multiple of `ranks`.

# %% tags=["half-day", "stub"]
# %%px
def places_of(step, batch, rank, ranks):
    first = step * batch
    return range(first, first + batch)

# %% tags=["half-day", "solution"]
# %%px
def places_of(step, batch, rank, ranks):
    first = step * batch
    return range(first + rank, first + batch, ranks)

# %% tags=["half-day"]
lab.check("slower-fix")

# %% [markdown] tags=["half-day"]
# The mean of equal gradients is that gradient, so nothing looked wrong. The only sign is that the run is not faster:
# look at samples per second, not at the loss.
#
# ## Build: a model of your own
#
# Write `my_workload(config)`, which returns a `Workload` for digits of 8 x 8 points, so that `train(my_workload, ...)` trains it:
#
# - `model`: any `nn.Module` from images (n, 64) to scores (n, 10), with the same parameters on all ranks.
# - `train`, `test`: data sets of pairs of an image and its label; `digits.split()` gives two pairs of tensors.
# - `loss_fn(outputs, targets)`: a mean over samples, because ranks average their results.
# - `evaluate(model, comm)`: `{"accuracy": ...}` over all test images, the same on all ranks. Ranks may divide the
#   images, and add their counts by `torch.distributed.all_reduce(right, group=comm.group)`.
# - `name`, `layers=[]` (they are for pipelines), `seed`, `collate=None`.

# %% tags=["half-day", "stub"]
# %%px
def my_workload(config):
    torch.manual_seed(0)
    model = ...

# %% tags=["half-day", "solution"]
# %%px
def my_workload(config):
    (x, y), (test_x, test_y) = digits.split()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def evaluate(model, comm):
        mine = slice(comm.rank, None, comm.size)
        with torch.no_grad():
            right = (model(test_x[mine]).argmax(1) == test_y[mine]).sum()
        torch.distributed.all_reduce(right, group=comm.group)
        return {"accuracy": right.item() / len(test_y)}

    pairs = torch.utils.data.TensorDataset
    return Workload(
        name="mine", model=model, layers=[], seed=0, train=pairs(x, y), test=pairs(test_x, test_y),
        collate=None, loss_fn=cross_entropy, evaluate=evaluate,
    )

# %% tags=["half-day"]
lab.check("wrap-a-model")

# %% [markdown] tags=["half-day"]
# Your workload now runs under every runtime and at every stage. A `transformers` model works in the same way: its
# `forward` returns an object, so wrap the model in a module that returns `.logits`.
#
# ## If you have time
#
# - Train your workload under `runtime="torch"` at stage 3. Is the loss the same curve?
# - Kill `dtlib train vision --save DIR` in a terminal, and start it again with `--resume` on another number of ranks.
