"""Monte Carlo pi on MPI ranks: mpiexec -n 4 python pi_mpi4py.py"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
points = 10**7 // comm.size
x, y = np.random.default_rng([2024, comm.rank]).random((2, points))  # a stream of its own for each rank
inside = comm.reduce(int(np.count_nonzero(x * x + y * y <= 1)), root=0)
if comm.rank == 0:
    print(f"pi = {4 * inside / (points * comm.size):.5f} by {comm.size} ranks")
