"""A hub whose learners' servers are jobs of Slurm: `jupyterhub -f slurm.py`, as root, where `sbatch` works.

The server runs on a job's first node, and lab.engines() takes all tasks of the job. Nodes, ranks, minutes, account and
queue are those of ../site.toml. docs/how-to/run_a_hub.md goes through it.
"""

import socket
import sys
from pathlib import Path
from runpy import run_path

import batchspawner  # noqa: F401  the hub needs it to be told the port of a server
import psutil

load_subconfig("jupyterhub_config.py", str(Path(__file__).parent))  # noqa: F821
c = get_config()  # noqa: F821
site = run_path(str(Path(__file__).parents[1] / "render.py"))["read_site"]()


def address() -> str:
    """Return this machine's IPv4 address for other nodes: of the interface in site.toml, else of the host name."""
    for each in psutil.net_if_addrs().get(site["interface"], []):
        if each.family == socket.AF_INET:
            return each.address
    return socket.gethostbyname(socket.gethostname())


ask = {
    "job-name": "dtlib", "output": "course-%j.log", "nodes": site["nodes"], "ntasks-per-node": site["ranks_a_node"],
    "time": site["minutes"], "account": site["account"], "partition": site["queue"],
    "gpus-per-node": site["gpus_a_node"],
}  # fmt: skip
lines = [f"#SBATCH --{option}={value}" for option, value in ask.items() if value]

c.JupyterHub.hub_bind_url = f"http://{address()}:8081"
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.Spawner.env_keep.append("SLURM_CONF")
c.Spawner.ip = "0.0.0.0"  # on a node, for the hub's proxy
c.Spawner.mem_limit = c.Spawner.cpu_limit = None  # the job's
c.BatchSpawnerBase.batchspawner_singleuser_cmd = str(Path(sys.executable).with_name("batchspawner-singleuser"))
c.BatchSpawnerBase.exec_prefix = "runuser -u {username} --"
lines += ["#SBATCH --chdir={{homedir}}", "#SBATCH --export={{keepvars}}", site["prepare"]]
lines += ["export SLURM_EXPORT_ENV=ALL", "{{cmd}}"]  # what mpiexec starts on other nodes has the job's environment
c.SlurmSpawner.batch_script = "\n".join(["#!/bin/bash", *lines, ""])
