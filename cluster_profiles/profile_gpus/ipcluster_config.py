"""Engines on one machine with GPUs: as on any single machine, and each rank keeps to cores of its own.

Every rank has a GPU by its rank on the node, or shares one where there are fewer (dtlib/lab/engines/on_ranks.py).
"""

from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.world.machine import gpu_names, usable_cores

load_subconfig("ipcluster_config.py", str(Path(__file__).parents[1] / "profile_local_mpi"))  # noqa: F821
c = get_config()  # noqa: F821

gpus = len(gpu_names())
if not gpus:
    raise DtlibError("profile_gpus finds no NVIDIA GPU here: lab.engines() without a profile runs on the cores.")
cores = max(1, usable_cores() // gpus)
command = [word for word in c.MPILauncher.mpi_cmd if word not in ("--oversubscribe", "--bind-to", "none")]
c.MPILauncher.mpi_cmd = [*command, "--map-by", f"slot:PE={cores}:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"]
