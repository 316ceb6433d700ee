# %% [markdown]
# # 02 MPI and pi
#
# Sixty minutes. You write one program in six ways: a loop in Python, numpy, a compiled loop, MPI ranks, a file shared
# by ranks, a GPU. Every version in Python returns exactly the same count.
#
# **Questions.** Why does an estimate of pi get better so slowly? How do ranks divide work without talking? How much
# faster are they, and what sets the limit? Can we believe a published speed-up?
#
# **Afterwards you can** divide independent work over ranks so that the sum equals the serial sum; say how precise a
# Monte Carlo estimate is; read a speed-up, and find the gaps in a published one.
#
# **You need** [00 Start here](00_start_here.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(4)  # no dtlib? Kernel > Change Kernel

# %%
import math
import time

import numpy as np

from dtlib import pi

# %% [markdown] tags=["half-day"]
# ## The idea
#
# A point with random x and y between 0 and 1 lies inside the quarter circle if x² + y² < 1. The quarter circle
# covers pi/4 of the square. So pi is about four times the fraction of points inside.
#
# Each rank can compute its points alone. Such work is called *embarrassingly parallel*. It is a good start,
# because only the sum at the end needs communication.

# %% [markdown]
# ## Points that everybody can compute
#
# Most random generators are a chain: each number is computed from the previous number. Ranks that share a chain must
# wait for one another; ranks that each start their own chain must take care that the chains do not overlap.
#
# We use a *counter-based* generator: point number `i` depends only on `i` and a seed. Any rank can compute any point at
# any time. Here it is in plain Python, with the loop that counts the points inside.

# %%
lab.read(pi.point, pi.count_loop)

# %% [markdown]
# Names in capitals are constants: `MASK_64` keeps the lower 64 bits, `MASK_31` the lower 31. Three multiplications and
# some shifts stir the bits of `i` until they look random (SplitMix64, from a paper by Steele, Lea and Flood, 2014). The
# result has 64 bits: the upper 31 are x, the lower 31 are y. x and y stay integers, and the circle's radius is 2³¹: a
# point is inside if x² + y² < 2⁶² (`RADIUS_SQUARED`). Nothing is ever rounded.

# %%
for i in range(3):
    x, y = pi.point(i)
    print(i, x, y, "inside" if x * x + y * y < 2**62 else "outside")

# %% [markdown] tags=["half-day"]
# ## A loop
#
# How many points can one core count per second? First a loop in Python, `pi.count_loop`:

