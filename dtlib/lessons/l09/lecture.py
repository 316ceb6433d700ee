# %% [markdown]
# # 09 Feeding the accelerators
#
# Ninety minutes. An accelerator that waits for its data is an expensive heater. You write the same samples in several
# formats and feed them to emulated accelerators. You see why accelerators starve, and how to prevent it. Then you stop
# in the middle of an epoch and continue with a different number of ranks, without losing a sample.
#
# **Questions.** How many bytes per second does a model need? Which format, how many workers? What does an accelerator
# do while it waits? How do you resume an epoch?
#
# **Afterwards you can** estimate what storage has to deliver; measure *accelerator utilisation* honestly; choose a
# format by the files that it opens and the bytes that it reads; give the position in an epoch by one number.
#
# **You need** lesson 03, and must know what a batch is.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
import tempfile
import time
from pathlib import Path

import numpy as np

from dtlib.lessons.l09 import figures
from dtlib.storage import Cached, Loader, loader, mlperf, open_samples, order
from dtlib.storage import page_cache, preprocessing, stage, utilisation, write
from dtlib.storage.utilisation import EmulatedAccelerator, measure

lab_folder = tempfile.TemporaryDirectory(prefix="dtlib-09-")
folder = Path(lab_folder.name)

# %%
# %%px
from pathlib import Path

import dtlib
from dtlib.storage import Loader, open_samples, page_cache
from dtlib.storage.utilisation import EmulatedAccelerator, measure

world = dtlib.init()
comm = world.comm

# %% [markdown] tags=["half-day"]
# ## On paper first
#
# A step reads `batch` samples and then computes for some seconds. If the accelerator must never wait, storage has to
# deliver batch x bytes / seconds. MLPerf Storage, a benchmark, publishes these three numbers for real models.
#
# **Predict.** UNet3D on an A100 takes 7 samples of 146.6 MB, and 0.636 s per step. How many GB/s does it need? By what
# factor is this more than BERT needs on a V100 (48 samples of 2500 bytes in 0.968 s)?

# %% tags=["half-day", "stub"]
lab.predict("demand-of-unet3d", None)
lab.predict("times-the-demand", None)

# %% tags=["half-day", "solution"]
lab.predict("demand-of-unet3d", 1.6)
lab.predict("times-the-demand", 13_000)

# %% tags=["half-day"]
here = Path.cwd()
above = (folder / "data" for folder in (here, *here.parents))
TABLE = next(data for data in above if data.is_dir()) / "mlperf_storage_workloads.csv"
rows = [
    (w.name, w.accelerator, w.form, f"{w.record_bytes:,}", w.batch, w.compute_seconds,
     f"{w.bytes_a_second / 1e9:.4f}") for w in mlperf.published(TABLE)
]
headers = ("model", "accelerator", "format", "bytes per sample", "batch", "s per step", "GB/s")
lab.table(rows, headers, "MLPerf Storage 0.5 to 3.0, github.com/mlcommons/storage; GB/s derived")

# %% tags=["half-day", "statement"]
# "UNet3D on an A100 takes 7 samples of 146.6 MB, and 0.636 s per step."
# "BERT needs on a V100 (48 samples of 2500 bytes in 0.968 s)"
assert row("unet3d", "MLPerf")[-4:-1] == [146_600_628, 7, 0.636] and row("bert", "MLPerf")[-4:-1] == [2500, 48, 0.968]

# %% tags=["statement"]
# "UNet3D on a B200 has 0.162 s per step"
# "That is 7.0 GB/s; whole rows would need 33."
assert rows("unet3d", "MLPerf")[2][-2] == 0.162
assert round(row("dlrm", "MLPerf")[-1], 1) == 7.0 and round(761 * 16_384 / 0.000375 / 1e9) == 33

