# %% [markdown]
# # 11 Beyond one machine
#
# Sixty minutes. You run the same cells on a laptop and on a cluster, measure how far a machine scales, model larger
# machines, and read about hundreds of GPUs.
#
# **Questions.** What changes in a program outside the laptop? Up to how many ranks does it get faster? What does "90 %
# on 512 GPUs" mean?
#
# **Afterwards you can** start a script with mpiexec, and read each line of a GPU job; distinguish strong and weak
# scaling; use Amdahl's law, and know its limits; choose an all-reduce for a thousand ranks; prepare a first job.
#
# **You need** [03 Collectives](03_collectives.ipynb) and the first half of [04 Data
# parallelism](04_data_parallel.ipynb). You need no cluster: if we cannot measure a value, we model it, and draw it
# dashed.

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
import csv
from pathlib import Path

from dtlib.lessons.l11 import figures
from dtlib.theory import collectives, scaling
from dtlib.world.machine import usable_cores

# %%
# %%px
import time

import dtlib
import torch
from dtlib import pi

world = dtlib.init()
comm = world.comm

# %% [markdown]
# ## The same cell
#
# Where does each rank run?

# %% tags=["nbval-ignore-output"]
# %%px
place = f"node {world.node} of {world.nodes}, local rank {world.local_rank}"
print(f"rank {world.rank} of {world.size} on {place}")

# %% [markdown]
# In a job of two nodes under Slurm, a cluster's scheduler, the same notebook says `node 1 of 2` on half of the ranks.

# %%
figures.machine()

# %% [markdown]
# (Speeds range from an A100 of 2020 to a B200 of 2024.) A program may *not* assume that
#
# - a file that one rank writes is visible to the others: that needs a shared folder;
# - the other ranks are on `localhost`; a port that is free here is free there;
# - rank 5 has GPU 5 (choose by `local_rank`, a rank's number on the node).
#
# ## One script, started in many ways
#
# In plain mpi4py:

# %%
script = Path("..") / "pi_mpi4py.py"
lab.read(script)

# %%
lab.mpiexec(script, ranks=2)

# %% [markdown]
# On a cluster you request such a run. A *batch script* lists the machines and the commands, and the scheduler runs it
# when machines are free. Here is one for a training on eight GPUs, for Slurm. Read it line by line. **Which line would
# you forget?**

# %%
print(figures.gpu_job())

# %% [markdown]
# Lines with `#SBATCH` are the request. The commands after them run only on the *first* machine: `srun` starts torchrun
# on both. Submit it with `sbatch gpu_job.sh`. PBS has `#PBS -l select=2:ncpus=32:ngpus=4` and `qsub`; a program in
# mpi4py takes `mpiexec` in place of `srun torchrun`. Scripts for your site: `cluster_profiles/README.md`.
#
# **Discuss.** torchrun starts processes, but no MPI. What would `pi_mpi4py.py` print under `torchrun --nproc-per-node 2`?
#
# ## Strong and weak scaling
#
# *Strong scaling*: the work stays the same, and each rank has less; ideally N ranks take an N-th of the time. *Weak
# scaling*: each rank's work stays the same; ideally the time stays the same.
#
# **Predict.** With more ranks than this machine has cores, which efficiency falls: "strong", "weak", "both" or "none"?

# %% tags=["stub"]
lab.predict("beyond-the-cores", None)

# %% tags=["solution"]
lab.predict("beyond-the-cores", "both")

# %%
# %%px
def seconds_on(k, points):
    """The first k ranks count points together while the others wait."""
    comm.barrier()
    began = time.perf_counter()
    if comm.rank < k:
        pi.count_on_ranks(points, teams[k])
    took = time.perf_counter() - began if comm.rank < k else 0.0
    return max(comm.all_gather_object(took))


teams = {k: comm.split(0 if comm.rank < k else 1) for k in (1, 2, 3, 4)}
pi.count_compiled(0, 1)  # compiling is not counting
strong, weak = {k: [] for k in teams}, {k: [] for k in teams}
for _ in range(5):  # in turns: a disturbance affects all
    for k in teams:
        strong[k].append(seconds_on(k, 5 * 10**8))
        weak[k].append(seconds_on(k, k * 25 * 10**7))

# %% tags=["nbval-ignore-output"]
figures.scaling(lab.values("strong")[0], lab.values("weak")[0], usable_cores())

# %% tags=["claim"]
# "strong scaling gets little or no faster, weak scaling takes longer."
cores, alone, four = usable_cores(), *(lab.values("weak")[0][k] for k in (1, 4))
shared, as_cores = (lab.values("strong")[0][k] for k in (4, min(4, cores)))
assert cores >= 4 or sorted(four)[2] > 1.3 * sorted(alone)[2]
assert cores >= 4 or sorted(shared)[2] > 0.6 * sorted(as_cores)[2]

