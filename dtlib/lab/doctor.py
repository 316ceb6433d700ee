"""``dtlib doctor``: report this machine's software and hardware, and every problem with its remedy."""

import importlib.metadata
import importlib.util
import ipaddress
import os
import platform
import shutil
import subprocess
import sys

import dtlib
from dtlib.comm import shared_gpus
from dtlib.errors import DtlibError
from dtlib.world import forking, loopback
from dtlib.world.allocation import allocation
from dtlib.world.launch import (
    INSTALL_MPI,
    check_mpiexec,
    find_mpiexec,
    forked_ranks,
    library_version,
    mpiexec_command,
    mpiexec_error,
    python_of_a_rank,
    rank_environment,
    start_ranks,
)
from dtlib.world.machine import gpu_names, usable_cores
from dtlib.world.processes import Process, end_processes, listening, with_descendants

_COUNT_WORLD = "from dtlib.world import init; print(init().size, flush=True)"
_WAIT = f"{_COUNT_WORLD}; import time; time.sleep(60)"


def report() -> int:
    """Print the findings as a table and as a line for the instructor; return 0 without problems, else 1."""
    import psutil
    from tabulate import tabulate

    rows = []
    for name, find in _CHECKS.items():
        try:
            rows.append(("", name, find()))
        except DtlibError as problem:
            rows.append(("!", name, str(problem)))
    print(tabulate(rows, tablefmt="plain"))
    problems = [name for mark, name, _ in rows if mark]
    print(f"\nWould go wrong: {len(problems)} (marked !)." if problems else "\nNothing would go wrong.")
    # The line names no person and no folder.
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {usable_cores()} cores"
    memory, wrong = psutil.virtual_memory().total / 1e9, ", ".join(problems) or "nothing"
    print(f"For your instructor: dtlib {dtlib.__version__}, {machine}, {memory:.0f} GB, wrong: {wrong}")
    return int(bool(problems))


def _cores() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{usable_cores()} usable; {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB of memory free"


def _mpiexec() -> str:
    path = find_mpiexec()
    return f"{path} ({check_mpiexec(path)})"


def _world_of_two() -> str:
    """Start two real ranks."""
    ran = _ran(
        [*mpiexec_command(2), sys.executable, "-c", _COUNT_WORLD], 2,
        "two ranks did not start within 60 s: check for a firewall or a full /tmp.",
    )  # fmt: skip
    if ran.stdout.split() != ["2", "2"]:
        said = mpiexec_error(ran.stderr + ran.stdout)
        raise DtlibError(f"two ranks do not form a world of two; {said} If this does not help, {INSTALL_MPI}.")
    return "two ranks start and see each other"


def _ran(command: list[str], ranks: int, hangs: str) -> subprocess.CompletedProcess:
    """Run a command in the environment of ``ranks`` ranks; after 60 s, raise an error with the message ``hangs``."""
    environment = {**os.environ, **rank_environment(ranks), "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise DtlibError(hangs) from None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise DtlibError(f"{package} is not installed: run `make lab` in a clone, or reinstall dtlib by pip.") from None


def _ports() -> str:
    """Report which processes listen on ports while two ranks run."""
    job = allocation()
    if job and not job.is_here:
        return (
            f"the {job.nodes} nodes of this job must reach each other: ranks and mpiexec listen on every interface "
            "without encryption; the notebook's controller listens on one, encrypted, and requires keys"
        )
    try:
        ranks = start_ranks(["-c", _WAIT], 2, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except DtlibError:
        return "not checked, because ranks do not start"
    with ranks:
        assert ranks.stdout is not None
        said = [ranks.stdout.readline(), ranks.stdout.readline()]
        found = listening(Process.of(ranks.pid))
        end_processes(with_descendants(Process.of(ranks.pid)))
    if said != [b"2\n", b"2\n"]:
        return "not checked, because ranks do not start"
    outside = {name for name, address, _ in found if not ipaddress.ip_address(address).is_loopback}
    ranks_outside = {name for name in outside if name.startswith("python")}
    reasons = []
    if ranks_outside:
        reasons.append("ranks (OMPI_MCA_btl asks for it, or /dev/shm lacks room)")
    if outside - ranks_outside:
        try:
            loopback.library()
            reasons.append("mpiexec (it may have ranks to start on others)")
        except DtlibError as problem:
            reasons.append(f"mpiexec ({problem})")
    if not reasons:
        return "ranks and mpiexec listen only to this machine"
    return f"other machines can reach {' and '.join(reasons)} while ranks run"


def _torch() -> str:
    version = _version("torch")
    # In a separate process, because a broken torch can crash the process that imports it.
    ran = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
    if ran.returncode:
        last = (ran.stderr.strip() or f"exit status {ran.returncode}").splitlines()[-1]
        raise DtlibError(f"torch {version} cannot be imported ({last}): create that environment again.")
    return version


def _gpus() -> str:
    names = gpu_names()
    if not names:
        return "none; every lesson runs without one"
    way, advice = shared_gpus.transport(), f"; {shared_gpus.ADVICE}"
    return f"{len(names)}: {', '.join(names)}; ranks that share one use {way}{advice * (way != 'NCCL')}"


def _scheduler() -> str:
    found = [name for name, program in {"Slurm": "sbatch", "PBS": "qsub"}.items() if shutil.which(program)]
    if job := allocation():
        found.append(f"in its job {job.job}: {job.nodes} node{'s' * (job.nodes > 1)}, room for {job.ranks} ranks")
    return ", ".join(found) or "none"


def _workshop() -> str:
    from dtlib.lab import course

    folder = course.working_folder()
    exists = (folder / course.START_PAGE).is_file()
    if exists and folder.stat().st_mode & 0o077:
        return f"{folder}, which other users can read: chmod 700 closes it"
    return str(folder) if exists else f"none yet; `dtlib lab` copies one to {folder}, if the folder is empty"


def _engines() -> str:
    from dtlib.lab import course
    from dtlib.lab.engines import workshop

    profile = workshop.profile(course.working_folder())
    if not profile.is_dir():
        return "none running"
    record = workshop.Record(profile)
    if not record.keeper():
        return "none running; they can be started"
    notebooks = ", ".join(sorted({note["notebook"] for note in record.attached()}))
    return f"{record.read('set.json')['ranks']} ranks running for {notebooks}"


def _forked_ranks() -> str:
    """Fork one real rank."""
    try:
        if why := forking.why_not(find_mpiexec()):
            return f"started separately: {why}"
    except DtlibError:
        return "not checked, because there is no mpiexec"
    with forked_ranks():
        ran = _ran(
            [*python_of_a_rank(), "-c", "import sys; print('torch' in sys.modules)"], 1,
            f"a forked rank does not answer: set {forking.VARIABLE}=off to start ranks without forking.",
        )  # fmt: skip
    if ran.stdout.strip() == "True":
        return "forked from a process that has imported torch once"
    return "started separately: a process that has imported torch cannot be forked here"


_CHECKS = {
    "Python": lambda: f"{platform.python_version()} at {sys.executable}", "cores": _cores,
    "MPI library": library_version, "mpiexec": _mpiexec, "ranks": _world_of_two, "ports": _ports, "torch": _torch,
    "GPUs": _gpus, "scheduler": _scheduler, "JupyterLab": lambda: _version("jupyterlab"), "workshop": _workshop,
    "engines": _engines, "start of ranks": _forked_ranks,
}  # fmt: skip
