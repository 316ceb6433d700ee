"""Engines as ranks on the machines that site.toml names, started by ssh: a lab, or instances of a cloud.

All of them see the same folders under the same names, and let you in without a password.
"""

from pathlib import Path
from runpy import run_path

from dtlib.errors import DtlibError
from dtlib.world.launch import mpiexec_over_nodes

load_subconfig("several_nodes.py", str(Path(__file__).parents[1]))  # noqa: F821
c = get_config()  # noqa: F821
site = run_path(str(Path(__file__).parents[1] / "render.py"))["read_site"]()

if not site["hosts"]:
    raise DtlibError('profile_ssh needs machines: name them in cluster_profiles/site.toml, as hosts = ["n1", "n2"].')
hosts = [f"{host}:{site['ranks_a_node']}" for host in site["hosts"]]
c.MPILauncher.mpi_cmd = mpiexec_over_nodes(hosts=hosts, agent=site["ssh"], interface=site["interface"])