# %% [markdown]
# **Question the number.** At least one of these rows was not measured. UNet3D on a B200 has 0.162 s per step, and
# MLPerf's file gives the source: half of the H100's 0.323 s. Such a row is only an expectation, but people buy storage
# for it. And DLRM reads 40 of its columns, 160 of 761 bytes per sample. That is 7.0 GB/s; whole rows would need 33.
#
# ## One set of samples, four formats
#
# The usual first advice on input: decode *once*, before training. A raw sample here is an image (JPEG), an annotation
# (JSON) and a text. A binary record holds the same data in arrays. All binary records have the same length.

# %% tags=["nbval-ignore-output"]
raw = list(preprocessing.raw_samples(1920))
began = time.perf_counter()
records = [preprocessing.record_of(*sample) for sample in raw]
decoded = time.perf_counter() - began
began = time.perf_counter()
stored = [np.frombuffer(record.tobytes(), preprocessing.RECORD) for record in records]
copied = time.perf_counter() - began
print(f"decoding takes {1e6 * decoded / 1920:.0f} us a sample,", end=" ")
print(f"copying its record in memory {1e6 * copied / 1920:.1f} us")
print(f"raw {sum(len(part) for sample in raw for part in sample):,} bytes,", end=" ")
print(f"binary {sum(record.nbytes for record in records):,} bytes")

# %% tags=["claim"]
# "decode *once*, before training"
assert copied < decoded

# %% tags=["statement"]
# "The disadvantage: binary records are larger."
raw, binary = found(r"raw ([\d,]+) bytes, binary ([\d,]+) bytes")
assert binary > raw

# %% [markdown]
# The disadvantage: binary records are larger. (NVIDIA's DALI decodes during training, on the GPU; TensorFlow's
# `tf.data` decodes in parallel on the CPU.)
#
# The formats are *one file per sample*; *shards*, files with many records each; *tar*, archives with many records,
# which webdataset reads; and *Parquet*, which stores columns. A reader is a torch data set that finds a sample by its
# number. In a shard all records are equally long: the position of a record is its number times the length.
#
# **Predict.** 1920 samples, 384 in each shard. How many files are opened in an epoch, with one file per sample, and
# with shards?

# %% tags=["stub"]
lab.predict("opens-of-an-epoch", {"files": None, "shards": None})

# %% tags=["solution"]
lab.predict("opens-of-an-epoch", {"files": 1920, "shards": 5})

# %%
counted = {}
for form in ("files", "shards", "tar", "parquet"):
    write(folder / form, records, preprocessing.RECORD, form, per_shard=384, row_group=64)
    reader = open_samples(folder / form)
    for batch in Loader(reader, batch_size=32, prefetch=0):
        pass
    counted[form] = reader.files.counters
opens = {form: counters.totals()["opens"] for form, counters in counted.items()}

# %%
rows = [
    (form, *(f"{c.totals()[count]:,}" for count in ("opens", "reads", "bytes")),
     f"{c.randomness:.0%}") for form, c in counted.items()
]
headers = ("format", "opens", "reads", "bytes", "jumping reads")
lab.table(rows, headers)

# %% tags=["statement"]
# "With one file per sample, no read jumps inside a file"
assert row("parquet", "jumping reads")[1] == 30 * 3 + 5 and row("files", "jumping reads")[-1] == 0 and row("files", "jumping reads")[0] == 1920

# %% [markdown]
# A read *jumps* unless it starts where its file's last read ended. With one file per sample, no read jumps inside a
# file: only the files are in random order. Parquet reads 30 groups of 3 columns, and 5 *footers* (tables of positions).
# The loader shuffles whole groups, then rows of a few groups: a weaker shuffle. On a cluster's file system an open is a
# request to a *metadata server*, which all users share. Lustre, a common file system of clusters, can also stripe a
# shard over several disks; a small file gains nothing from that.

