"""Keep a world on one machine private: its ports cannot be reached from other machines.

    processes that listen everywhere       how they are restricted
    ranks: Open MPI                        shared memory only, without tcp; chosen before MPI starts
    ranks: gloo and NCCL                   the loopback interface, set before a group is created
    ranks: torch's store                   a file instead (comm/torch/store.py)
    mpiexec: Open MPI's                    no option helps; a preloaded library replaces its `bind`

Settings of the user stay as they are. With several machines nothing is restricted, because ranks must reach each other.
"""

import ctypes
import functools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.world.compiled import compiled

# Inside one machine messages go through shared memory. Searching for fast networks costs a second per start.
SHARED_MEMORY = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
# Bytes of shared memory that each rank needs. If they are missing, Open MPI needs tcp.
SEGMENT = 2**24
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Variables in which launchers pass the number of ranks on this machine and in total.
COUNTS = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
SCHEDULERS = ("PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID")


def all_ranks_here() -> bool:
    """Return True if the launcher started all ranks on this machine; without a launcher there is one rank."""
    for here, everywhere in COUNTS:
        if everywhere in os.environ:
            return os.environ.get(here) == os.environ[everywhere]
    if "SLURM_STEP_NUM_NODES" in os.environ:
        return os.environ["SLURM_STEP_NUM_NODES"] == "1"
    return not any(name in os.environ for name in ("PMIX_RANK", "PMI_RANK"))


@contextmanager
def shared_memory() -> Iterator[None]:
    """Set variables while MPI starts, so that it opens no port if all ranks are on this machine.

    Processes that this process starts later do not inherit the variables.
    """
    chosen = {name: value for name, value in SHARED_MEMORY.items() if name not in os.environ}
    if not all_ranks_here() or not _room_in_memory():
        chosen = {}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            os.environ.pop(name, None)


def _room_in_memory() -> bool:
    folder = "/dev/shm"
    if not os.access(folder, os.W_OK):  # Open MPI uses another folder
        return True
    return shutil.disk_usage(folder).free >= 2 * SEGMENT


def use_loopback_for_groups() -> None:
    """Make ``torch.distributed`` groups of this process use the loopback interface."""
    for name in INTERFACES:
        os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")


def starts_only_local_ranks(mpiexec: str) -> bool:
    """Return True if this ``mpiexec``, started here, starts ranks on this machine only."""
    if any("hostfile" in name and name.startswith(("OMPI_MCA_", "PRTE_MCA_")) for name in os.environ):
        return False
    for settings in (Path(mpiexec).resolve().parents[1] / "etc", Path("/etc/openmpi"), Path("/etc/prte")):
        for hosts in settings.glob("*default-hostfile"):
            with suppress(OSError):  # mpiexec cannot read it either
                lines = hosts.read_text(errors="replace").splitlines()
                if any(line.strip() and not line.startswith("#") for line in lines):
                    return False
    # SLURMD_NODENAME is set on the job's node, and not on a login node.
    if "SLURM_JOB_ID" in os.environ:
        return os.environ.get("SLURM_JOB_NUM_NODES") == "1" and "SLURMD_NODENAME" in os.environ
    return not any(name in os.environ for name in SCHEDULERS)


def closed(mpiexec: str) -> list[str]:
    """Return the start of a command line: Open MPI's ``mpiexec``, restricted to loopback if possible."""
    before = os.environ.get("LD_PRELOAD", "")
    try:
        if not starts_only_local_ranks(mpiexec):
            return [mpiexec]
        ours = library()
    except DtlibError:  # `dtlib doctor` reports it
        return [mpiexec]
    env = shutil.which("env") or "/usr/bin/env"
    # Preload the library into mpiexec only: -x restores the old value for the ranks.
    return [env, f"LD_PRELOAD={ours} {before}".strip(), mpiexec, "-x", f"LD_PRELOAD={before}"]


@functools.cache
def library() -> str:
    """Compile the library that restricts mpiexec, on first use; return its path.

    Raises:
        DtlibError: if it cannot be compiled or loaded; the message says why.
    """
    if sys.platform != "linux":
        raise DtlibError("only Linux can load a library into mpiexec")
    path = str(compiled("loopback.c", "-shared", "-fPIC"))
    try:
        # On a disk mounted noexec this fails here, and not later when a learner runs mpiexec.
        ctypes.CDLL(path)
    except OSError as problem:
        raise DtlibError(f"{path} cannot be loaded ({problem})") from None
    return path
