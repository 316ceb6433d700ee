"""The watchdog: a process that starts the engines, and ends them with the last notebook that uses them.

It outlives the notebook that started it, so that another one can take over, and it needs nothing from a notebook
but its process id: a kernel that is killed is noticed like one that ends. Life of a set of engines:

    notebook                     keeper                            engines
    write attached/PID.json
    start the keeper ----------> start controller, mpiexec ------> register
                                 set.json: connection file
    connect, use ...             is anyone attached alive? ...
    (ends, however that ends)    nobody: remove set.json, end ---> gone
"""

import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

POLL_SECONDS = 0.5


def main() -> None:
    if os.fork():
        os._exit(0)  # the notebook's child ends here, so that the keeper is nobody's zombie
    os.setsid()
    profile, ranks = Path(sys.argv[1]), int(sys.argv[2])

    from dtlib.errors import DtlibError
    from dtlib.lab.workshop import Record
    from dtlib.processes import Process

    record = Record(profile)
    me = asdict(Process.of(os.getpid()))
    name = f"dtlib-{os.getpid()}"
    try:
        cluster, connection = _start(profile, ranks, name)
    except DtlibError as problem:
        record.write("set.json", {"error": str(problem)})
        return
    except Exception as problem:
        record.write("set.json", {"error": f"The engines did not start ({type(problem).__name__}: {problem})."})
        return
    record.write("set.json", {"keeper": me, "ranks": ranks, "connection": connection, "name": name})
    _watch(record, cluster, name)


def _start(profile: Path, ranks: int, name: str):
    import ipyparallel as ipp
    from traitlets.config import Config

    from dtlib.launch import rank_environment

    overrides = Config({"EngineLauncher": {"environment": rank_environment(ranks)}})
    cluster = ipp.Cluster(n=ranks, profile_dir=str(profile), cluster_id=name, config=overrides, shutdown_atexit=False)
    cluster.start_cluster_sync()
    return cluster, str(profile / "security" / f"ipcontroller-{name}-client.json")


def _watch(record, cluster, name) -> None:
    """Wait until nobody is attached or the engines are gone, then end everything that was started."""
    from dtlib.errors import DtlibError
    from dtlib.processes import Process, end_processes, with_descendants

    launchers = [Process.of(launcher.pid) for launcher in (cluster.controller, *cluster.engines.values())]
    started = set(launchers)
    note = record.read("set.json")

    def needed():
        return record.attached() and all(launcher.find() for launcher in launchers)

    try:
        while True:
            # The children of a process that dies move to another parent: note them while they can be found.
            started.update(with_descendants(Process.of(os.getpid()))[1:])
            processes = [asdict(process) for process in sorted(started, key=lambda process: process.pid)]
            if processes != note.get("processes"):
                note["processes"] = processes
                record.write("set.json", note)
            if not needed():
                with suppress(DtlibError), record.lock():
                    if not needed():  # a notebook may have attached between the look and the lock
                        record.remove("set.json")
                        end_processes(list(started))
                        return
            time.sleep(POLL_SECONDS)
    finally:
        end_processes(list(started))
        for pattern in (f"security/*{name}*", f"log/*{name}*", f"pid/*{name}*", "state/torch-*"):
            for path in record.profile.glob(pattern):
                path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
