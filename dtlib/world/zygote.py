"""The process that ranks are forked from: it has imported what they need, and waits for launchers (launcher.c).

    launcher                    zygote                  rank
    connect ------------------> fork -----------------> read arguments, environment, folder of the launcher
    ("forked", process) <------------------------------ can it be as if started anew? else it ends (forked.py)
    send streams -------------------------------------> run
    ("ended", status) <-------- wait for it <---------- end
    (ends) -------------------> kill it --------------> (is killed)

It forks only while it has one thread and no MPI. Once a file of dtlib has changed it forks no more, and begins anew as
soon as it has no ranks.
Ranks share its hash seed, so sets iterate in the same order on all of them. ``DTLIB_ZYGOTE=off`` starts ranks with a
seed each, which shows the mistake of ranks that walk through a set, each in its own order.
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
LATER = ("numba", "torch._dynamo")  # torch's optimizers import the latter at their first step
QUIET = 3.0  # seconds without a request


def main() -> None:
    """Begin as ``forking.command`` says; it returns in no process."""
    folder, listener, _, *imports = sys.argv[2:]
    zygote = Zygote(folder, socket.socket(fileno=int(listener)), imports)
    signal.signal(signal.SIGTERM, zygote.end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forked.set_title(["dtlib: ranks are forked from this process"])
    try:
        zygote.load()
    except BaseException:
        zygote.end()
    connection, launcher = zygote.serve()  # returns in ranks alone
    forked.live(connection, launcher, zygote.pid)


class Zygote:
    def __init__(self, folder: str, listener: socket.socket, imports: list[str]):
        self.pid = os.getpid()
        self.folder, self.listener, self.imports = folder, listener, imports
        self.ranks: dict = {}  # process -> connection to its launcher
        self.events = select.epoll()
        self.environment = forked.environment_of("self")  # imports change it
        self.again = [sys.executable, *sys.orig_argv[1:]]
        self.loaded = False  # what is put off

    def load(self) -> None:
        for name in (*IMPORTS, *self.imports):
            importlib.import_module(name)
        self.files = _own_files()
        self.state = _state(self.files)
        if reason := cannot_fork():
            print(reason, file=sys.stderr)
            self.end()
        _tidy()

    def load_later(self) -> None:
        self.loaded = True
        for name in LATER:
            with suppress(Exception):  # who needs it will see
                importlib.import_module(name)
        _tidy()

    def serve(self) -> tuple[socket.socket, int]:
        """Fork a rank for each launcher; returns in it, with the connection to its launcher, and that one's process."""
        wake, bell = socket.socketpair()
        bell.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.events.register(self.listener, select.EPOLLIN)
        self.events.register(wake, select.EPOLLIN)
        while True:
            waits = not self.loaded and not self.ranks  # ranks that measure must not be disturbed
            ready = self.events.poll(QUIET if waits else None)
            if not ready and waits:
                self.load_later()
            for handle, _ in ready:
                if handle == wake.fileno():
                    wake.recv(4096)
                    self.bury()
                    break  # what else was heard may be of connections that are closed now
                if handle != self.listener.fileno():
                    self.kill(handle)
                elif (accepted := self.accept()) is not None:
                    connection, launcher = accepted
                    try:
                        rank = os.fork()
                    except OSError:  # no memory, or too many processes: the launcher takes the plain way
                        connection.close()
                        continue
                    if rank == 0:
                        signal.set_wakeup_fd(-1)
                        for each in (self.events, self.listener, wake, bell, *self.ranks.values()):
                            each.close()
                        return connection, launcher
                    self.ranks[rank] = connection
                    self.events.register(connection, select.EPOLLRDHUP)  # not what it says, which is for the rank

    def accept(self) -> tuple[socket.socket, int] | None:
        """A launcher of this user; None if there is none, or if nothing may be forked now."""
        if _state(self.files) != self.state and not self.ranks:
            os.set_inheritable(self.listener.fileno(), True)
            signal.set_wakeup_fd(-1)
            os.execve(sys.executable, self.again, self.environment)  # who waits is heard then
        connection, _ = self.listener.accept()
        launcher, user = forking.owner(connection)
        changed = bool(self.ranks) and _state(self.files) != self.state
        if user == os.getuid() and launcher and not changed and not cannot_fork():
            return connection, launcher
        connection.close()
        return None

    def bury(self) -> None:
        """Tell the launchers of ranks that have ended."""
        for rank in list(self.ranks):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                with self.ranks.pop(rank) as connection:
                    with suppress(FileNotFoundError):  # its launcher has ended first
                        self.events.unregister(connection)
                    with suppress(OSError):
                        connection.send(forked.MESSAGE.pack(forked.ENDED, status), socket.MSG_DONTWAIT)

    def kill(self, handle: int) -> None:
        """End the rank whose launcher has ended, with what it has started."""
        self.events.unregister(handle)
        for rank, connection in self.ranks.items():
            if connection.fileno() == handle:
                for end in (os.killpg, os.kill):  # before it has a group of its own there is only itself
                    with suppress(ProcessLookupError):
                        end(rank, signal.SIGKILL)

    def end(self, *_: object) -> None:
        """End, with the ranks, and leave no file; what a fork inherits of it does nothing."""
        if os.getpid() == self.pid:
            with suppress(OSError):
                os.unlink(os.path.join(self.folder, forking.SOCKET))
                os.rmdir(self.folder)
            os._exit(0)


def cannot_fork() -> str:
    """Why a fork of this process would not be sound; empty where it is."""
    if "mpi4py.MPI" in sys.modules:
        return "MPI is loaded"
    threads = len(os.listdir("/proc/self/task"))
    return f"there are {threads} threads" if threads > 1 else ""


def _tidy() -> None:
    """Little that a rank writes to shall be shared with what it does not."""
    gc.collect()
    gc.freeze()
    with suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _own_files() -> list[str]:
    """Those of dtlib that are imported."""
    home = str(Path(__file__).parents[1]) + os.sep
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    return sorted(file for file in files if file.startswith(home))


def _state(files: list[str]) -> tuple[list[str], list[tuple]]:
    """What is installed, and when these files were changed."""
    # By names, which have versions: when the folder was changed says nothing, as an import may write its __pycache__.
    installed = sorted(name for name in os.listdir(sysconfig.get_path("purelib")) if name.endswith(".dist-info"))
    changed = []
    for file in files:
        with suppress(OSError):
            found = os.stat(file)
            changed.append((file, found.st_mtime_ns, found.st_size))
    return installed, changed
