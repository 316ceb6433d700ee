"""A world on one machine keeps to itself: what its processes listen on cannot be reached from another machine.

    who would listen on every interface    what keeps it inside
    ranks: Open MPI                        shared memory alone, without its tcp; chosen before MPI starts
    ranks: gloo and NCCL                   the loopback interface, named before a group is made
    ranks: torch's store                   a file instead (comm/store.py)
    mpiexec: Open MPI's                    nothing that it can be told; a library that rewrites its `bind`

What the user has set stays as it is. Across machines all of that is left open, as ranks must reach each other.
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

# Inside one machine messages go through shared memory; looking for fast networks costs a second a start.
SHARED_MEMORY = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
SEGMENT = 2**24  # bytes that each rank wants in shared memory; where they lack, Open MPI needs its tcp
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Who starts ranks, and tells them how many there are here and in all.
COUNTS = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
SCHEDULERS = ("PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID")


def all_ranks_here() -> bool:
    """Whether the launcher of this process has started all ranks on this machine; without a launcher there is one."""
    for here, everywhere in COUNTS:
        if everywhere in os.environ:
            return os.environ.get(here) == os.environ[everywhere]
    if "SLURM_STEP_NUM_NODES" in os.environ:
        return os.environ["SLURM_STEP_NUM_NODES"] == "1"
    return not any(name in os.environ for name in ("PMIX_RANK", "PMI_RANK"))


@contextmanager
def shared_memory() -> Iterator[None]:
    """Around the start of MPI: with all ranks here it opens no port. What this process starts later may choose anew."""
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
    if not os.access(folder, os.W_OK):  # Open MPI goes elsewhere
        return True
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize >= 2 * SEGMENT


def groups_inside() -> None:
    """Have the groups of ``torch.distributed`` that this process makes use the loopback interface."""
    for name in INTERFACES:
        os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")


def mpiexec_inside(mpiexec: str) -> bool:
    """Whether this ``mpiexec``, started here, has ranks to start on this machine alone."""
    if any("hostfile" in name and name.startswith(("OMPI_MCA_", "PRTE_MCA_")) for name in os.environ):
        return False
    for settings in (Path(mpiexec).resolve().parents[1] / "etc", Path("/etc/openmpi"), Path("/etc/prte")):
        for hosts in settings.glob("*default-hostfile"):
            with suppress(OSError):  # closed to mpiexec, too
                lines = hosts.read_text(errors="replace").splitlines()
                if any(line.strip() and not line.startswith("#") for line in lines):
                    return False
    if "SLURM_JOB_ID" in os.environ:  # SLURMD_NODENAME: this is the node, and no login node
        return os.environ.get("SLURM_JOB_NUM_NODES") == "1" and "SLURMD_NODENAME" in os.environ
    return not any(name in os.environ for name in SCHEDULERS)


def closed(mpiexec: str) -> list[str]:
    """The command ``mpiexec`` of Open MPI, kept inside where that is possible: the beginning of a command line."""
    before = os.environ.get("LD_PRELOAD", "")
    try:
        if not mpiexec_inside(mpiexec):
            return [mpiexec]
        ours = library()
    except DtlibError:  # `dtlib doctor` says so
        return [mpiexec]
    env = shutil.which("env") or "/usr/bin/env"
    return [env, f"LD_PRELOAD={ours} {before}".strip(), mpiexec, "-x", f"LD_PRELOAD={before}"]  # -x: what ranks get


@functools.cache
def library() -> str:
    """Path of the library that keeps mpiexec inside, compiled by the first who asks for it.

    Raises:
        DtlibError: where it cannot be had; the sentence says why.
    """
    if sys.platform != "linux":
        raise DtlibError("only Linux can load a library into mpiexec")
    path = str(compiled("loopback.c", "-shared", "-fPIC"))
    try:
        ctypes.CDLL(path)  # on a disk that allows no programs it fails here, and not in front of the learner
    except OSError as problem:
        raise DtlibError(f"{path} cannot be loaded ({problem})") from None
    return path
