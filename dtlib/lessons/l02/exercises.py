# %% [markdown]
# # 02 MPI and pi: exercises
#
# Three exercises: *predict* (one minute), *fix* (five minutes), *build* (twenty minutes). A check looks at your answer
# on all ranks and says what is wrong; check again for the next hint.
#
# **You need** the lecture [02 MPI and pi](../lectures/02_pi.ipynb). Answers: [solutions](../solutions/02_pi_exercises.ipynb).

# %% tags=["nbval-ignore-output"]
from dtlib import lab; lab.engines(3)  # no dtlib? Kernel > Change Kernel

# %% [markdown]
# We use three ranks, because they show more mistakes: three is not a power of two, and most numbers do not divide
# evenly by it.

# %%
# %%px
import dtlib
from dtlib import pi

world = dtlib.init()

# %% [markdown]
# ## Predict
#
# With 10,000 points the standard error of the estimate is about 0.016. By how much is the estimate typically off with
# 100 times as many points? And how many points would it take to be off by 0.004? Replace each `None`; an answer that is
# 10 % off counts as right.

# %% tags=["stub"]
lab.predict("error-of-a-million", None)
lab.predict("points-for-0.004", None)

# %% tags=["solution"]
lab.predict("error-of-a-million", 0.0016)
lab.predict("points-for-0.004", 160_000)

# %% [markdown]
# ## Fix: all ranks draw the same points
#
# Somebody wrote this function. Each rank counts its slice, the counts are added, and the estimate looks fine. But the
# estimate is worse than it should be: on three ranks the first third of the points is counted three times, and the rest
# never.
#
# Fix it: together the ranks must count the points 0 to `points - 1`, each point once. The function returns the count of
# its own rank. Mind the remainder: 1,000 points do not divide evenly by three.
#
# You may use `comm.rank` and `comm.size`, and `pi.count_compiled(start, stop)`, which counts the points from `start` to
# `stop - 1`.

# %% tags=["stub"]
# %%px
def count_my_points(points, comm):
    count = points // comm.size
    return pi.count_compiled(0, count)

# %% tags=["solution"]
# %%px
def count_my_points(points, comm):
    start = points * comm.rank // comm.size
    stop = points * (comm.rank + 1) // comm.size
    return pi.count_compiled(start, stop)

# %%
lab.check("pi-streams")

# %% [markdown]
# This bug is common: all ranks draw the same points. Here they use the same slice; in other programs they use the same
# seed. Nobody notices, because every single estimate looks right. Only the error shows the bug. Here is the proof for
# three ranks: with the same darts on all of them, the error is that of one rank.

# %%
import math

from dtlib import pi

n = 10**5
same = [pi.Estimate(n, pi.count_compiled(0, n, seed)).pi - math.pi for seed in range(200)]
own = [pi.Estimate(3 * n, pi.count_compiled(0, 3 * n, seed)).pi - math.pi for seed in range(200)]
scatter = [math.sqrt(sum(error**2 for error in errors) / len(errors)) for errors in (same, own)]
print(f"the same darts on 3 ranks:    error {scatter[0]:.4f}")
less = scatter[0] / scatter[1]
print(f"own darts on each of 3 ranks: error {scatter[1]:.4f}, {less:.1f} times less (√3 is 1.7)")

# %% tags=["statement"]
# "with the same darts on all of them, the error is that of one rank"
# "With 10,000 points the standard error of the estimate is about 0.016."
assert found(r"([\d.]+) times less \(√3 is ([\d.]+)\)") == [1.7, 1.7]
assert abs(4 * (0.785 * 0.215 / 10_000) ** 0.5 - 0.016) < 0.001

# %% [markdown]
# ## Build: pi on ranks
#
# Write `estimate_pi(points, comm)`:
#
# 1. find this rank's slice of the points,
# 2. count those inside, with one of the kernels of `pi`,
# 3. add the counts of all ranks,
# 4. return the estimate of pi, a number, **on every rank**.
#
# The estimate must be right for any number of points, even if they do not divide evenly, or if there are fewer points
# than ranks. The check compares your estimate with the serial one, to six digits, and looks at which rank counted which
# points.
#
# `comm.mpi` is mpi4py's communicator. `comm.mpi.allreduce(number)` returns the sum on every rank, and
# `comm.mpi.reduce(number, root=0)` on rank 0 alone.

# %% tags=["stub"]
# %%px
def estimate_pi(points, comm):
    ...

# %% tags=["solution"]
# %%px
def estimate_pi(points, comm):
    start, stop = pi.slice_of(points, comm.rank, comm.size)
    inside = comm.mpi.allreduce(pi.count_compiled(start, stop))
    return 4 * inside / points

# %%
lab.check("pi-on-ranks")

# %% [markdown]
# ## If you have time
#
# - What happens to the estimate if one rank does not call `allreduce`? Guess, try it, press Stop or wait ten seconds,
#   and bring the ranks back with `%px dtlib.reset()`.
# - In a terminal: `dtlib pi --points 1e10 --ranks 2`. How long would 10¹² points take? What would you gain?