# %% [markdown]
# Marks are medians of five runs, bars the range. Up to the dotted line there is a core for each rank. If efficiency
# falls before it, other programs use the cores, or two cores are threads of one physical core. Right of the line, read
# seconds in the table *as text*: strong scaling gets little or no faster, weak scaling takes longer. If bars overlap,
# five runs show no difference. A plot of scaling needs the number of cores, and bars.
#
# ## Amdahl's law
#
# Some work is *serial*, not divided: reading the input, printing on rank 0, a step that all ranks wait for. Serial work
# takes a fraction *s* of the time on one rank. On N ranks the serial time stays the same, and the rest takes an N-th of
# its time:
#
# $$\text{speed-up} = \frac{1}{s + (1 - s) / N}$$
#
# **Predict.** A tenth is serial. What is the speed-up on 4 ranks, and at most, with any number of ranks?

# %% tags=["stub"]
lab.predict("amdahl", {"4 ranks": None, "any number": None})

# %% tags=["solution"]
lab.predict("amdahl", {"4 ranks": 3.08, "any number": 10})

# %% [markdown]
# Measured on an *emulated* accelerator, which sleeps instead of computing:

# %%
# %%px
SERIAL, DIVIDED = 0.03, 0.27  # seconds


def emulated_job(k):
    """A tenth on rank 0 while the others wait; then k ranks divide the rest."""
    runs = []
    for _ in range(3):
        comm.barrier()
        began = time.perf_counter()
        if comm.rank == 0:
            time.sleep(SERIAL)
        comm.broadcast(torch.zeros(1))
        if comm.rank < k:
            time.sleep(DIVIDED / k)
        comm.barrier()
        runs.append(max(comm.all_gather_object(time.perf_counter() - began)))
    return min(runs)


emulated = {k: emulated_job(k) for k in (1, 2, 3, 4)}

# %% tags=["nbval-ignore-output"]
emulated = lab.values("emulated")[0]
title = "A tenth of the work is serial (EMULATED); dashed: Amdahl's law"
figures.beyond(emulated, lambda n: scaling.amdahl(0.1, n), 1024, title)

# %% tags=["claim"]
# "Measured on an emulated accelerator"
assert 2.5 < emulated[1] / emulated[4] < 3.2

# %% tags=["statement"]
# "On 64 ranks all others wait for rank 0 nearly nine tenths of the time."
# "ideally N ranks take an N-th of the time"
models = {n: row(f"{n:,}", "A tenth of the work is serial")[-1] for n in (64, 1024)}
assert 0.85 < 0.1 * models[64] < 0.9 and models[1024] < 10  # the serial tenth, over the time on 64 ranks

# %% [markdown]
# Filled marks were measured, with a broadcast and barriers, which Amdahl's law ignores. On 64 ranks all others wait for
# rank 0 nearly nine tenths of the time.
#
# Clusters are useful because people run larger jobs on them (J. L. Gustafson, 1988): the parallel part grows, the
# serial part does not. This is weak scaling. Training uses it: more GPUs, larger batches.
#
# ## A training step, modelled
#
# In data parallelism nothing is serial, but every step ends with an all-reduce. A model of 25 million parameters has
# 100 MB of gradients. Let a rank compute for 0.2 s on its batch, a message take 5 µs, and the network move 12.5 GB/s.
# Weak: each rank keeps its batch. Strong: ranks divide the batch, and the 0.2 s.

# %%
NETWORK = {"count": 100e6, "latency": 5e-6, "bandwidth": 12.5e9}
ranks = [2**power for power in range(13)]
weak_model = {n: 0.2 / scaling.step(n, 0.2, **NETWORK) for n in ranks}
strong_model = {n: 0.2 / n / scaling.step(n, 0.2 / n, **NETWORK) for n in ranks}

# %%
both = {"weak": weak_model, "strong": strong_model}
figures.modelled(both, "efficiency", "A step of data parallelism")

# %% tags=["statement"]
# "a rank sends little more with 4,096 ranks than with 8, and the fastest algorithm has few rounds."
# "Strong scaling ends where a rank's computing is as short as the all-reduce"
few, many = row("8", "A step of data"), row("4,096", "A step of data")
assert few[0] == many[0] == 93 and many[1] == 0 < few[1] and 2 * 4095 / 4096 < 1.15 * 2 * 7 / 8
assert 100 > row("8", "A step of data")[1] > 50 > row("16", "A step of data")[1]  # 0.2 s / 8 are 25 ms, the all-reduce 14