# %% tags=["half-day", "nbval-ignore-output"]
def seconds_of(kernel, points, repeats=3):
    """The best of a few runs: others use this computer too."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        kernel(0, points)
        times.append(time.perf_counter() - began)
    return min(times)


rungs = {"Python loop": 10**5 / seconds_of(pi.count_loop, 10**5)}
print(f"{rungs['Python loop']:.2g} points per second")

# %% [markdown]
# ## How good is the estimate?
#
# Each point is a coin that shows *inside* with probability p = pi/4. Of n such coins, the fraction that shows *inside*
# scatters around its mean by √(p(1−p)/n), so the estimate scatters around pi by 4√(p(1−p)/n). That is its *standard
# error*: two out of three estimates are closer to pi than this, nineteen out of twenty closer than twice this.
# (`count_numpy` and `count_compiled` are faster versions of the loop, explained below.)

# %%
estimate = pi.Estimate(10**4, pi.count_numpy(0, 10**4))
print(f"pi = {estimate.pi:.4f} ± {estimate.standard_error:.4f} from {estimate.points:,} points")

# %% [markdown]
# **Predict.** With 100 times as many points, how many times smaller is the standard error?

# %% tags=["stub"]
lab.predict("times-smaller", None)

# %% tags=["solution"]
lab.predict("times-smaller", 10)

# %%
more = pi.Estimate(10**6, pi.count_numpy(0, 10**6))
print(f"pi = {more.pi:.4f} ± {more.standard_error:.4f} from {more.points:,} points")

# %% tags=["statement"]
# "One more digit costs 100 times the points."
few, many = found(r"± ([\d.]+) from 10,000 points")[0], found(r"± ([\d.]+) from 1,000,000 points")[0]
assert 9 < few / many < 11

# %% [markdown]
# One more digit costs 100 times the points. The picture shows it: each dot is the error of one experiment with its own
# points, the line is the standard error.

# %%
sizes = [10**k for k in range(2, 7)]
distances, standard = [], []
for n in sizes:
    runs = [pi.Estimate(n, pi.count_compiled(0, n, seed)) for seed in range(30)]
    distances.append([abs(run.pi - math.pi) for run in runs])
    standard.append(pi.Estimate(n, round(n * math.pi / 4)).standard_error)

# %% tags=["nbval-ignore-output"]
lab.pictures.errors(sizes, distances, standard)
slope = np.polyfit(np.log(sizes), np.log(np.sqrt(np.mean(np.square(distances), axis=1))), 1)[0]
print(f"The error falls as the number of points to the power {slope:.2f}; theory says -0.50.")
assert -0.6 < slope < -0.4

# %% tags=["statement"]
# "each dot is the error of one experiment"
# "the line is the standard error"
assert all(0.6 < measured / standard < 1.5 for measured, standard in (row(f"{10**k:,}", "mean square") for k in range(2, 7)))

# %% [markdown]
# ## numpy, block by block
#
# numpy does the same arithmetic on whole arrays. All points at once would need 16 bytes each, 1.6 GB for 10⁸ points,
# and every operation would read much of that memory. Blocks that fit into a core's cache avoid this.

# %%
lab.read(pi.count_numpy)

# %% tags=["nbval-ignore-output"]
rungs["numpy, by blocks"] = 10**7 / seconds_of(pi.count_numpy, 10**7)
print(f"{rungs['numpy, by blocks']:.2g} points per second")

# %% [markdown] tags=["half-day"]
# ## The loop again, compiled
#
# numba, a compiler for Python, compiles the same loop. A point now stays in two registers of the processor. It is
# computed, tested and dropped, and never reaches memory.

# %% tags=["half-day", "nbval-ignore-output"]
pi.count_compiled(0, 1)  # compile first
rungs["compiled loop"] = 10**8 / seconds_of(pi.count_compiled, 10**8)
print(f"{rungs['compiled loop']:.2g} points per second")

# %% [markdown]
# **Predict.** The loop, numpy and the compiled loop count the same 100,000 points. By how many points do their
# counts differ?

# %% tags=["stub"]
lab.predict("points-apart", None)

# %% tags=["solution"]
lab.predict("points-apart", 0)

# %%
counts = [kernel(0, 10**5) for kernel in (pi.count_loop, pi.count_numpy, pi.count_compiled)]
print(counts)

# %% [markdown] tags=["half-day"]
# ## Ranks that add up their counts
#
# Rank r of N takes slice r of the points. For any number of points, the slices must fit together: no point left out,
# none counted twice.

# %%
lab.read(pi.slice_of)
print([pi.slice_of(10, rank, 3) for rank in range(3)])

# %% [markdown] tags=["half-day"]
# Four processes compute four counts. One `Allreduce` of mpi4py, Python's MPI, adds them up on every rank. This is the
# program's only communication: one number of eight bytes from each rank, for any number of points.

# %% tags=["half-day"]
# %%px
import dtlib
import numpy as np
from dtlib import pi
from mpi4py import MPI

world = dtlib.init()
start, stop = pi.slice_of(10**7, world.rank, world.size)
inside = np.array([pi.count_compiled(start, stop)])
print("points", start, "to", stop - 1, "inside:", inside[0])
total = np.empty_like(inside)
world.comm.mpi.Allreduce(inside, total, op=MPI.SUM)
print("all ranks together:", total[0])

# %% tags=["half-day"]
alone = pi.count_compiled(0, 10**7)
print("this notebook alone:", alone)
assert lab.values("total")[0][0] == alone

# %% tags=["statement"]
# "Exactly the same count."
assert found(r"this notebook alone: (\d+)") == found(r"all ranks together: (\d+)")

# %% [markdown] tags=["half-day"]
# Exactly the same count. A parallel program that gives *exactly* the serial answer is easy to trust and easy to test,
# so this course does the same wherever rounding allows it.

# %% [markdown] tags=["half-day"]
# ## How much faster?
#
# Let 1, 2, 3 and 4 ranks count the same 2·10⁸ points; the others wait in the `all_reduce`. *Speed-up* is the time of
# one rank divided by the time of N ranks; *efficiency* is speed-up divided by N.

# %% tags=["half-day", "nbval-ignore-output"]
# %%px
import time


def seconds_with(active, points=2 * 10**8):
    start, stop = pi.slice_of(points, world.rank, active) if world.rank < active else (0, 0)
    world.comm.barrier()
    began = time.perf_counter()
    world.comm.all_reduce(np.array([pi.count_compiled(start, stop)]))
    return time.perf_counter() - began


fastest = {}
for active in range(1, world.size + 1):
    fastest[active] = min(seconds_with(active) for _ in range(5))

# %% [markdown] tags=["half-day"]
# **Predict.** How many times faster are four ranks than one, on this computer? (The table at the top says how many
# cores it has.)

# %% tags=["half-day", "stub"]
lab.predict("speed-up-of-four", None)

# %% tags=["half-day", "solution"]
lab.predict("speed-up-of-four", 2)

# %% tags=["half-day", "nbval-ignore-output"]
from dtlib.world.machine import usable_cores

seconds = lab.values("fastest")[0]
lab.pictures.speed_up(seconds, usable_cores())

# %% tags=["half-day", "claim"]
# "Up to the number of cores the curve can follow the dashed line"
assert usable_cores() == 1 or seconds[2] < 0.8 * seconds[1]

# %% [markdown] tags=["half-day"]
# Up to the number of cores the curve can follow the dashed line, because these ranks do not wait for one another. If it
# stays below the line, another program used a core (all wait for the slowest rank), the clock is lower, or two of the
# cores in the table at the top are one physical core. With more ranks than cores, ranks take turns: at best the curve
# is flat, and it may fall, because switching takes time. So never start more ranks than cores for such work.

# %% tags=["claim"]
# "With more ranks than cores, ranks take turns: at best the curve is flat, and it may fall"
cores = usable_cores()
assert cores >= 4 or seconds[4] > 0.7 * seconds[cores]

# %% [markdown]
# With more cores the curve would rise until something else sets the limit. This may be memory bandwidth (not here,
# because points stay in registers), the network, or the serial part of the program (Amdahl's law, [lesson
# 11](11_beyond_one_machine.ipynb)). Or it is the chip's power, which forces a lower clock when all cores are busy.

# %% [markdown]
# ## A file of points
#
# Many parallel programs read their data from a file. Here we first write the points to a file, 8 bytes each. Every rank
# opens the file and reads only its own slice, again computed by `slice_of`.

# %%
import tempfile
from pathlib import Path

folder = tempfile.TemporaryDirectory()
file = pi.write_points(Path(folder.name) / "points.bin", 10**6)
print(f"{file.stat().st_size:,} bytes")
lab.push(file=str(file))  # so that the ranks know its name

# %%
# %%px
estimate = pi.count_file(file, world.comm)
print(estimate.inside, "of", estimate.points)

# %%
assert lab.values("estimate")[0].inside == pi.count_numpy(0, 10**6)
folder.cleanup()

# %% [markdown]
# This equals the count of one process. No rank has read the whole file.

# %% [markdown]
# ## A GPU
#
# A GPU runs the compiled loop in thousands of threads. dtlib's kernel (`dtlib/pi/gpu.py`, in Triton, a Python for GPUs)
# keeps the points in registers too, and counts the same points. Without a GPU the next cell says so and continues.

# %% tags=["nbval-ignore-output"]
from dtlib.world.machine import gpu_names

if gpu_names():
    pi.count_gpu(0, 1)  # compile first
    assert pi.count_gpu(0, 10**7) == pi.count_compiled(0, 10**7)
    rungs["one GPU"] = 10**10 / seconds_of(pi.count_gpu, 10**10)
    print(f"{gpu_names()[0]}: {rungs['one GPU']:.2g} points per second")
else:
    print("There is no GPU here.")

# %% [markdown]
# ## The ladder
#
# **Predict.** Which gains more here: compiling the loop, or four ranks instead of one?

# %% tags=["stub"]
lab.predict("brings-more", None)  # "compiling" or "four ranks"

# %% tags=["solution"]
lab.predict("brings-more", "compiling")

# %% tags=["nbval-ignore-output"]
for active in (1, 2, 4):
    rungs[f"{active} rank{'s' * (active > 1)}"] = 2 * 10**8 / seconds[active]
lab.pictures.ladder(rungs)
times = {
    "compiling": rungs["compiled loop"] / rungs["Python loop"],
    "four ranks": rungs["4 ranks"] / rungs["1 rank"],
}

# %% tags=["statement"]
# "Most of the speed comes from one core used well; ranks multiply the speed of one core."
assert row("compiled loop")[-1] > 10 * row("4 ranks")[0] / row("1 rank")[0]

# %% [markdown]
# Most of the speed comes from one core used well; ranks multiply the speed of one core. So first make one process fast,
# then add processes.

# %% [markdown]
# ## We check an article's claims
#
# An article of 2022 on OpenMPI and DeepSpeed (a library for training large models) reports pi by Monte Carlo with 10⁸
# points. Its claims are in `data/claims.csv`:

# %%
rows = [row for row in lab.published("claims.csv") if "OpenMPI" in row["source"]]
claims = [row for row in rows if row["figure"]]
words = [(row["claim"], row["remark"].split(";")[0]) for row in claims]
lab.table(words, ("claim", "as quoted"))

# %% [markdown]
# Any two of these three numbers determine the third.

# %%
one, six, gain = (float(row["figure"]) for row in claims)
print(f"{one:g} s, under {six:g} s: more than {one / six:g} times faster, not {gain:g}")
print(f"{one:g} s, {gain:g} times faster: more than {one / gain:g} s on six, not under {six:g}")
print(f"under {six:g} s, {gain:g} times faster: less than {six * gain:g} s on one, not {one:g}")

# %% tags=["statement"]
# "The three numbers contradict one another, by a factor of at least 1.2."
# "The two times give a speed-up above six on six GPUs, an efficiency above 100 %"
# "The words *about*, *under* and *almost* would just allow 49 and 9.9 seconds."
assert found(r"60 s, under 10 s: more than (\d+) times faster, not (\d+)") == [6, 5] and 6 / 5 >= 1.2
assert 49 / 9.9 < 4.96

# %% [markdown]
# The three numbers contradict one another, by a factor of at least 1.2. The two times give a speed-up above six on six
# GPUs, an efficiency above 100 %, so the times are the least credible. (The words *about*, *under* and *almost*
# would just allow 49 and 9.9 seconds. Also, according to its maker, the computer in the article has one GPU,
# not six.)
#
# Is a minute for 10⁸ points on a GPU fast? Compare with the ranks of this computer.

# %% tags=["nbval-ignore-output"]
table = [(f"{row['claim']}, claimed", row["remark"].split(";")[0]) for row in claims[:2]]
for ranks in (1, 2):  # half of the time for 2·10⁸ points
    table.append((f"{ranks} rank{'s' * (ranks > 1)} here, measured", f"{seconds[ranks] / 2:.3f}"))
lab.table(table, ("10^8 points", "seconds"), align="lr")

# %% tags=["claim"]
# "One core of an ordinary computer is faster than the claim for a GPU, by a wide margin."
assert 10 * seconds[1] / 2 < one

# %% [markdown]
# One core of an ordinary computer is faster than the claim for a GPU, by a wide margin. A speed-up over a slow program
# says little. Ask about this *baseline* first.

# %% [markdown]
# ## The same in R
#
# MPI is not tied to Python. Here is the same program in R, with the package Rmpi (`notebooks/pi.R`):

# %%
from dtlib.lab.course import folder as course_folder

lab.read(course_folder() / "notebooks" / "pi.R")

# %% [markdown]
# To run it on Debian or Ubuntu (tried on Debian 12):
#
#     sudo apt-get install r-base-core r-cran-rmpi
#     sudo apt-get install --no-install-recommends libopenmpi-dev
#     /usr/bin/mpiexec --oversubscribe -n 4 Rscript notebooks/pi.R 1e7
#
# Debian's R needs Debian's `mpiexec`, hence the full path: an MPI program must be started by the MPI that it was built with.
#
# Each rank takes its slice of the points, counts in blocks, and one `allreduce` adds the counts. But R's generator
# (L'Ecuyer-CMRG) is a chain: rank r jumps ahead r times by 2¹²⁷ numbers. So 1, 2 and 4 ranks throw different points,
# and their counts differ.

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
lab.quiz("02")

# %% [markdown]
# ## Summary
#
# - The error of a Monte Carlo estimate falls with the square root of the number of points.
# - A counter-based generator lets every rank compute its own points; `slice_of` divides them without gap or overlap.
# - Parallel and serial counts are exactly equal, which is a simple test.
# - Speed-up ends at the number of cores; efficiency says how well the cores are used.
# - First one fast process, then many. And ask what a speed-up is compared with.
#
# Now the [exercises](../exercises/02_pi_exercises.ipynb): fix a program in which all ranks draw the same points, and
# build pi on ranks yourself.
#
# ## References
#
# - G. L. Steele, D. Lea, C. H. Flood: Fast splittable pseudorandom number generators. OOPSLA 2014.
# - J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.
# - L. Dalcín, Y.-L. L. Fang: mpi4py: status update after 12 years of development. Computing in Science and
#   Engineering 23(4), 2021.
# - P. L'Ecuyer: Good parameters and implementations for combined multiple recursive random number generators.
#   Operations Research 47(1), 1999.
