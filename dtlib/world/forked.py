"""Turn a forked process into one that looks freshly started, or end it so that its launcher starts one (zygote.py)."""

import array
import atexit
import builtins
import ctypes
import fcntl
import gc
import glob
import importlib
import io
import os
import random
import resource
import runpy
import signal
import socket
import struct
import sys
import tempfile
import threading
import types
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from multiprocessing import current_process

MESSAGE = struct.Struct("=ii")  # a message to a launcher: its kind and a value, as in launcher.c
FORKED, ENDED = 1, 2
REPLY_SECONDS = 5  # seconds that a connected launcher may take to answer
PR_SET_PDEATHSIG, PR_SET_PTRACER = 1, 0x59616D61
# Prefixes of variables that Python and libraries read at start or import. If one differs, a fork comes too late.
READ_AT_START = (
    *("PYTHON", "OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "NUMBA_", "NUMPY_", "TORCH", "PYTORCH_", "ATEN_", "LD_"),
    *("MALLOC_", "GLIBC_", "THP_", "MPI4PY_", "LC_", "LANG", "TZ"),
)
THREADS = "OMP_NUM_THREADS"  # the number of threads can still be changed after import
# Set for ranks only. If a process such as a controller lacks them, that does no harm.
HARMLESS_VARIABLES = (b"THP_MEM_ALLOC_ENABLE", b"TORCH_CPP_LOG_LEVEL")
# Set by scikit-learn and by torch's compiler during import: a fork may have these variables or not.
SET_BY_IMPORTS = (b"KMP_DUPLICATE_LIB_OK", b"KMP_INIT_AT_FORK", b"TORCHINDUCTOR_CACHE_DIR")
LIBRARIES = b"LD_LIBRARY_PATH"
LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]


def live(connection: socket.socket, launcher: int, zygote: int) -> None:
    """Run the launcher's program and end; does not return."""
    status = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Stay in the session: Linux divides cores among sessions first, so a yield would not reach ranks in other
        # sessions.
        os.setpgid(0, 0)
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Under Yama, allow the zygote's other ranks to copy from this rank's memory.
        libc.prctl(PR_SET_PTRACER, zygote)
        # The zygote may have ended before prctl took effect.
        if os.getppid() == zygote:
            arguments = _become(connection, launcher)
            status = _run(arguments)
    finally:
        _leave(status)


def _become(connection: socket.socket, launcher: int) -> list[str]:
    """Check that the launcher's program can run here, then copy the launcher's state; return Python's arguments."""
    connection.settimeout(REPLY_SECONDS)
    try:
        old, new = environment_of("self"), environment_of(launcher)
        _, python, *arguments = map(os.fsdecode, _words(f"/proc/{launcher}/cmdline"))
        folder = os.readlink(f"/proc/{launcher}/cwd")
        if python != sys.executable or _too_late(old, new) or _shadowed(arguments, folder):
            # Closing the connection makes the launcher start its program in the normal way.
            os._exit(0)
        _take_limits(launcher)
        connection.send(MESSAGE.pack(FORKED, os.getpid()))
        streams = _receive_streams(connection)
    except (OSError, ValueError):
        os._exit(0)
    connection.close()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(folder)
    # Keep variables that imports have set in the zygote; all others are the launcher's.
    set_by_imports = {name: value for name, value in os.environb.items() if old.get(name) != value}
    os.environ.clear()
    os.environb.update(set_by_imports | new)
    _open_streams()
    _reseed()
    if not any("ipyparallel" in word for word in arguments[:2]):
        _forget_kernels()
    set_title([python, *arguments])
    sys.orig_argv = [python, *arguments]
    tempfile.tempdir = None
    importlib.invalidate_caches()
    return arguments


def _receive_streams(connection) -> list[int]:
    handles = array.array("i")
    data, control, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(3 * handles.itemsize))
    for _, _, body in control:
        handles.frombytes(body)
    if data != b"g" or len(handles) != 3:
        raise ValueError("this is not a launcher")
    # Move them above 0, 1 and 2, which they will replace.
    return [_above_two(handle) for handle in handles]


def _above_two(handle: int) -> int:
    moved = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(handle)
    return moved


