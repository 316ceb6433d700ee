# %% [markdown]
# # E Feed them, and train by a config
#
# Fifteen minutes. Fast accelerators starve on slow input. Then one file trains a model that reads digits; and the quiz.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(2)  # no dtlib? Kernel > Change Kernel

# %%
import tempfile
from pathlib import Path

from dtlib.storage import Loader, mlperf, open_samples, page_cache, write
from dtlib.storage.utilisation import EmulatedAccelerator, measure

lab_folder = tempfile.TemporaryDirectory(prefix="dtlib-09-")
folder = Path(lab_folder.name)

# %%
# %%px
import dtlib
from dtlib.training.run import train

world = dtlib.init()
comm = world.comm

# %% [raw]
# 09_data_input

# %% [markdown]
# [Lesson 09](../../lectures/09_data_input.ipynb) measures what helps: other formats, workers and threads that read
# ahead, a copy nearby.

# %% [raw]
# 10_two_models

# %% [markdown]
# ## Which cut, when?
#
# All of it on one page: read from top to bottom, and stop where it fits.

# %%
lab.chart()

# %% [markdown]
# ## Quiz
#
# Six questions, everybody alone. Each answer is explained.

# %% tags=["nbval-ignore-output"]
lab.quiz("half-day")

# %% [markdown]
# ## Afterwards
#
# The [start page](../../start.md) has all lessons and their exercises: [two real models](../../lectures/10_two_models.ipynb)
# under three runtimes, clusters, and faults among them.
