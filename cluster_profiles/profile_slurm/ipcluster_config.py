"""Engines as ranks of a Slurm job: of the one that this runs in, else of one that is asked for (`salloc`).

    inside a job    mpiexec -n 8 python -m ipyparallel.engine ...
    outside         salloc --nodes=2 --ntasks=8 mpiexec -n 8 python -m ipyparallel.engine ...

Open MPI's mpiexec asks Slurm for the nodes and starts its daemons there by `srun`. The job ends with its mpiexec.
"""

import os
from pathlib import Path
from runpy import run_path

from dtlib.world.allocation import allocation
from dtlib.world.launch import mpiexec_over_nodes

load_subconfig("several_nodes.py", str(Path(__file__).parents[1]))  # noqa: F821
c = get_config()  # noqa: F821
site = run_path(str(Path(__file__).parents[1] / "render.py"))["read_site"]()

ask = []
if allocation() is None:
    ranks = int(os.environ.get("DTLIB_RANKS") or site["nodes"] * site["ranks_a_node"])
    nodes = min(site["nodes"], ranks)
    ask = ["salloc", "--quiet", f"--nodes={nodes}", f"--ntasks={ranks}", f"--time={site['minutes']}"]
    ask += [f"--ntasks-per-node={ranks // nodes}"] * (ranks % nodes == 0)  # else Slurm fills the first node
    ask += [f"--account={site['account']}"] * bool(site["account"])
    ask += [f"--partition={site['queue']}"] * bool(site["queue"])
    ask += [f"--gpus-per-node={site['gpus_a_node']}"] * bool(site["gpus_a_node"])
c.MPILauncher.mpi_cmd = [*ask, *mpiexec_over_nodes(interface=site["interface"])]
