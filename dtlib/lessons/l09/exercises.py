# %% [markdown]
# # 09 Feeding the accelerators: exercises
#
# *Predict* (two minutes), *fix* two mistakes (ten minutes), *build* the cost of a format (ten minutes) and an epoch that can
# be resumed (twenty-five minutes). Only the first mistake needs ranks.
#
# **You need** the lecture [09 Feeding the accelerators](../lectures/09_data_input.ipynb). Answers:
# [solutions](../solutions/09_data_input_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %%
# %%px
import torch
from torch import distributed as dist

# %%
import math

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# %% [markdown]
# ## Predict
#
# - There are 1000 samples and 3 ranks, with batches of 32 on each rank. How many steps does an epoch have, if no sample
#   may be lost? How many samples does the last step have, over all ranks?
# - A loader has 8 samples in a batch, on one rank. Ten batches have been used for training; the two workers hold four
#   more. Then the training is killed. At which sample, counted from 0, must it resume?

# %% tags=["stub"]
lab.predict("batches-on-three-ranks", {"steps": None, "in the last step": None})
lab.predict("read-ahead-and-killed", None)

# %% tags=["solution"]
lab.predict("batches-on-three-ranks", {"steps": 11, "in the last step": 40})
lab.predict("read-ahead-and-killed", 80)

# %% [markdown]
# ## Fix: samples that nobody reads
#
# `my_samples(comm, count)` returns this rank's part of the samples 0 to count - 1, in random order. The function runs,
# and every rank is busy. But some samples are never read, and others twice. Each rank has its own random numbers.
# Together the ranks must have each sample exactly once. The numbers of samples on two ranks may differ by one at most.
# `dist.broadcast(tensor, group_src=0, group=comm.group)` sends rank 0's numbers to all ranks. Find both mistakes, and
# fix them.

# %% tags=["stub"]
# %%px
def my_samples(comm, count):
    order = torch.randperm(count)
    each = count // comm.size
    return order[comm.rank * each : (comm.rank + 1) * each].tolist()

# %% tags=["solution"]
# %%px
def my_samples(comm, count):
    order = torch.randperm(count)
    dist.broadcast(order, group_src=0, group=comm.group)
    return order[comm.rank :: comm.size].tolist()

# %%
lab.check("shard-fix")

# %% [markdown]
# ## Fix: a loader that reads a sample twice
#
# This stream has two workers now. An epoch takes twice as long, and the loss falls suspiciously fast. Find out why, and
# fix it, so that the workers divide the reading in every epoch:

# %% tags=["stub"]
class Stream(IterableDataset):
    def __init__(self, order, rank, ranks):
        self.order, self.rank, self.ranks = order, rank, ranks

    def __iter__(self):
        return iter(self.order[self.rank :: self.ranks])

# %% tags=["solution"]
class Stream(IterableDataset):
    def __init__(self, order, rank, ranks):
        self.order, self.rank, self.ranks = order, rank, ranks

    def __iter__(self):
        mine = self.order[self.rank :: self.ranks]
        worker = get_worker_info()  # None where there are no workers
        if worker is not None:
            mine = mine[worker.id :: worker.num_workers]
        return iter(mine)

# %% tags=["nbval-ignore-output"]
seen = list(DataLoader(Stream(list(range(8)), 0, 1), batch_size=None, num_workers=2))
print(sorted(seen))

# %%
lab.check("twice-fix")

# %% [markdown]
# ## Build: a format for a budget
#
# Write `epoch_seconds(form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read)`: the
# seconds that storage needs to deliver an epoch. The time to open all files and the time to read all bytes add up. The
# two rates are per second.
#
# - `form` is `"files"` (one file per sample), `"shards"`, `"tar"` or `"parquet"`; the last three have `per_shard` samples
#   in a file.
# - In a tar file each record has a header of 512 bytes, and a record fills whole blocks of 512 bytes.
# - `columns_read` is the fraction of the bytes that is read from Parquet; the other formats read whole records.

# %% tags=["stub"]
def epoch_seconds(
    form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read
):
    ...

