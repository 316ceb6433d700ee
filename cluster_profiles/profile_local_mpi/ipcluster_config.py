"""Engines as MPI ranks on this machine, for dtlib.lab.engines() and for ipcluster start --profile-dir=..."""

from dtlib.world.launch import mpiexec_command, python_of_a_rank, rank_environment
from dtlib.world.machine import usable_cores

c = get_config()  # noqa: F821

c.Cluster.engine_launcher_class = "mpi"
c.Cluster.engine_timeout = 60
# An engine counts as registered at its second heartbeat, and heartbeats are 3 s apart unless told otherwise. With
# 300 misses allowed it takes 30 s of silence, as by default, until an engine counts as dead.
c.Cluster.controller_args = ["--HeartMonitor.period=100", "--HeartMonitor.max_heartmonitor_misses=300"]

c.MPILauncher.mpi_cmd = mpiexec_command()
# dtlib.lab.engines() adds the threads of a rank, which depend on how many ranks it starts.
c.EngineLauncher.environment = rank_environment(usable_cores())
c.MPIEngineSetLauncher.engine_cmd = [*python_of_a_rank(), "-m", "ipyparallel.engine"]
