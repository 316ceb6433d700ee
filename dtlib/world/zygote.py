"""The process that ranks are forked from: it imports their modules once and waits for launchers (launcher.c).

    launcher                    zygote                  rank
    connect ------------------> fork -----------------> read arguments, environment, folder of the launcher
    ("forked", process) <------------------------------ can it look freshly started? otherwise it ends (forked.py)
    send streams -------------------------------------> run
    ("ended", status) <-------- wait for it <---------- end
    (ends) -------------------> kill it --------------> (is killed)

The zygote forks only while it has one thread and has not loaded MPI. Once a file of dtlib has changed, it stops forking
and restarts as soon as it has no ranks.

All its ranks have the same hash seed, so sets iterate in the same order on all of them. ``DTLIB_ZYGOTE=off`` starts
ranks with separate seeds, which exposes programs that wrongly rely on the order of a set.
"""

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from dtlib.world import forked, forking

IMPORTS = (
    *("numpy", "torch", "torch.utils.data", "threadpoolctl", "ipykernel.kernelapp", "ipyparallel.engine.app"),
    *("ipyparallel.engine.datapub", "ipyparallel.controller.app", "ipyparallel.cluster.cluster"),
    *("dtlib.training", "dtlib.recovery", "dtlib.pi", "dtlib.lab.engines.on_ranks", "dtlib.lab.engines.keeper"),
)
# Imported once the zygote is idle. torch's optimizers import torch._dynamo at their first step.
LATE_IMPORTS = ("numba", "torch._dynamo")
QUIET = 3.0  # idle seconds before LATE_IMPORTS is imported


