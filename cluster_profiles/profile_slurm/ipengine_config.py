"""What every engine of this profile is told when it starts."""

from pathlib import Path

from dtlib.world.loopback import shared_memory

load_subconfig("several_nodes.py", str(Path(__file__).parents[1]))  # noqa: F821

# With all ranks on one node MPI opens no port; across nodes it has to.
with shared_memory():
    from mpi4py import MPI  # noqa: F401
