# %% [markdown]
# # C Large batches, and less memory
#
# Forty-five minutes. More ranks make larger batches: which learning rate do they need? Then ZeRO, which gives each
# rank a shard of the model states. **Your turn**: make a model fit (five minutes).
#
# A cell that starts with `%%px --local` runs on the ranks and in the notebook.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
import dtlib
import torch
from torch import nn
from torch.optim import AdamW

from dtlib import lab
from dtlib.lab import digits
from dtlib.lessons.l06 import figures
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import plain
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.theory.zero import GB, SCHEMES, zero_bytes

# %% [raw]
# 05_large_batches

# %% [markdown]
# The table shows the results of the rules for ResNet-50 on ImageNet, at batch 8192 on 256 GPUs. The rows on warm-up use
# the linear rule. Which row is as good as the small batch?

# %%
rows = [(row["batch"], row["setting"], row["top1_error_pct"]) for row in lab.published("goyal2017.csv")[:6]]
lab.table(rows, ("batch", "setting", "error in %"), "P. Goyal et al., 2017")

# %% tags=["statement"]
# "Only the linear rule with gradual warm-up is."
small, warm = (found(f"{setting} +([\\d.]+)", "Goyal")[0] for setting in ("256 small batch", "8192 gradual warm-up"))
others = [found(f"8192 {setting} +([\\d.]+)", "Goyal")[0] for setting in ("no warm-up", "square root", "no scaling")]
assert warm - small < 0.2 < 1 < min(others) - small

# %% [markdown]
# Only the linear rule with gradual warm-up is. But every rule has a limit: beyond some batch the linear rule's rate is
# too high for the network, and runs fail. [Lesson 05](../../lectures/05_large_batches.ipynb) finds this batch, with 32
# seeds.
#
# A config calls the samples that a rank takes at once `train_micro_batch_size_per_gpu`. A rank can add the gradients of
# several such *micro-batches* before a step: `gradient_accumulation_steps` is their number.

# %% [raw]
# 06_zero

# %% [raw]
# 06_zero_exercises

# %% tags=["statement"]
# "the result is the same"
assert len({row(f"Stage{stage}", "all_gathers per step")[0] for stage in (1, 2, 3)}) == 1

# %% [markdown]
# ## So far
#
# A larger batch needs a larger learning rate, up to a limit. Stage 1 shards the optimizer's states, stage 2 the
# gradients too, stage 3 also the parameters; the result is the same.