# %% [markdown] tags=["half-day"]
# ## Utilisation
#
# You need no model to see whether an accelerator would starve: an EMULATED accelerator sleeps for as long as a step
# would take. Its **utilisation (AU)** is compute time divided by all time, without the first step. MLPerf Storage asks
# for 90 % for most models.

# %%
lab.read(utilisation.measure)

# %% [markdown] tags=["half-day"]
# The workload of UNet3D, scaled to a laptop:

# %% tags=["half-day"]
def written(name, work, *forms):
    """Write the samples in these formats, and return a description of them."""
    for form in forms:
        where, per_shard = folder / name / form, work.samples // 4
        write(where, work.records(), work.dtype, form, per_shard)
    return f"{name}: {work.name}, {work.bytes_a_second / 1e6:,.0f} MB/s\n    {work.scale}"


large = mlperf.named(TABLE, "unet3d", "v100").scaled(
    samples=32, record_bytes=2**22, batch=4, compute_seconds=0.03)
print(written("large samples", large, "shards"))

# %% [markdown]
# BERT's workload is very different:

# %%
small = mlperf.named(TABLE, "bert", "v100").scaled(
    samples=3840, record_bytes=2500, batch=48, compute_seconds=0.006)
print(written("small samples", small, "files", "shards", "tar"))
written("large samples", large, "files", "tar")
workloads = {"large samples": large, "small samples": small}

# %% [markdown] tags=["half-day"]
# An honest measurement begins *cold*. The operating system's *page cache* keeps in memory what was read. From this
# cache every format looks good. So we empty the cache before each measurement, and check that it is empty.

# %% tags=["half-day"]
def fed(where, work, compute=None, **settings):
    """AU from cold files; prints a note if the cache could not be emptied."""
    left = page_cache.drop(where)
    if left is None or left > 0.01:
        print(page_cache.in_words(left))
    settings = {"prefetch": 2 if settings.get("workers") else 0, **settings}
    loader = Loader(open_samples(where), work.batch, **settings)
    return measure(loader, EmulatedAccelerator(compute or work.compute_seconds))

# %% [markdown]
# **Predict.** Workers are processes that read ahead. Do workers help more with large or with small samples in shards?
# (Compare 2 workers with none.)

# %% tags=["stub"]
lab.predict("where-workers-help", None)

# %% tags=["solution"]
lab.predict("where-workers-help", "large samples")

# %% tags=["nbval-ignore-output"]
grid = {
    name: {
        (form, words): fed(folder / name / form, work, workers=workers)
        for form in ("files", "shards", "tar")
        for workers, words in enumerate(("no worker", "1 worker", "2 workers"))
    }
    for name, work in workloads.items()
}
gains = {
    name: found["shards", "2 workers"].au - found["shards", "no worker"].au
    for name, found in grid.items()
}

# %% tags=["nbval-ignore-output"]
for name, found in grid.items():
    figures.utilisation(found, name)

# %% tags=["statement"]
# "Large samples take long to read, so workers can hide much."
none, two = row("shards  no worker", "large samples"), row("shards  2 workers", "large samples")
assert two[0] > none[0] + 5

# %% tags=["statement"]
# "Workers also help with small samples, one in each file"
none, two = row("files   no worker", "small samples"), row("files   2 workers", "small samples")
assert two[0] > none[0] + 5

# %% [markdown]
# Without workers the accelerator waits for every read. Large samples take long to read, so workers can hide much.
# Workers also help with small samples, one in each file: there they hide the opens. Small samples in shards are read so
# quickly that a message from a worker costs about as much; where cores are few, workers can even hurt. **How many
# workers? Measure.**

# %% [markdown] tags=["half-day"]
# ### A faster accelerator starves
#
# Two accelerators use the same reader and files, without reading ahead. One computes for 60 ms per step, the other for
# 6 ms.
#
# **Predict.** Which utilisation is lower, that of "slow accelerator" or that of "fast accelerator"?

# %% tags=["half-day", "stub"]
lab.predict("starves-more", None)