def main() -> None:
    """Run the zygote that ``forking.command`` describes; does not return."""
    folder, listener, _, *imports = sys.argv[2:]
    zygote = Zygote(folder, socket.socket(fileno=int(listener)), imports)
    signal.signal(signal.SIGTERM, zygote.end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forked.set_title(["dtlib: ranks are forked from this process"])
    try:
        zygote.load()
    except BaseException:
        zygote.end()
    connection, launcher = zygote.serve()  # returns in ranks only
    forked.live(connection, launcher, zygote.pid)


class Zygote:
    """The zygote's state, and its loop over launchers and ranks."""

    def __init__(self, folder: str, listener: socket.socket, imports: list[str]):
        self.pid = os.getpid()
        self.folder, self.listener, self.imports = folder, listener, imports
        self.ranks: dict = {}  # process -> connection to its launcher
        self.events = select.epoll()
        self.environment = forked.environment_of("self")  # imports change os.environ
        self.again = [sys.executable, *sys.orig_argv[1:]]
        self.loaded = False  # whether LATE_IMPORTS was imported

    def load(self) -> None:
        """Import the modules of ranks; end if a fork would not be safe afterwards."""
        for name in (*IMPORTS, *self.imports):
            importlib.import_module(name)
        self.files = _own_files()
        self.state = _state(self.files)
        if reason := cannot_fork():
            print(reason, file=sys.stderr)
            self.end()
        _tidy()

    def load_late_imports(self) -> None:
        """Import the modules that are slow and needed by few ranks."""
        self.loaded = True
        for name in LATE_IMPORTS:
            with suppress(Exception):  # the rank that needs it will report the error
                importlib.import_module(name)
        _tidy()

    def serve(self) -> tuple[socket.socket, int]:
        """Fork a rank for each launcher; return only in the rank, with its launcher's connection and process id."""
        # Python writes to `wakeup_writer` on every signal. So the end of a rank (SIGCHLD) wakes up the poll below.
        wakeup_reader, wakeup_writer = socket.socketpair()
        wakeup_writer.setblocking(False)
        wakeup_reader.setblocking(False)
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.events.register(self.listener, select.EPOLLIN)
        self.events.register(wakeup_reader, select.EPOLLIN)
        while True:
            waits = not self.loaded and not self.ranks  # importing would disturb ranks that measure time
            ready = self.events.poll(QUIET if waits else None)
            if not ready and waits:
                self.load_late_imports()
            for handle, _ in ready:
                if handle == wakeup_reader.fileno():
                    wakeup_reader.recv(4096)
                    self.report_ended_ranks()
                    # The other events may belong to connections that were closed just now.
                    break
                if handle != self.listener.fileno():
                    self.kill(handle)
                elif (accepted := self.accept()) is not None:
                    connection, launcher = accepted
                    try:
                        rank = os.fork()
                    except OSError:  # no memory, or too many processes: the launcher starts its program itself
                        connection.close()
                        continue
                    if rank == 0:
                        # In the rank: close all of the zygote's sockets.
                        signal.set_wakeup_fd(-1)
                        for each in (self.events, self.listener, wakeup_reader, wakeup_writer, *self.ranks.values()):
                            each.close()
                        return connection, launcher
                    self.ranks[rank] = connection
                    # Poll only for the end of the connection; data on it are for the rank.
                    self.events.register(connection, select.EPOLLRDHUP)

    def accept(self) -> tuple[socket.socket, int] | None:
        """Accept a launcher of this user; return None if there is none, or if nothing may be forked now."""
        if _state(self.files) != self.state and not self.ranks:
            os.set_inheritable(self.listener.fileno(), True)
            signal.set_wakeup_fd(-1)
            # Restart with the changed files. Launchers that connect meanwhile wait in the socket's queue.
            os.execve(sys.executable, self.again, self.environment)
        connection, _ = self.listener.accept()
        launcher, user = forking.owner(connection)
        changed = bool(self.ranks) and _state(self.files) != self.state
        if user == os.getuid() and launcher and not changed and not cannot_fork():
            return connection, launcher
        connection.close()
        return None

    def report_ended_ranks(self) -> None:
        """Send the exit status of ended ranks to their launchers."""
        for rank in list(self.ranks):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                with self.ranks.pop(rank) as connection:
                    with suppress(FileNotFoundError):  # the launcher ended first
                        self.events.unregister(connection)
                    with suppress(OSError):
                        connection.send(forked.MESSAGE.pack(forked.ENDED, status), socket.MSG_DONTWAIT)

    def kill(self, handle: int) -> None:
        """Kill the rank whose launcher has ended, and the rank's children."""
        self.events.unregister(handle)
        for rank, connection in self.ranks.items():
            if connection.fileno() == handle:
                for end in (os.killpg, os.kill):  # before the rank has a process group, only kill works
                    with suppress(ProcessLookupError):
                        end(rank, signal.SIGKILL)

    def end(self, *_: object) -> None:
        """End with all ranks and remove the files; in a forked process do nothing."""
        if os.getpid() == self.pid:
            with suppress(OSError):
                os.unlink(os.path.join(self.folder, forking.SOCKET))
                os.rmdir(self.folder)
            os._exit(0)


def cannot_fork() -> str:
    """Return why a fork of this process would not be safe; an empty string if it is safe."""
    if "mpi4py.MPI" in sys.modules:
        return "MPI is loaded"
    threads = len(os.listdir("/proc/self/task"))
    return f"there are {threads} threads" if threads > 1 else ""


def _tidy() -> None:
    """Free garbage and freeze all other objects, so that ranks copy few pages of the zygote's memory."""
    gc.collect()
    gc.freeze()
    with suppress(AttributeError):  # not every C library has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def _own_files() -> list[str]:
    """Return the files of dtlib that are imported."""
    home = str(Path(__file__).parents[1]) + os.sep
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    return sorted(file for file in files if file.startswith(home))


def _state(files: list[str]) -> tuple[list[str], list[tuple]]:
    """Return the installed packages, and the times at which these files were changed."""
    # Compare names, which include versions. The folder's time says nothing, because imports may write its __pycache__.
    installed = sorted(name for name in os.listdir(sysconfig.get_path("purelib")) if name.endswith(".dist-info"))
    changed = []
    for file in files:
        with suppress(OSError):
            found = os.stat(file)
            changed.append((file, found.st_mtime_ns, found.st_size))
    return installed, changed
