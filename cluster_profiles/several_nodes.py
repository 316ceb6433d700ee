"""What the profiles for several nodes share: who listens where, with which keys, and what a rank is told.

Engines on other nodes must reach the controller, so for them it listens on one address of this machine. Connections are
encrypted, and nobody gets in without the keys (CurveZMQ), which stand in `security/`, readable by their owner alone.
Notebooks reach it on the loopback interface. MPI's own messages between nodes are not encrypted, and ask for no key.
"""

import os
import socket
import sys
from pathlib import Path
from runpy import run_path

import psutil

from dtlib.errors import DtlibError
from dtlib.lab.engines import heartbeats

c = get_config()  # noqa: F821
site = run_path(str(Path(__file__).parent / "render.py"))["read_site"]()


def address_for_nodes() -> str:
    """Return this machine's IPv4 address for other nodes: of the interface in site.toml, else of the host name."""
    found = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    if wanted := site["interface"]:
        if not found.get(wanted):
            raise DtlibError(
                f"interface = {wanted!r} in site.toml has no address here: name one of {', '.join(found)}."
            )
        return found[wanted][0]
    mine = [address for addresses in found.values() for address in addresses if not address.startswith("127.")]
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = None
    if named in mine or not mine:
        return named or "127.0.0.1"
    return mine[0]


c.Cluster.engine_launcher_class = "mpi"
c.Cluster.engine_timeout = 120
heartbeats.slow_down()
c.Cluster.controller_args = heartbeats.ARGUMENTS
c.MPIEngineSetLauncher.engine_cmd = [sys.executable, "-m", "ipyparallel.engine"]

c.IPController.enable_curve = True
c.IPController.engine_ip = os.environ.get("DTLIB_CONTROLLER_IP") or address_for_nodes()
c.IPController.client_ip = "127.0.0.1"

# A helper process beside each engine interrupts it, as no signal reaches another node.
c.IPEngine.enable_nanny = True
c.HistoryManager.enabled = False
