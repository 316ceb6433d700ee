# %% [markdown]
# # D One model over two devices, and two models
#
# Twenty-five minutes. Layers are grouped into stages, a batch is cut into micro-batches; then two models train from one
# config. **Your turn**: a schedule (five minutes).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
# %%px --local
from tempfile import mkdtemp

import dtlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dtlib.lab import digits, explorer
from dtlib.lab.lessons.l07 import figures
from dtlib.schedule import draw, gpipe, simulate
from dtlib.training.run import train

# %% [raw]
# 07_pipelines

# %% [raw]
# 07_schedule_puzzle_exercises

# %% [raw]
# 10_two_models

# %% [markdown]
# ## So far
#
# A pipeline sends little, but its ranks wait. A config does what you did by hand. Afterwards: the puzzle's next level,
# and [pi and speed-up](../../lectures/02_pi.ipynb).
