# %% [markdown]
# # D One model over several devices
#
# Twenty-seven minutes. Layers are grouped into stages, and a batch is cut into micro-batches. Then you find a better
# order of the passes. **Your turn**: two schedules (fifteen minutes).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel
from dtlib.lab import explorer
from dtlib.lessons.l07 import figures
from dtlib.schedule import draw, gpipe, one_f_one_b, simulate

# %% [raw]
# 07_pipelines

# %% [raw]
# 07_schedule_puzzle_exercises

# %% [markdown]
# ## 1F1B
#
# The usual order of level 2 is *1F1B* (PipeDream, 2019; DAPPLE, 2021): each rank alternates *one forward, one
# backward*. Rank r of p keeps p - r activations at most, for any number of micro-batches. The
# upper picture shows GPipe, the lower one 1F1B:

# %%
both = {"GPipe": simulate(gpipe(4, 8)), "1F1B": simulate(one_f_one_b(4, 8))}
figures.picture(both)

# %% tags=["statement"]
# "Rank r of p keeps p - r activations at most"
# "The bubble is the same, the memory is not."
of_gpipe, eager = row("GPipe", "idle / makespan"), row("1F1B", "idle / makespan")
assert of_gpipe[:3] == eager[:3] and of_gpipe[3:] == [8] * 4 and eager[3:] == [4 - rank for rank in range(4)]

# %% [markdown]
# The bubble is the same, the memory is not. So large trainings run 1F1B. In any order, the gradients equal those of one
# process: [lesson 07](../../lectures/07_pipelines.ipynb) shows this.

# %% [markdown]
# ## So far
#
# A pipeline sends little, but its ranks wait: more micro-batches make the bubble small, and 1F1B keeps few activations.

# %% [markdown]
# ## Which cut, when?
#
# A *node* is a machine of several GPUs.
#
# Read from top to bottom, and stop where the model fits. `lab.chart()` asks four more questions, which lessons
# [08](../../lectures/08_tensor_and_hybrid.ipynb), [12](../../lectures/12_sequences.ipynb) and
# [12b](../../lectures/12b_experts.ipynb) explain.

# %%
lab.chart(short=True)

# %% [markdown]
# ## Quiz
#
# Six questions.

# %% tags=["nbval-ignore-output"]
lab.quiz("two-hours")

# %% [markdown]
# ## Afterwards
#
# At home: the puzzle's [third level](../../exercises/07_schedule_puzzle_exercises.ipynb),
# [pi and speed-up](../../lectures/02_pi.ipynb), [Horovod and torch's DDP](../../lectures/04_data_parallel.ipynb), and
# [two real models](../../lectures/10_two_models.ipynb).