# %% [markdown]
# Strong scaling ends where a rank's computing is as short as the all-reduce, which does not get shorter. Weak scaling
# hardly ends: a rank sends little more with 4,096 ranks than with 8, and the fastest algorithm has few rounds. Real
# curves are lower: links are shared, and one rank is always late.
#
# **Discuss.** Overlap ([04](04_data_parallel.ipynb)) hides communication behind computing. Which of the two curves does
# it help more, and up to which number of ranks?
#
# ## What 90 % on 512 GPUs means
#
# Horovod's authors published scaling efficiencies: 90 % for Inception V3 and ResNet-101, 68 % for VGG-16. Most people
# quote the first:

# %%
with open(Path("..") / ".." / "data" / "horovod_scaling.csv") as file:
    published = next(csv.DictReader(file))
print(f"{published['model']} on {published['gpus']} GPUs: {published['scaling_efficiency_pct']} %")
print(published["source"])

# %% tags=["statement"]
# "90 % for Inception V3 and ResNet-101, 68 % for VGG-16"
assert found(r"on (\d+) GPUs: (\d+) %") == [512, 90]

# %% [markdown]
# **Predict.** By what factor are these 512 GPUs faster than one GPU, in images per second?

# %% tags=["stub"]
lab.predict("times-of-512", None)

# %% tags=["solution"]
lab.predict("times-of-512", 461)

# %%
gpus, share = int(published["gpus"]), float(published["scaling_efficiency_pct"]) / 100
times = share * gpus
print(f"{times:.0f} times the speed of one GPU: the work of {(1 - share) * gpus:.0f} GPUs is lost")
print(f"a step takes {1 / share - 1:.0%} longer than on one GPU")

# %% [markdown]
# This is *weak* scaling, of *throughput*: each GPU keeps its batch. The number does not say how long training takes
# (lesson 05), or how fast one GPU is: a slower program has a better efficiency. Few parameters and much computing, as
# in Inception V3, is the easy case. Our formula for 512 ranks without overlap (*nothing hidden*), with more and more
# parameters for the same computing:

# %%
for million in (25, 140, 700, 3500):
    seconds = scaling.step(512, 0.2, 4e6 * million, 5e-6, 12.5e9)
    print(f"{million:5} million parameters: efficiency {0.2 / seconds:4.0%} without overlap")

# %% tags=["statement"]
# "with more and more parameters for the same computing"
# "Few parameters and much computing, as in Inception V3, is the easy case"
kept = [found(f"{million} million parameters: efficiency +(\\d+)%")[0] for million in (25, 140, 700, 3500)]
assert kept == sorted(kept, reverse=True) and kept[0] > 90 and abs(kept[1] - 68) < 3

# %% [markdown]
# **Three questions for any such figure:** strong or weak? Efficiency relative to which base, one GPU or one node? What
# is the time to a result?
#
# ## Why a ring of 1,024 is slow for small messages
#
# The ring sends the fewest bytes. But each chunk visits all ranks in turn, twice. **Predict.** How many rounds does an
# all-reduce of 1,024 ranks take as a ring? And with Rabenseifner's algorithm, which halves the array with a partner
# log2 N times and then doubles it again?

# %% tags=["stub"]
lab.predict("rounds-of-1024", {"ring": None, "rabenseifner": None})

# %% tags=["solution"]
lab.predict("rounds-of-1024", {"ring": 2046, "rabenseifner": 20})

# %% [markdown]
# The trace shows four ranks:

# %%
# %%px
sent = {}
for algorithm in ("ring", "rabenseifner"):
    with dtlib.trace() as trace:
        comm.all_reduce(torch.ones(1024), algorithm=algorithm)
    sent[algorithm] = trace.sent()
if comm.rank == 0:
    for algorithm, (messages, count) in sent.items():
        print(f"{algorithm}: {messages} messages, {count} bytes")

# %% tags=["statement"]
# "The same bytes in fewer messages."
(many, sent), (few, as_much) = found(r"ring: (\d+) messages, (\d+) bytes"), found(r"rabenseifner: (\d+) messages, (\d+) bytes")
assert few < many and sent == as_much

# %% [markdown]
# The same bytes in fewer messages. For many ranks we use the model of lesson 03 (5 µs, 25 GB/s):

# %%
def milliseconds(algorithm, count):
    sizes = [2**power for power in range(1, 13)]
    return {n: 1e3 * collectives.cost("all_reduce", algorithm, n, count, 5e-6, 25e9) for n in sizes}


names = {"ring": "ring", "doubling": "recursive_doubling", "Rabenseifner": "rabenseifner"}
small = {name: milliseconds(algorithm, 4e6) for name, algorithm in names.items()}
figures.modelled(small, "ms", "All-reduce of 4 MB", form=".2f", log=True)