# %% tags=["solution"]
def epoch_seconds(
    form, samples, record_bytes, per_shard, opens_a_second, bytes_a_second, columns_read
):
    files = samples if form == "files" else math.ceil(samples / per_shard)
    size = record_bytes
    if form == "tar":
        size = 512 + math.ceil(record_bytes / 512) * 512
    if form == "parquet":
        size = columns_read * record_bytes
    return files / opens_a_second + samples * size / bytes_a_second

# %%
lab.check("format-budget")

# %% [markdown]
# Use your function to choose a format. A metadata server allows 2,000 opens per second, and the disks deliver 1 GB/s.
# Which format do you take for 1.2 million pictures of 110 kB? And for 10 million rows of 760 bytes, if a model needs a
# tenth of each row?

# %%
budgets = {
    "pictures": (1_200_000, 110_000, 1000, 2000, 1e9, 1.0),
    "rows": (10_000_000, 760, 100_000, 2000, 1e9, 0.1),
}
for what, budget in budgets.items():
    for form in ("files", "shards", "tar", "parquet"):
        print(f"{what} as {form}: {epoch_seconds(form, *budget):.1f} s")

# %% tags=["statement"]
# "Which format do you take for 1.2 million pictures of 110 kB? And for 10 million rows of 760 bytes"
seconds = {(what, form): found(f"{what} as {form}: ([\\d.]+) s")[0] for what in ("pictures", "rows") for form in ("files", "shards", "parquet")}
assert seconds["pictures", "shards"] < seconds["pictures", "files"] and seconds["rows", "parquet"] < seconds["rows", "shards"]

# %% [markdown] tags=["solution"]
# Pictures: any format that packs them, because opening 1.2 million files alone takes 600 s. Rows: Parquet, because only
# Parquet can skip columns.

# %% [markdown]
# ## Build: resume in the middle of an epoch
#
# Write a class `Epoch(order, batch_size, rank, ranks)`, one rank's batches of an epoch:
#
# - iterating returns lists of `batch_size` entries of `order`; at the end of the epoch a list may be shorter. Over all
#   ranks each entry appears once, also in a short last step;
# - `state_dict()` returns the position in the epoch, in plain numbers that JSON can store. One rank saves it for all
#   ranks, when all have had equally many batches. It is called while the loop processes a batch, and this batch counts
#   as done;
# - `load_state_dict(state)` continues from this position, on any number of ranks and with any batch size. After that
#   the epoch can be saved again.

# %% tags=["stub"]
class Epoch:
    def __init__(self, order, batch_size, rank, ranks):
        self.order, self.batch_size, self.rank, self.ranks = order, batch_size, rank, ranks

    def __iter__(self):
        ...

    def state_dict(self):
        ...

    def load_state_dict(self, state):
        ...

# %% tags=["solution"]
class Epoch:
    def __init__(self, order, batch_size, rank, ranks):
        self.order, self.batch_size, self.rank, self.ranks = order, batch_size, rank, ranks
        self.taken = 0  # by all ranks

    def __iter__(self):
        while self.taken < len(self.order):
            step = self.order[self.taken : self.taken + self.batch_size * self.ranks]
            self.taken += len(step)
            yield step[self.rank :: self.ranks]

    def state_dict(self):
        return {"samples": self.taken}

    def load_state_dict(self, state):
        self.taken = state["samples"]

# %%
lab.check("resume-build")

# %% [markdown]
# Test save, resume, save, resume: real libraries failed at the second time.
#
# ## If you have time
#
# - `dtlib.storage.Loader` is your class with files, workers and prefetch. Where does it keep `taken`, and which code
#   changes it?
# - Cut the last 100 bytes off a shard of the lecture. What does `open_samples(folder, damaged="skip")` leave out, and how does it
#   know?
# - Make an epoch whose last step is as large as the others. Which samples do you leave out, and does any epoch read
#   them?
# - `pip install torchdata`: save a `StatefulDataLoader` with two workers in mid-epoch, and load it with three workers.