def _words(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        return file.read().split(b"\0")[:-1]


def environment_of(process: int | str) -> dict[bytes, bytes]:
    """Return the environment with which a process started."""
    return dict(entry.partition(b"=")[::2] for entry in _words(f"/proc/{process}/environ"))


def _too_late(old: dict[bytes, bytes], new: dict[bytes, bytes]) -> bool:
    """Return True if Python or a library has already read a value that differs in the ``new`` environment."""
    if not new.get(THREADS.encode(), b"1").isdigit():
        return True
    names = {name for name in (*old, *new) if os.fsdecode(name).startswith(READ_AT_START)}
    for name in names - {THREADS.encode(), LIBRARIES, *SET_BY_IMPORTS}:
        if name in HARMLESS_VARIABLES and name not in new:
            continue
        # A rank's children inherit the variables that imports have set here.
        if new.get(name, b"") not in (old.get(name, b""), os.environb.get(name, b"")):
            return True
    folders, wanted = (set(os.fsdecode(each.get(LIBRARIES, b"")).split(":")) - {""} for each in (old, new))
    # Library folders may differ if they contain MPI: mpiexec adds those.
    return not all(glob.glob(f"{folder}/libmpi.*") for folder in folders ^ wanted)


def _shadowed(arguments: list[str], folder: str) -> bool:
    """Return True for options of Python, and if a module beside the program has the name of an imported module.

    A normal start would import the module beside the program.
    """
    takes_a_word = arguments[:1] in (["-c"], ["-m"])
    if len(arguments) < 1 + takes_a_word or (arguments[0].startswith("-") and not takes_a_word):
        return True
    if takes_a_word:
        beside = folder
    else:
        program = os.path.realpath(os.path.join(folder, arguments[0]))
        if not os.path.isfile(program) or program.endswith((".pyc", ".zip", ".pyz")):
            return True
        beside = os.path.dirname(program)
    for entry in os.listdir(beside):
        name = entry.partition(".")[0]
        imported = getattr(sys.modules.get(name), "__file__", None)
        if imported and not os.path.realpath(imported).startswith(os.path.realpath(beside) + os.sep):
            package = os.path.isfile(os.path.join(beside, entry, "__init__.py"))
            if package or entry.endswith((".py", ".so")):
                return True
    return False


def _take_limits(launcher: int) -> None:
    os.sched_setaffinity(0, os.sched_getaffinity(launcher))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, launcher))
    for number in LIMITS:
        limit = resource.prlimit(launcher, number)
        if limit != resource.getrlimit(number):
            resource.setrlimit(number, limit)
    with open(f"/proc/{launcher}/status") as file:
        os.umask(next(int(line.split()[1], 8) for line in file if line.startswith("Umask:")))


def _open_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(  # noqa: SIM115
            number,
            "w" if number else "r",
            buffering=1 if number == 2 or os.isatty(number) else -1,
            errors="backslashreplace" if number == 2 else None,
            closefd=False,
        )
        if number and os.environ.get("PYTHONUNBUFFERED"):
            stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget_kernels() -> None:
    """Remove modules that make tqdm believe it runs in a notebook's kernel: the zygote has imported ipykernel."""
    for name in ("ipykernel.zmqshell", "tqdm.auto", "tqdm.autonotebook"):
        sys.modules.pop(name, None)


def _reseed() -> None:
    """Draw new random seeds and a new key, and set the number of threads, as at a normal start."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.seed()
    current_process().authkey = os.urandom(32)
    if (threads := int(os.environ.get(THREADS, 1))) > 1:
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads)
        torch.set_num_threads(threads)
    if numba := sys.modules.get("numba"):
        numba.config.reload_config()  # numba counts cores


def set_title(words: list[str]) -> None:
    """Let `ps` show these words: write them over this process's arguments, cut to the available space."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
        title = " ".join(words).encode(errors="surrogateescape")[: end - start - 2]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, title, len(title))
        # A non-zero last byte tells Linux that the arguments were replaced by a title.
        ctypes.memset(end - 1, ord("."), 1)


def _run(arguments: list[str]) -> int:
    """Run ``python ARGUMENTS``; return the exit status."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __doc__=None)
    try:
        _run_main(vars(main), *arguments)
    except SystemExit as wanted:
        if wanted.code is None or isinstance(wanted.code, int):
            return (wanted.code or 0) & 0xFF
        print(wanted.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        for _ in range(2):  # without the frames of this file
            trace = trace and trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_main(names: dict, first: str, *rest: str) -> None:
    if first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # as `python -m` does
    elif first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), names)
    else:
        program = os.path.abspath(first)
        sys.path[0], sys.argv = os.path.dirname(os.path.realpath(program)), [first, *rest]
        names.update(__file__=program, __cached__=None, __loader__=SourceFileLoader("__main__", program))
        with open(program, "rb") as file:
            code = compile(file.read(), program, "exec", dont_inherit=True)
        exec(code, names)


def _leave(status: int) -> None:
    """End as Python does, but without tearing down a thousand modules, which takes a third of a second."""
    for step in (
        threading._shutdown,  # type: ignore[attr-defined]  # Python calls it, too
        atexit._run_exitfuncs,
        _let_go,
        _finalize_mpi,
        _flush,
    ):
        with suppress(BaseException):
            step()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _let_go() -> None:
    """Delete the program's objects, so that files are written completely and worker processes end."""
    vars(sys.modules["__main__"]).clear()
    gc.collect()


def _finalize_mpi() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _flush() -> None:
    for each in gc.get_objects():
        if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(OSError, ValueError):
                each.flush()
