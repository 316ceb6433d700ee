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
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from dtlib.errors import DtlibError

# Inside one machine messages go through shared memory; looking for fast networks costs a second a start.
SHARED_MEMORY = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
SEGMENT = 2**24  # bytes that each rank wants in shared memory; where they lack, Open MPI needs its tcp
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Who starts ranks, and tells them how many there are here and in all.
COUNTS = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
SCHEDULERS = ("PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID")
COMPILE_SECONDS = 20


def all_ranks_here() -> bool:
    """Whether the launcher of this process has started all ranks on this machine; without a launcher there is one."""
    for here, everywhere in COUNTS:
        if everywhere in os.environ:
            return os.environ.get(here) == os.environ[everywhere]
    if "SLURM_STEP_NUM_NODES" in os.environ:
        return os.environ["SLURM_STEP_NUM_NODES"] == "1"
    return not any(name in os.environ for name in ("PMIX_RANK", "PMI_RANK"))


@contextmanager
def shared_memory():
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
            if any(
                line.strip() and not line.startswith("#") for line in hosts.read_text(errors="replace").splitlines()
            ):
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
        raise DtlibError("only Linux can put a library in front of mpiexec")
    source = Path(__file__).with_name("loopback.c")
    key = hashlib.sha256(f"{source.read_text()} {platform.machine()} {platform.libc_ver()}".encode()).hexdigest()[:16]
    path = _private_folder() / f"loopback-{key}.so"
    try:
        if not path.exists():
            _compile(source, path)
        ctypes.CDLL(str(path))  # on a disk that allows no programs it fails here, and not in front of the learner
    except OSError as problem:
        raise DtlibError(f"{path} cannot be made or loaded ({problem})") from None
    return str(path)


def _compile(source: Path, path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise DtlibError("there is no C compiler on PATH, such as gcc")
    unfinished = path.with_suffix(f".{os.getpid()}")  # two may compile at once
    command = [compiler, "-shared", "-fPIC", "-O1", "-pipe", "-o", str(unfinished), str(source), "-ldl"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS)
        if ran.returncode:
            said = (ran.stderr.strip() or f"status {ran.returncode}").splitlines()[-1]
            raise DtlibError(f"{compiler} does not compile {source.name} ({said})")
        unfinished.replace(path)
    except subprocess.TimeoutExpired:
        raise DtlibError(f"{compiler} took longer than {COMPILE_SECONDS} s") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _private_folder() -> Path:
    """A folder for the library that nobody else can write, and whose name LD_PRELOAD can hold."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    for folder in (Path(cache).expanduser() / "dtlib", Path(tempfile.gettempdir()) / f"dtlib-{os.getuid()}"):
        if not folder.is_absolute() or any(letter.isspace() or letter == ":" for letter in str(folder)):
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError:
            continue
        others_may_write = status.st_mode & 0o022
        if status.st_uid == os.getuid() and folder.is_dir() and not others_may_write and os.access(folder, os.W_OK):
            return folder
    raise DtlibError("no folder for it is this user's alone: set XDG_CACHE_HOME to one without spaces in its name")
