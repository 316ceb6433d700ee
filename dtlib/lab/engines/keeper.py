"""The keeper: a process that starts the engines, and ends them when no notebook uses them any more.

It outlives the notebook that started it, so that another notebook can take over. It watches only the notebooks' process
ids, so it also notices a kernel that is killed. Life of a set of engines:

    notebook                     keeper                            engines
    write attached/PID.json
    start the keeper ----------> set.json: the keeper's process
                                 wait for starts of others
                                 start controller, mpiexec ------> register
                                 set.json: connection file
    connect, use ...             wait until a process ends ...
    (ends in any way)            none left: remove set.json, end -> end
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from dtlib.errors import DtlibError
from dtlib.lab.course import PROFILE
from dtlib.lab.engines import start_queue
from dtlib.lab.engines.workshop import Record
from dtlib.world.launch import python_of_a_rank, rank_environment, start_zygote
from dtlib.world.processes import Process, end_processes, in_groups_of, with_descendants
from dtlib.world.until_parent_ends import ends_with_this_process

# Seconds between two checks until the ranks have joined, and on systems that do not report the end of a process.
POLL_SECONDS = 0.5
CHECK_SECONDS = 10


def main() -> None:
    """Record a keeper in set.json, and return; the keeper continues in the background.

    Usage: ``python -m dtlib.lab.engines.keeper PROFILE RANKS``.
    """
    try:
        record, ranks = Record(Path(sys.argv[1])), int(sys.argv[2])
        parent, child = os.getpid(), os.fork()
    except (DtlibError, OSError) as problem:
        sys.exit(str(problem))
    if child:
        # The parent records the keeper before any engine runs, so that later notebooks find it. Then the parent exits,
        # so that init adopts the keeper and no zombie remains.
        keeper = asdict(Process.of(child))
        try:
            record.write("set.json", {"keeper": keeper, "ranks": ranks, "name": f"dtlib-{child}", "connection": None})
        except DtlibError as problem:
            os.kill(child, signal.SIGKILL)
            sys.exit(str(problem))
        os._exit(0)
    os.setsid()
    record = Record(record.profile)  # a lock that is inherited through fork cannot be acquired
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that `finally` runs
    while True:
        # Check this before reading set.json: a parent that exits normally has written it before.
        orphaned = os.getppid() != parent
        if record.read("set.json").get("keeper", {}).get("pid") == os.getpid():
            break
        # The parent was killed before it recorded this keeper, so no notebook would ever find it.
        if orphaned:
            return
        time.sleep(0.01)
    _keep(record, ranks, f"dtlib-{os.getpid()}")


def _keep(record: Record, ranks: int, name: str) -> None:
    me = Process.of(os.getpid())
    started: set = set()
    try:
        if not _wait_for_turn(record):
            return
        cluster = _start(record.profile, ranks, name)
        try:
            launchers = [Process.of(launcher.pid) for launcher in (cluster.controller, *cluster.engines.values())]
        except psutil.NoSuchProcess:
            raise DtlibError(
                f"The engines ended immediately after their start: see {record.profile / 'log'}."
            ) from None
        note = {key: value for key, value in record.read("set.json").items() if key != "before"}
        note["connection"] = str(record.profile / "security" / f"ipcontroller-{name}-client.json")
        _watch(record, note, launchers, started)
    except DtlibError as problem:
        record.write("set.json", {"error": str(problem)})
    except Exception as problem:
        record.write("set.json", {"error": f"The engines did not start ({type(problem).__name__}: {problem})."})
    finally:
        family = [*started, *with_descendants(me)[1:]]
        end_processes(family)
        end_processes(in_groups_of(family))  # a controller may have started further processes meanwhile
        _clean(record.profile, f"security/*{name}*", f"pid/*{name}*", "state/torch-*")


def _wait_for_turn(record: Record) -> bool:
    """Wait in the queue of starts; return False if no notebook wants the engines any more."""
    start_queue.name_this_process(start_queue.WAITS)
    queue, note = start_queue.Queue(), record.read("set.json")
    while before := queue.before():
        if not record.attached():
            record.remove("set.json")
            return False
        if note.get("before") != before:
            note["before"] = before
            record.write("set.json", note)
        time.sleep(POLL_SECONDS)
    start_queue.name_this_process(start_queue.STARTS)
    return True


def _clean(profile: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in profile.glob(pattern):
            path.unlink(missing_ok=True)


def _start(profile: Path, ranks: int, name: str):
    import ipyparallel as ipp
    from ipyparallel.cluster import launcher
    from traitlets.config import Config

    # Files of the last set: its logs, kept for the case of an error, and the rest of a keeper that was killed.
    _clean(profile, "log/*dtlib-*", "security/*dtlib-*", "pid/*dtlib-*", "state/torch-*")
    # Controller and engines end with this process, even if it is killed, on systems that support this.
    launcher.Popen = lambda command, **popen: subprocess.Popen(ends_with_this_process(command), **popen)
    os.environ["DTLIB_RANKS"] = str(ranks)  # read by profiles that ask a scheduler for nodes
    # `dtlib lab` has started a zygote with all imports; elsewhere this starts one.
    if profile.name == PROFILE.name:
        start_zygote()
    controller = {"controller_cmd": [*python_of_a_rank(), "-m", "ipyparallel.controller"]}
    engine = {"environment": rank_environment(ranks)}
    overrides = Config({"Cluster": {"delay": 0}, "EngineLauncher": engine, "LocalControllerLauncher": controller})
    cluster = ipp.Cluster(n=ranks, profile_dir=str(profile), cluster_id=name, config=overrides, shutdown_atexit=False)
    cluster.start_cluster_sync()
    # Files with keys: readable by their owner only, like their folder.
    for path in (profile / "security").glob(f"*{name}*"):
        path.chmod(0o600)
    return cluster


def _watch(record: Record, note: dict, launchers: list[Process], started: set) -> None:
    """Return when no notebook is attached or the engines have ended; collect the processes to end in ``started``."""
    while True:
        # The children of a process that dies move to another parent, so record them while they can be found.
        started.update(with_descendants(Process.of(os.getpid()))[1:])
        note["processes"] = [asdict(process) for process in sorted(started, key=lambda process: process.pid)]
        if note != record.read("set.json"):
            record.write("set.json", note)
        # Without the lock, because a notebook holds it while it starts engines.
        if not all(launcher.find() for launcher in launchers):
            record.remove("set.json")
            return
        if not record.attached():
            with suppress(DtlibError), record.lock():
                if not record.attached():  # again: a notebook may have attached before the lock
                    record.remove("set.json")
                    return
        joined = record.read("ranks.json").get("name") == note["name"]
        if joined:
            start_queue.name_this_process(start_queue.KEEPS)
        notebooks = [Process(each["pid"], each["created"]) for each in record.attached()]
        _until_one_ends([*launchers, *notebooks], CHECK_SECONDS if joined else POLL_SECONDS)


def _until_one_ends(processes: list[Process], seconds: float) -> None:
    """Wait until one of these processes ends, for at most ``seconds``; the system reports it, so nothing is polled."""
    if not hasattr(os, "pidfd_open"):
        return time.sleep(POLL_SECONDS)
    ends = select.poll()
    with ExitStack() as opened, suppress(OSError):  # a process has ended already
        for process in processes:
            handle = os.pidfd_open(process.pid)
            opened.callback(os.close, handle)
            ends.register(handle, select.POLLIN)
        ends.poll(1000 * seconds)


if __name__ == "__main__":
    main()