# %% tags=["half-day", "solution"]
lab.predict("starves-more", "fast accelerator")

# %% tags=["half-day", "nbval-ignore-output"]
shards = folder / "large samples" / "shards"
pace = {
    "slow accelerator": fed(shards, large, compute=0.06),
    "fast accelerator": fed(shards, large, compute=0.006),
}
for name, used in pace.items():
    print(f"{name}: {used}")

# %% tags=["half-day", "claim"]
# "Which utilisation is lower, that of "slow accelerator" or that of "fast accelerator"?"
assert pace["fast accelerator"].au < pace["slow accelerator"].au

# %% tags=["statement"]
# "An accelerator that is ten times as fast gets far less than ten times the samples."
slow, fast = (found(f"{which} accelerator: AU \\d+%, ([\\d,]+) samples/s")[0] for which in ("slow", "fast"))
assert fast < 6 * slow

# %% [markdown]
# An accelerator that is ten times as fast gets far less than ten times the samples. Now four ranks feed one accelerator
# each. After each step all wait at a barrier. Crosses in the timeline are reads: there an accelerator starves.

# %%
lab.push(shards=str(shards))

# %%
# %%px
if world.rank == 0:
    page_cache.drop(shards)
comm.barrier()
reader = open_samples(shards)
mine = Loader(reader, 1, world.rank, world.size, prefetch=0)
with dtlib.trace() as trace:
    measure(mine, EmulatedAccelerator(0.008, world.rank), comm=comm)

# %% tags=["nbval-ignore-output"]
lab.pictures.timeline("trace")

# %% [markdown]
# ## How to hide reading
#
# **Prefetch**: a thread reads the next batch while the accelerator uses this one. **Staging**: copy the files to the
# node's own disk first. **Caching**: keep samples in memory after the first epoch. For staging and caching we imitate a
# busy metadata server: every open waits 2 ms. This delay is INJECTED, and the printed lines say so.

# %% tags=["nbval-ignore-output"]
for ahead, words in enumerate(("no batch ahead", "1 batch ahead", "2 batches ahead")):
    print(f"{words}: {fed(shards, large, prefetch=ahead)}")

# %% tags=["nbval-ignore-output"]
one_each = folder / "small samples" / "files"
slow = Loader(open_samples(one_each, open_delay=0.002), small.batch)
print("slow storage:", measure(slow, EmulatedAccelerator(small.compute_seconds), steps=20))
staged = stage(one_each, folder / "local disk")
page_cache.drop(staged.folder)
near = Loader(open_samples(staged.folder), small.batch)
print("staged:  ", measure(near, EmulatedAccelerator(small.compute_seconds), steps=20))

# %% tags=["nbval-ignore-output"]
cached = Cached(open_samples(one_each, open_delay=0.002))
keeps = Loader(cached, small.batch)
for epoch in (1, 2):
    used = measure(keeps, EmulatedAccelerator(small.compute_seconds))
    print(lab.fold(f"epoch {epoch}: {used.counters['hits']:,} samples from memory; {used}"))

# %% tags=["statement"]
# "Prefetch: a thread reads the next batch while the accelerator uses this one."
# "Staging: copy the files to the node's own disk first. Caching: keep samples in memory after the first epoch."
far, near = found(r"slow storage: AU (\d+)%")[0], found(r"staged: +AU (\d+)%")[0]
first, second = found(r"epoch 1: [\d,]+ samples from memory; AU (\d+)%")[0], found(r"epoch 2: .*? AU (\d+)%")[0]
assert near > 2 * far and second > 2 * first