# %% tags=["nbval-ignore-output"]
large = {name: milliseconds(algorithm, 4e9) for name, algorithm in names.items()}
figures.modelled(large, "ms", "All-reduce of 4 GB", form=".0f", log=True)

# %% tags=["statement"]
# "At 4 MB on 1,024 ranks the ring pays 2,046 latencies, and takes 25 times as long as Rabenseifner's."
# "At 4 GB the two hardly differ."
ring, _, halving = row("1,024", "All-reduce of 4 MB")
assert round(ring / halving) == 25 and found(r"ring: you predicted (\d+)") == [2046]
ring, _, halving = row("1,024", "All-reduce of 4 GB")
assert ring < 1.05 * halving

# %% [markdown]
# At 4 MB on 1,024 ranks the ring pays 2,046 latencies, and takes 25 times as long as Rabenseifner's. At 4 GB the two
# hardly differ. So a library chooses: dtlib in `dtlib/comm/selection.py`, NCCL among ring, tree and others.
#
# ## Two hosts, measured
#
# Two hosts with two ranks each are connected by TCP, with 5 ms and 20 MB/s (network namespaces of one machine).
#
# **Predict.** By the model of lesson 03, which all-reduce of 4 MB is fastest: `"ring"` (6 rounds of 1 MB) or
# `"recursive_doubling"` (one round between the hosts, with two arrays of 4 MB on one link)?

# %% tags=["stub"]
lab.predict("fastest-by-the-model", None)

# %% tags=["solution"]
lab.predict("fastest-by-the-model", "ring")

# %%
modelled = {"ring": 6 * (5 + 1000 / 20), "recursive_doubling": 5 + 2 * 4 * 1000 / 20}
print({name: f"{took:.0f} ms" for name, took in modelled.items()})
measured = figures.slow_network()
lab.table(*figures.milliseconds_of(measured, "all-reduce"))

# %% tags=["statement"]
# "The ring sends the fewest bytes, but is not the fastest here"
# "A round of the ring took 107 ms, not 55"
table = {way: row(way, "all-reduce of 4 MB: ms") for way in ("ring", "tree", "recursive_doubling", "rabenseifner")}
assert all(min(table, key=lambda way: table[way][column]) == "recursive_doubling" for column in (0, 3))
assert found(r"'ring': '(\d+) ms', 'recursive_doubling': '(\d+) ms'") == [330, 405] and round(table["ring"][3] / 6) == 107

# %% [markdown]
# The ring sends the fewest bytes, but is not the fastest here: it uses the link between the hosts six times in a row.
# Doubling uses it once. A round of the ring took 107 ms, not 55: over TCP messages cost more than the model. So measure
# before you choose (`python -m benchmarks slow-network`, as root). Brackets show the middle half of the ratios to the
# ring: if two brackets overlap, neither algorithm has won.
#
# ## Your first job: a checklist
#
# 1. Your job runs on the laptop on 2 ranks.
# 2. It chooses its GPU by `local_rank`, and reads its data from a shared folder, not from your home.
# 3. It saves a checkpoint, and you have resumed from one. Jobs end at their time limit.
# 4. Request one node and five minutes first, then two nodes.
# 5. Let it print the number of ranks and nodes. A wrong launcher gives N worlds of one rank each: `dtlib.init()` refuses
#    that.
# 6. Name the network (`interface` in site.toml). A wrong network can work, but much more slowly.
# 7. Compare one step on 1 node and on 2. Below 80 % efficiency? More nodes will not fix it.
# 8. Request enough cores for ranks and their data loaders; ranks' threads must not compete (`OMP_NUM_THREADS`).
# 9. Look at the queue (`squeue --me`, `qstat -u $USER`); end failed jobs (`scancel`, `qdel`).
# 10. Open no port to other machines unless you must, and keep your keys private: `dtlib doctor` looks for open ports.

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("11")

# %% [markdown]
# ## Summary
#
# - The same cells and script run on a laptop and on a cluster; only the launcher of the ranks differs.
# - Strong scaling: the same work, and Amdahl's limit. Weak scaling: the work grows, and the batch too.
# - A published efficiency is mostly weak scaling of throughput. Ask for the base, and for the time to a result.
# - Rings of many ranks are slow for small messages. Halving and doubling sends the same bytes in 2 log2 N rounds.
#
# Now the [exercises](../exercises/11_beyond_one_machine_exercises.ipynb).
#
# ## References
#
# - G. M. Amdahl: Validity of the single processor approach to achieving large scale computing capabilities. AFIPS, 1967.
# - J. L. Gustafson: Reevaluating Amdahl's law. CACM 31(5), 1988.
# - A. Sergeev, M. Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow. arXiv:1802.05799, 2018; the
#   three efficiencies: its docs/benchmarks.rst.
# - R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH. IJHPCA 19(1), 2005.
