"""Engines as ranks of the PBS job that this runs in: a notebook started inside of one (qsub -I, or jobs/pbs.sh).

mpiexec has the nodes from PBS, and starts its daemons there by `pbs_tmrsh`, or by ssh where that is missing. Not run
where it was written, for want of a PBS: tests look at what it asks for.
"""

import os
import shutil
from pathlib import Path
from runpy import run_path

from dtlib.errors import DtlibError
from dtlib.world.launch import mpiexec_over_nodes

load_subconfig("several_nodes.py", str(Path(__file__).parents[1]))  # noqa: F821
c = get_config()  # noqa: F821
site = run_path(str(Path(__file__).parents[1] / "render.py"))["read_site"]()

if "PBS_NODEFILE" not in os.environ:
    raise DtlibError("profile_pbs runs inside a PBS job alone (PBS_NODEFILE is not set): start one with qsub -I.")
agent = shutil.which("pbs_tmrsh") or "ssh"
command = mpiexec_over_nodes(hostfile=os.environ["PBS_NODEFILE"], agent=agent, interface=site["interface"])
c.MPILauncher.mpi_cmd = command