# %% [markdown]
# torch's `DataLoader` has the same settings:
#
# | here | torch | costs |
# |---|---|---|
# | `workers=2` | `num_workers=2`, `persistent_workers=True` | a process each, and a message per batch |
# | `prefetch=2` | `prefetch_factor=2`, for each worker | memory for the batches |
# | `state_dict()` | torchdata's `StatefulDataLoader` | a number; in torch a state per worker |
#
# ## Only the columns that are needed
#
# The table of DLRM, a recommendation model, has 200 columns, and a model may need only a few columns. A record can only
# be read as a whole; Parquet stores the values of a column together.
#
# **Predict.** A table has 40 columns of 4 bytes. We read 2 of them. What fraction of the bytes is read? (0 to 1)

# %% tags=["stub"]
lab.predict("bytes-of-two-columns", None)

# %% tags=["solution"]
lab.predict("bytes-of-two-columns", 0.05)

# %%
wide = np.dtype([(f"feature_{number}", "<f4") for number in range(40)])
values = np.random.default_rng(0).random((100_000, 40), np.float32).view(wide)[:, 0]
write(folder / "table", values, wide, "parquet", per_shard=102_400, row_group=10_240)


def bytes_of(columns):
    reader = open_samples(folder / "table", columns=columns)
    for batch in Loader(reader, 5_120, prefetch=0):
        pass
    return reader.files.counters.totals()["bytes"]


part = bytes_of(["feature_3", "feature_7"]) / bytes_of(None)

# %% tags=["statement"]
# "A little more than 2 / 40"
assert 2 / 40 < found(r"You predicted 0.05, and it came out as ([\d.]+)")[0] < 3 / 40

# %% [markdown]
# A little more than 2 / 40: the footer is read as well. The drawback: Parquet stores rows in groups, and to read one
# row you read its whole group. If several ranks need rows of one group, each reads the whole group.
#
# ## More ranks, one storage
#
# Each rank adds an accelerator. The storage stays the same, and so do the cores. On paper AU is 100 % if reading a
# batch takes less time than computing a step, here 16 ms. We let 1 to 4 ranks read in three ways: without computing;
# with computing; and from a *warm* cache, without computing. The third needs no storage.
#
# **Predict.** From a warm cache, do four ranks read a batch as fast as one rank does? "yes" or "no".

# %% tags=["stub"]
lab.predict("warm-on-four-ranks", None)

# %% tags=["solution"]
lab.predict("warm-on-four-ranks", "no")

# %% tags=["nbval-ignore-output"]
# %%px
def step_of(ranks, seconds, cold=True):
    """Return seconds per step of the fastest of three runs; the first ``ranks`` ranks read."""
    some, fastest = comm.split(int(world.rank >= ranks)), float("inf")
    for _ in range(3):
        if world.rank == 0 and cold:
            page_cache.drop(shards)
        comm.barrier()
        if world.rank < ranks:
            mine = Loader(open_samples(shards), 1, world.rank, ranks)
            used = measure(mine, EmulatedAccelerator(seconds), comm=some)
            fastest = min(fastest, used.seconds / used.steps)
    return fastest


reading = {ranks: step_of(ranks, 0.0) for ranks in (1, 2, 3, 4)}
au = {ranks: 0.016 / step_of(ranks, 0.016) for ranks in (1, 2, 3, 4)}
warm = {ranks: step_of(ranks, 0.0, cold=False) for ranks in (1, 2, 3, 4)}

# %% tags=["nbval-ignore-output"]
reading, au, from_memory = (lab.values(name)[0] for name in ("reading", "au", "warm"))
rows = [
    (ranks, *(f"{1e3 * each[ranks]:.1f}" for each in (reading, from_memory)),
     f"{min(1, 0.016 / batch):.0%}", f"{au[ranks]:.0%}") for ranks, batch in reading.items()
]
headers = ("reading ranks", "ms per batch", "ms, warm cache", "AU by formula", "AU, best of three")
lab.table(rows, headers)
more, of_cores = (each[4] - each[1] for each in (reading, from_memory))
print(f"With four ranks a batch takes {1e3 * more:.1f} ms longer,", end=" ")
print(f"of which {1e3 * of_cores:.1f} ms because ranks share the cores")

