"""``python until_parent_ends.py PARENT PROGRAM ...``: become PROGRAM, which ends when the process PARENT ends (Linux).

Only the process itself can request this signal. Requesting it between fork and exec, as ``preexec_fn`` would, is unsafe
if the parent has threads: the child may wait for a lock that one of the threads held. So this file runs as a separate
program.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def exec_command(parent: int, command: list[str]) -> None:
    """Replace this process by ``command``, which gets SIGTERM when ``parent`` ends; 0 means the current parent."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent and os.getppid() != parent:  # the parent ended before prctl took effect
        sys.exit(1)
    # Python ignores these signals, and `command` would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def ends_with_this_process(command: list[str]) -> list[str]:
    """Return ``command`` so that Linux ends it when this process ends, even by `kill -9`.

    Linux ends it with the thread that started it. Only the main thread lives as long as the process, so other threads
    get ``command`` unchanged.
    """
    import threading

    return ends_with(os.getpid(), command) if threading.current_thread() is threading.main_thread() else command


def ends_with(parent: int, command: list[str]) -> list[str]:
    """Return ``command`` so that it ends with the process ``parent``; 0 means the process that starts the command."""
    # -S: Python starts fastest without site-packages.
    return [sys.executable, "-I", "-S", __file__, str(parent), *command] if sys.platform == "linux" else command


if __name__ == "__main__":
    exec_command(int(sys.argv[1]), sys.argv[2:])
