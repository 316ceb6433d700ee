"""Fork ranks from the zygote, a process that has already imported their modules, instead of starting each from scratch.

    start_ranks    mpiexec -> launcher --(streams)--> zygote --fork--> rank, as if started normally: forked.py
    (launch.py)               launcher.c  <--(its status)-- zygote.py

If forking is impossible, ranks are silently started in the normal way, as on other systems. ``DTLIB_ZYGOTE`` names the
folder of the zygote that a process and its children use; ``off`` disables forking.
"""

import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.world.compiled import compiled
from dtlib.world.loopback import starts_only_local_ranks
from dtlib.world.machine import gpu_names

VARIABLE = "DTLIB_ZYGOTE"
PREFIX = "dtlib-zygote-"
SOCKET = "0"  # the socket's name in the zygote's folder; launcher.c uses the same
BEGINS = 60  # seconds in which a new folder is not removed, even without a socket
TITLE_BYTES = 4000  # bytes reserved in a zygote's arguments, for the titles that `ps` shows for its ranks


def why_not(mpiexec: str) -> str:
    """Return the reason why ranks of this ``mpiexec`` cannot be forked here; an empty string if they can."""
    if os.environ.get(VARIABLE) == "off":
        return f"because of {VARIABLE}=off"
    if sys.platform != "linux":
        return "only Linux can fork them safely"
    if not starts_only_local_ranks(mpiexec):
        return "they may use several nodes"
    if gpu_names():
        return "they use GPUs"
    try:
        program = compiled("launcher.c")
    except DtlibError as problem:
        return str(problem)
    return "" if os.access(program, os.X_OK) else f"{program} is on a disk without permission to execute programs"


def launcher(mpiexec: str) -> list[str]:
    """Return the start of a rank's command: the launcher if a zygote runs, otherwise an empty list."""
    folder = os.environ.get(VARIABLE, "")
    if folder and os.path.exists(os.path.join(folder, SOCKET)) and not why_not(mpiexec):
        return [str(compiled("launcher.c"))]
    return []


def listen(folder: str) -> socket.socket:
    """Return the listening socket of a zygote in this folder; only its owner may connect."""
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        listener.bind(os.path.join(folder, SOCKET))
    finally:
        os.umask(umask)
    listener.listen(128)
    return listener


def command(folder: str, listener: socket.socket, imports: Iterable[str]) -> list[str]:
    """Return the command of a zygote that listens on this socket and imports these extra modules."""
    start = "import sys; sys.path[0] = sys.argv[1]; from dtlib.world.zygote import main; main()"
    home = str(Path(__file__).parents[2])
    return [sys.executable, "-c", start, home, folder, str(listener.fileno()), " " * TITLE_BYTES, *imports]


def new_folder() -> str:
    """Create a private folder for a zygote; remove folders of zygotes that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = left.lstat()
            begins = found.st_mtime > time.time() - BEGINS  # a zygote that starts and has no socket yet
            if found.st_uid == os.getuid() and not begins and not _is_heard(left / SOCKET):
                shutil.rmtree(left, ignore_errors=True)
    return tempfile.mkdtemp(prefix=PREFIX)


def _is_heard(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # busy
            return True
    return True


def owner(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:2]