# %% tags=["claim"]
# "No measured rank reaches 100 %, not even one that reads alone."
assert max(au.values()) < 1

# %% [markdown]
# If a batch becomes slower even from a warm cache, shared cores are the cause; storage causes only the rest. No
# measured rank reaches 100 %, not even one that reads alone. With more ranks the measured value may be above the value
# on paper: a rank that computes (here: sleeps) leaves its core to the readers. Measure with as many readers as you will
# have, cold and warm.
#
# **Discuss.** Why does a rank that reads alone wait, although its batch is in time on paper? How would you find out how
# sixteen ranks behave?
#
# ## Each sample once, and resuming
#
# Every epoch has its own order, made from the seed and the epoch's number; ranks and workers do not matter. A step
# takes the next ranks x batch samples. **So one number gives the position in an epoch**: the samples taken so far.

# %%
lab.read(order.slice_of_rank)
lab.read(loader.Loader.state_dict)

# %% [markdown]
# **Predict.** Four ranks take five batches of 16 each, reading ahead with a worker. Which number of samples does the
# state contain?

# %% tags=["stub"]
lab.predict("state-of-resuming", None)

# %% tags=["solution"]
lab.predict("state-of-resuming", 320)

# %%
lab.push(small_shards=str(folder / "shards"))

# %%
# %%px
mine = Loader(open_samples(small_shards), 16, world.rank, world.size, workers=1, seed=9)
seen = []
for step, batch in enumerate(mine):
    seen += [bytes(text) for text in batch["text"].numpy()]
    if step == 4:
        break
saved = mine.state_dict()

# %% tags=["statement"]
# "Samples that the worker has read ahead do not count"
assert found(r"You predicted (\d+), and it came out as (\d+)") == [4 * 5 * 16] * 2

# %% [markdown]
# Samples that the worker has read ahead do not count: no rank has trained on them. Now three ranks continue, with
# another batch size and without workers.

# %%
# %%px
if world.rank < 3:
    mine = Loader(open_samples(small_shards), 21, world.rank, 3, seed=9)
    mine.load_state_dict(saved)
    for batch in mine:
        seen += [bytes(text) for text in batch["text"].numpy()]

# %%
every = [text for of_rank in lab.values("seen") for text in of_rank]
print(f"{len(every)} samples arrived, {len(set(every))} different ones")

# %% tags=["statement"]
# "without losing a sample"
assert found(r"(\d+) samples arrived, (\d+) different ones") == [1920, 1920]

# %% [markdown]
# A position *per worker* would need equally many workers later. A count of the samples *read* would lose the samples
# that were read ahead. You write your own state in the exercises.

# %%
lab_folder.cleanup()

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("09")

# %% [markdown]
# ## Summary
#
# - Demand is batch x bytes / seconds of a step. From BERT to UNet3D it grows by a factor of 13,000.
# - Preprocess to binary; put many samples in a file; store columns if a model needs few columns.
# - Prefetch, stage, cache; choose the number of workers by a measurement. Measure cold, or say that the cache was warm.
# - AU = compute time / all time. A faster accelerator starves sooner; many on one storage may starve, too. A warm run
#   shows whether cores are the cause.
# - The order is made from seed and epoch (and Parquet's group size): each sample once, and one number to resume.
#
# Now the [exercises](../exercises/09_data_input_exercises.ipynb).
#
# ## References
#
# - H. Devarajan et al.: DLIO: a data-centric benchmark for scientific deep learning applications. CCGrid 2021.
# - MLCommons: MLPerf Storage, versions 0.5 to 3.0, github.com/mlcommons/storage.
# - A. Aizman, G. Maltby, T. Breuel: High performance I/O for large scale deep learning. IEEE Big Data 2019 (webdataset).
# - N. Dryden et al.: Clairvoyant prefetching for distributed machine learning I/O. SC 2021.
