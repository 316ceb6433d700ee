"""The watchdog: a process that starts the engines, and ends them with the last notebook that uses them.

It outlives the notebook that started it, so that another one can take over, and it needs nothing from a notebook
but its process id: a kernel that is killed is noticed like one that ends. Life of a set of engines:

    notebook                     keeper                            engines
    write attached/PID.json
    start the keeper ----------> set.json: here I am
                                 wait for starts of others
                                 start controller, mpiexec ------> register
                                 set.json: connection file
    connect, use ...             wait until somebody ends ...
    (ends, however that ends)    nobody: remove set.json, end ---> gone
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
from dtlib.lab.engines import crowd
from dtlib.lab.engines.workshop import Record
from dtlib.world.launch import python_of_a_rank, rank_environment, start_zygote
from dtlib.world.processes import Process, end_processes, in_groups_of, with_descendants
from dtlib.world.until_parent_ends import ends_with_this_process

POLL_SECONDS = 0.5  # between two looks, until the ranks have joined; and where the system tells of no ends
LOOK_SECONDS = 10


def main() -> None:
    """``python -m dtlib.lab.engines.keeper PROFILE RANKS``: put a keeper on record and return. It
    goes on in the background."""
    try:
        record, ranks = Record(Path(sys.argv[1])), int(sys.argv[2])
        parent, child = os.getpid(), os.fork()
    except (DtlibError, OSError) as problem:
        sys.exit(str(problem))
    if child:
        # On record before anything runs: whoever comes now finds it. The notebook's child ends here, so that the
        # keeper is nobody's zombie.
        keeper = asdict(Process.of(child))
        try:
            record.write("set.json", {"keeper": keeper, "ranks": ranks, "name": f"dtlib-{child}", "connection": None})
        except DtlibError as problem:
            os.kill(child, signal.SIGKILL)
            sys.exit(str(problem))
        os._exit(0)
    os.setsid()
    record = Record(record.profile)  # a lock that was inherited across a fork cannot be acquired
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that `finally` is reached
    while True:
        orphaned = os.getppid() != parent  # looked at first: who ends in good order has written before
        if record.read("set.json").get("keeper", {}).get("pid") == os.getpid():
            break
        if orphaned:  # killed before it could put this process on record, so nobody would ever find it
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
                f"The engines ended as soon as they had started: {record.profile / 'log'} says why."
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
        end_processes(in_groups_of(family))  # a controller that was still starting processes
        _clean(record.profile, f"security/*{name}*", f"pid/*{name}*", "state/torch-*")


def _wait_for_turn(record: Record) -> bool:
    """Whether anybody still wants the engines then."""
    crowd.name_this_process(crowd.WAITS)
    queue, note = crowd.Queue(), record.read("set.json")
    while before := queue.before():
        if not record.attached():
            record.remove("set.json")
            return False
        if note.get("before") != before:
            note["before"] = before
            record.write("set.json", note)
        time.sleep(POLL_SECONDS)
    crowd.name_this_process(crowd.STARTS)
    return True


def _clean(profile: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in profile.glob(pattern):
            path.unlink(missing_ok=True)


def _start(profile: Path, ranks: int, name: str):
    import ipyparallel as ipp
    from ipyparallel.cluster import launcher
    from traitlets.config import Config

    # The last set's: logs, which were kept in case they were needed, and what a keeper left that was killed.
    _clean(profile, "log/*dtlib-*", "security/*dtlib-*", "pid/*dtlib-*", "state/torch-*")
    # A keeper that is itself killed takes controller and engines along, where the system can do that.
    launcher.Popen = lambda command, **popen: subprocess.Popen(ends_with_this_process(command), **popen)
    os.environ["DTLIB_RANKS"] = str(ranks)  # for a profile that asks a scheduler for room
    if profile.name == PROFILE.name:  # `dtlib lab` has a zygote that has imported all; others have one from now on
        start_zygote()
    controller = {"controller_cmd": [*python_of_a_rank(), "-m", "ipyparallel.controller"]}
    engine = {"environment": rank_environment(ranks)}
    overrides = Config({"Cluster": {"delay": 0}, "EngineLauncher": engine, "LocalControllerLauncher": controller})
    cluster = ipp.Cluster(n=ranks, profile_dir=str(profile), cluster_id=name, config=overrides, shutdown_atexit=False)
    cluster.start_cluster_sync()
    for path in (profile / "security").glob(f"*{name}*"):  # the folder is closed to others; so is each file with a key
        path.chmod(0o600)
    return cluster


def _watch(record: Record, note: dict, launchers: list[Process], started: set) -> None:
    """Return once nobody is attached or the engines are gone; ``started`` collects what will have to be ended."""
    while True:
        # The children of a process that dies move to another parent: note them while they can be found.
        started.update(with_descendants(Process.of(os.getpid()))[1:])
        note["processes"] = [asdict(process) for process in sorted(started, key=lambda process: process.pid)]
        if note != record.read("set.json"):
            record.write("set.json", note)
        if not all(launcher.find() for launcher in launchers):  # not for the lock: a notebook holds it while it starts
            record.remove("set.json")
            return
        if not record.attached():
            with suppress(DtlibError), record.lock():
                if not record.attached():  # a notebook may have attached between the look and the lock
                    record.remove("set.json")
                    return
        joined = record.read("ranks.json").get("name") == note["name"]
        if joined:
            crowd.name_this_process(crowd.KEEPS)
        notebooks = [Process(each["pid"], each["created"]) for each in record.attached()]
        _until_one_ends([*launchers, *notebooks], LOOK_SECONDS if joined else POLL_SECONDS)


def _until_one_ends(processes: list[Process], seconds: float) -> None:
    """Wait until the system says that one of these has ended, at most so long: that costs nothing."""
    if not hasattr(os, "pidfd_open"):
        return time.sleep(POLL_SECONDS)
    ends = select.poll()
    with ExitStack() as opened, suppress(OSError):  # it has ended already
        for process in processes:
            handle = os.pidfd_open(process.pid)
            opened.callback(os.close, handle)
            ends.register(handle, select.POLLIN)
        ends.poll(1000 * seconds)


if __name__ == "__main__":
    main()
