"""A forked process is made like one that was started anew, or ends so that its launcher starts one (zygote.py)."""

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

MESSAGE = struct.Struct("=ii")  # what is said to a launcher, and of which value: those of launcher.c
FORKED, ENDED = 1, 2
PATIENCE = 5  # seconds, with a launcher that has begun to talk
PR_SET_PDEATHSIG, PR_SET_PTRACER = 1, 0x59616D61
# What Python and libraries read while they start or are imported. Where it differs, a fork comes too late.
READ_AT_START = (
    *("PYTHON", "OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "NUMBA_", "NUMPY_", "TORCH", "PYTORCH_", "ATEN_", "LD_"),
    *("MALLOC_", "GLIBC_", "THP_", "MPI4PY_", "LC_", "LANG", "TZ"),
)
THREADS = "OMP_NUM_THREADS"  # which can still be changed
WITHOUT_HARM = (b"THP_MEM_ALLOC_ENABLE", b"TORCH_CPP_LOG_LEVEL")  # for a controller, which is not told them
# Set by scikit-learn and by torch's compiler as they are imported: a fork may have them or not.
SET_BY_IMPORTS = (b"KMP_DUPLICATE_LIB_OK", b"KMP_INIT_AT_FORK", b"TORCHINDUCTOR_CACHE_DIR")
LIBRARIES = b"LD_LIBRARY_PATH"
LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]


def live(connection: socket.socket, launcher: int, zygote: int) -> None:
    """Run what ``launcher`` was to run, and end; does not return."""
    status = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # No session of its own: Linux shares cores among sessions first, so a yield of one would reach no other rank.
        os.setpgid(0, 0)
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Where Yama guards processes: its other ranks may copy from this one's memory.
        libc.prctl(PR_SET_PTRACER, zygote)
        if os.getppid() == zygote:
            arguments = _become(connection, launcher)
            status = _run(arguments)
    finally:
        _leave(status)


def _become(connection: socket.socket, launcher: int) -> list[str]:
    """Take over what the launcher has, once it is sure that this can be done; returns the arguments of Python."""
    connection.settimeout(PATIENCE)
    try:
        old, new = environment_of("self"), environment_of(launcher)
        _, python, *arguments = map(os.fsdecode, _words(f"/proc/{launcher}/cmdline"))
        folder = os.readlink(f"/proc/{launcher}/cwd")
        if python != sys.executable or _too_late(old, new) or _shadowed(arguments, folder):
            os._exit(0)  # the connection ends, so the launcher takes the plain way
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
    set_by_imports = {name: value for name, value in os.environb.items() if old.get(name) != value}
    os.environ.clear()
    os.environb.update(set_by_imports | new)
    _open_streams()
    _draw_anew()
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
    # Away from 0, 1, 2, which they take the place of.
    return [_above_two(handle) for handle in handles]


def _above_two(handle: int) -> int:
    moved = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(handle)
    return moved


def _words(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        return file.read().split(b"\0")[:-1]


def environment_of(process: int | str) -> dict[bytes, bytes]:
    """That with which a process has begun."""
    return dict(entry.partition(b"=")[::2] for entry in _words(f"/proc/{process}/environ"))


def _too_late(old: dict[bytes, bytes], new: dict[bytes, bytes]) -> bool:
    """Whether Python or a library has read something else than what this environment says."""
    if not new.get(THREADS.encode(), b"1").isdigit():
        return True
    names = {name for name in (*old, *new) if os.fsdecode(name).startswith(READ_AT_START)}
    for name in names - {THREADS.encode(), LIBRARIES, *SET_BY_IMPORTS}:
        if name in WITHOUT_HARM and name not in new:
            continue
        # What an import has set here is handed on to all that a rank starts.
        if new.get(name, b"") not in (old.get(name, b""), os.environb.get(name, b"")):
            return True
    folders, wanted = (set(os.fsdecode(each.get(LIBRARIES, b"")).split(":")) - {""} for each in (old, new))
    return not all(glob.glob(f"{folder}/libmpi.*") for folder in folders ^ wanted)  # which mpiexec adds


def _shadowed(arguments: list[str], folder: str) -> bool:
    """Whether these are options of Python, or beside the program a module has the name of one that is imported."""
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
    """A program that is no engine: tqdm would take it for a notebook's kernel, as the zygote has imported this."""
    for name in ("ipykernel.zmqshell", "tqdm.auto", "tqdm.autonotebook"):
        sys.modules.pop(name, None)


def _draw_anew() -> None:
    """What a process draws from the system when it starts, and how many threads it may have."""
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
        numba.config.reload_config()  # it counts cores


def set_title(words: list[str]) -> None:
    """Have `ps` show these words, written over the arguments with which this process began, as far as there is room."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
        title = " ".join(words).encode(errors="surrogateescape")[: end - start - 2]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, title, len(title))
        ctypes.memset(end - 1, ord("."), 1)  # by which the system knows that this is a title


def _run(arguments: list[str]) -> int:
    """As ``python ARGUMENTS`` would; returns the status with which to end."""
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
        for _ in range(2):  # without this file
            trace = trace and trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_main(names: dict, first: str, *rest: str) -> None:
    if first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # what `python -m` calls
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
    """End as Python ends, but for taking apart a thousand modules, which costs a third of a second."""
    for step in (
        threading._shutdown,  # type: ignore[attr-defined]  # what Python calls, too
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
    """What the program held ends as it would: files are written to the end, workers go."""
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
