"""``python until_parent_ends.py PARENT PROGRAM ...``: become PROGRAM, which ends with the process PARENT, on Linux.

A process can only ask for that itself. To do it between fork and exec, as ``preexec_fn`` would, is unsafe where the
parent has threads: the child may wait for a lock that one of them held. So this file is run as a program of its own.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Replace this process by ``command``, to be sent SIGTERM when ``parent`` ends; 0: whoever has started it."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent and os.getppid() != parent:  # it has ended before it could be watched
        sys.exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that would be inherited
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def ends_with_this_process(command: list[str]) -> list[str]:
    """``command``, which Linux ends when this process ends, even by `kill -9`.

    Linux means the thread that starts it, so only the main thread, which lives as long as the process, asks for that.
    """
    import threading

    return ends_with(os.getpid(), command) if threading.current_thread() is threading.main_thread() else command


def ends_with(parent: int, command: list[str]) -> list[str]:
    """The same for another process, or with 0 for that which will start the command."""
    # Without site-packages Python starts fastest.
    return [sys.executable, "-I", "-S", __file__, str(parent), *command] if sys.platform == "linux" else command


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
