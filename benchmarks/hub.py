"""What learners of a JupyterHub cost, that many at once: from login to the first sum, and idle.

python -m benchmarks.hub 6 idle lessons
"""

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import hosts, hub
from tests.users import Users


def cost(processes) -> tuple[float, float]:
    """CPU seconds so far, those of ended children too, and megabytes (10^6 bytes, PSS) of these processes."""
    seconds = memory = 0.0
    for pid in processes:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            memory += int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("Pss:")[2].split()[0]) * 1.024e-3
        except (OSError, IndexError):
            continue
    return seconds, memory


FIRST_SUM = "%%px\nimport dtlib, torch\nworld = dtlib.init()\nprint(world.comm.all_reduce(torch.tensor(world.rank)))"


def measure(count: int, folder: Path, what: list[str]) -> None:
    names = [f"learner{number}" for number in range(count)]
    with hosts.Hosts(folder) as machine:
        users = Users(machine, *names)
        with hub.Hub(machine, users, names) as running, ThreadPoolExecutor(count) as together:
            learners, began = [running.learner(name) for name in names], time.monotonic()

            def to_the_first_sum(learner):
                learner.starts().opens()
                server = time.monotonic() - began
                learner.runs("from dtlib import lab; lab.engines(4)")
                shown = learner.runs(FIRST_SUM)
                passed = time.monotonic() - began
                assert not learner.failed and "6" in shown, shown
                return round(server, 1), round(passed, 1), round(cost(running.processes(learner.name))[0], 1)

            for each in zip(names, together.map(to_the_first_sum, learners), strict=True):
                print("seconds to the server, to the first sum, CPU seconds:", *each, flush=True)
            if "lessons" in what:
                for notebook in ("00_start_here", "03_collectives"):
                    began = time.monotonic()
                    failed = [
                        found for each in together.map(hub.run_through, learners, [notebook] * count) for found in each
                    ]
                    print(notebook, f"{time.monotonic() - began:.0f} s, failed:", failed, flush=True)
            if "idle" in what:
                time.sleep(20)
                for _ in range(5):
                    before = {name: {pid: cost([pid])[0] for pid in running.processes(name)} for name in names}
                    time.sleep(60)
                    for name in names:
                        lines = running.processes(name)
                        spent = {pid: cost([pid])[0] - was for pid, was in before[name].items() if pid in lines}
                        print(
                            name, f"idle: {sum(spent.values()) / 0.6:.1f} % of a core,", f"{cost(lines)[1]:.0f} MB",
                            flush=True,
                        )  # fmt: skip
                for pid in sorted(lines, key=lambda pid: -cost([pid])[1]):
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    print(f"  {cost([pid])[1]:5.0f} MB {spent.get(pid, 0) / 0.6:5.2f} % {name:16}{lines[pid][:90]}")
            for each in learners:
                each.stops()
        time.sleep(10)
        print("left after the hub:", [line for name in names for line in running.processes(name).values()], flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measure(int(sys.argv[1]), Path(folder), sys.argv[2:] or ["idle", "lessons"])
