"""Fork ranks from the zygote, a process that has already imported their modules, instead of starting each from scratch.

    start_ranks    mpiexec -> launcher --(streams)--> zygote --fork--> rank, as if started normally: forked.py
    (launch.py)               launcher.c  <--(its status)-- zygote.py

If forking is impossible, ranks are silently started in the normal way, as on other systems. ``DTLIB_ZYGOTE`` names the
zygote that a process and its children use; ``off`` disables forking. The name is that of a socket in Linux's abstract
namespace: it has no file, so a killed zygote leaves nothing.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.world.compiled import compiled
from dtlib.world.loopback import starts_only_local_ranks
from dtlib.world.machine import gpu_names

VARIABLE = "DTLIB_ZYGOTE"
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
    name = os.environ.get(VARIABLE)
    if name and not why_not(mpiexec) and f"@{name}\n" in Path("/proc/net/unix").read_text(errors="replace"):
        return [str(compiled("launcher.c"))]
    return []


def listen(name: str) -> socket.socket:
    """Return the listening socket of a zygote. Any user may connect; the zygote serves only its own user."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(128)
    return listener


def command(listener: socket.socket, imports: Iterable[str]) -> list[str]:
    """Return the command of a zygote that listens on this socket and imports these extra modules."""
    start = "import sys; sys.path[0] = sys.argv[1]; from dtlib.world.zygote import main; main()"
    home = str(Path(__file__).parents[2])
    return [sys.executable, "-c", start, home, str(listener.fileno()), " " * TITLE_BYTES, *imports]


def owner(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:2]
