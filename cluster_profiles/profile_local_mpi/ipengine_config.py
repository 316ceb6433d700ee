"""What every engine of this profile is told when it starts."""

from dtlib.world.loopback import shared_memory

c = get_config()  # noqa: F821

# ipyparallel starts MPI before any cell runs, so here is the last chance to have it open no port.
with shared_memory():
    from mpi4py import MPI  # noqa: F401
# Engines on this machine are interrupted by their process id: no helper process beside each one.
c.IPEngine.enable_nanny = False
c.HistoryManager.enabled = False
