"""Where ranks are forked: from a process that has imported what they need, the zygote, instead of started one by one.

    start_ranks    mpiexec -> launcher --(streams)--> zygote --fork--> rank, as if started anew: forked.py
    (launch.py)               launcher.c  <--(its status)-- zygote.py

Whatever speaks against it, ranks are started one by one, as elsewhere, and nothing is said: that is the plain way.
``DTLIB_ZYGOTE`` names the folder of the zygote that a process and its children use; ``off`` keeps all to the plain way.
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
from dtlib.world.loopback import mpiexec_inside
from dtlib.world.machine import gpu_names

VARIABLE = "DTLIB_ZYGOTE"
PREFIX = "dtlib-zygote-"
SOCKET = "0"  # its name in the zygote's folder, which launcher.c knows
BEGINS = 60  # seconds in which a new folder is let alone
ROOM = 4000  # bytes in the arguments of a zygote for what `ps` shall show of its ranks


def why_not(mpiexec: str) -> str:
    """Why this ``mpiexec`` cannot have ranks forked here; empty where it can."""
    if os.environ.get(VARIABLE) == "off":
        return f"because of {VARIABLE}=off"
    if sys.platform != "linux":
        return "only Linux can fork them safely"
    if not mpiexec_inside(mpiexec):
        return "they may use several nodes"
    if gpu_names():
        return "they use GPUs"
    try:
        program = compiled("launcher.c")
    except DtlibError as problem:
        return str(problem)
    return "" if os.access(program, os.X_OK) else f"{program} is on a disk without permission to execute programs"


def launcher(mpiexec: str) -> list[str]:
    """What stands in front of the command of a rank where there is a zygote to fork it; else nothing."""
    folder = os.environ.get(VARIABLE, "")
    if folder and os.path.exists(os.path.join(folder, SOCKET)) and not why_not(mpiexec):
        return [str(compiled("launcher.c"))]
    return []


def listen(folder: str) -> socket.socket:
    """The socket of a zygote in this folder, to which only its owner may connect."""
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        listener.bind(os.path.join(folder, SOCKET))
    finally:
        os.umask(umask)
    listener.listen(128)
    return listener


def command(folder: str, listener: socket.socket, imports: Iterable[str]) -> list[str]:
    """That of a zygote which hears this socket, and imports these modules beside those that every rank needs."""
    start = "import sys; sys.path[0] = sys.argv[1]; from dtlib.world.zygote import main; main()"
    home = str(Path(__file__).parents[2])
    return [sys.executable, "-c", start, home, folder, str(listener.fileno()), " " * ROOM, *imports]


def new_folder() -> str:
    """A private one for a zygote; those that were left behind by zygotes which were killed are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = left.lstat()
            begins = found.st_mtime > time.time() - BEGINS  # another one, which has no socket yet
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
        except OSError:  # it is busy
            return True
    return True


def owner(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:2]
