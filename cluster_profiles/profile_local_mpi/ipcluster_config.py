"""Engines as MPI ranks on this machine, for dtlib.lab.engines() and for ipcluster start --profile-dir=..."""

from dtlib.lab.engines import heartbeats
from dtlib.world.launch import mpiexec_command, python_of_a_rank, rank_environment
from dtlib.world.machine import usable_cores

c = get_config()  # noqa: F821

c.Cluster.engine_launcher_class = "mpi"
c.Cluster.engine_timeout = 60
c.Cluster.controller_args = heartbeats.ARGUMENTS

c.MPILauncher.mpi_cmd = mpiexec_command()
# dtlib.lab.engines() adds the threads of a rank, which depend on how many ranks it starts.
c.EngineLauncher.environment = rank_environment(usable_cores())
c.MPIEngineSetLauncher.engine_cmd = [*python_of_a_rank(), "-m", "ipyparallel.engine"]
