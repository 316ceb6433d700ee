"""A real Slurm on this machine: engines as a job of two nodes, and the course's exercise on them."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from dtlib.lab.lesson_files import notebooks
from tests import hosts, slurm
from tests.conftest import ROOT, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
needs_slurm = pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())

# What a notebook's cells do, in a program that runs on a node.
SESSION = """
import json, os, signal, sys, threading, time
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
from dtlib import lab
shell.user_ns['lab'] = lab
profile = sys.argv[1] or None
ranks = lab.engines(4 if profile else None, profile=profile)
print("profile", ranks.record.profile.name, flush=True)
print("hosts", *[row["host"] for row in ranks.table.rows], flush=True)

def cell(text):
    shell.run_cell(text).raise_error()

cell("%%px\\nimport dtlib, torch\\nfrom dtlib import pi\\nworld = dtlib.init()")
cell("%%px\\nprint('sum', world.node, world.comm.all_reduce(torch.tensor(world.rank + 1.0)).item())")
security = ranks.record.profile / "security"
print("modes", *{oct(path.stat().st_mode & 0o77) for path in [security, *security.iterdir()]}, flush=True)

import zmq
from zmq.utils.monitor import recv_monitor_message
note = json.loads(next(security.glob("*-engine.json")).read_text())
stranger = zmq.Context.instance().socket(zmq.DEALER)
events = stranger.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
stranger.connect(f"{note['interface']}:{note['registration']}")
seen = []
while events.poll(1000):
    seen.append(zmq.Event(recv_monitor_message(events)["event"]).name)
    if len(seen) > 5:
        break
print("without keys", *set(seen), flush=True)
stranger.disable_monitor()
stranger.close(0)

for name, solution in json.loads(Path(sys.argv[2]).read_text()).items():
    cell("%%px\\n" + solution)
    cell(f"lab.check({name!r})")
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell start with it ignored
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    cell("%%px\\nimport time; time.sleep(300)")
except BaseException:
    print("interrupted", time.monotonic() - began < 200, flush=True)
print("ready", flush=True)
if sys.stdin.readline() == "killed\\n":
    os.kill(os.getpid(), signal.SIGKILL)
ranks.end()
"""
EXERCISES = {"pi-streams": "count_my_points", "pi-on-ranks": "estimate_pi"}


def solutions() -> dict[str, str]:
    """The stored solutions of lesson 02's judged exercises, by the exercise's name."""
    source = notebooks()["02_pi_exercises"].read_text()
    cells = re.findall(r"^# %%(.*?)\n(.*?)(?=^# %%(?!px)|\Z)", source, re.DOTALL | re.MULTILINE)
    found = {}
    for exercise, function in EXERCISES.items():
        (found[exercise],) = [
            text.replace("# %%px\n", "") for tags, text in cells if '"solution"' in tags and f"def {function}(" in text
        ]
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running
    assert not running.inside(), "a process of the cluster is left over"


def listeners(cluster, host: str, program: str) -> set[str]:
    """The addresses on which processes listen that have ``program`` in their command line."""
    found = set()
    for line in cluster.run(host, ["ss", "-Hltnp"]).splitlines():
        for pid in re.findall(r"pid=(\d+)", line):
            with suppress(OSError):
                if program in Path(f"/proc/{pid}/cmdline").read_text():
                    found.add(line.split()[3].rpartition(":")[0].strip("[]"))
    return found


@needs_slurm
@pytest.mark.parametrize("where", ["in a job", "as a job", "over ssh"])
def test_lesson_02_on_engines_of_two_nodes(cluster, workshop_folder, where):
    """In a job of two nodes lab.engines() takes all of it; outside, the profile asks Slurm for one, or does without."""
    inside, name = where == "in a job", "profile_ssh" if where == "over ssh" else "profile_slurm"
    site = workshop_folder / "cluster_profiles" / "site.toml"
    told = {"ranks_a_node = 4": "ranks_a_node = 2", "hosts = []": 'hosts = ["h1", "h2"]'}
    told['ssh = "ssh"'] = f'ssh = "{cluster.agent()}"'
    text = site.read_text()
    for before, after in told.items():
        assert before in text
        text = text.replace(before, after)
    site.write_text(text)
    (workshop_folder / "session.py").write_text(SESSION)
    (workshop_folder / "solutions.json").write_text(json.dumps(solutions()))
    profile = "" if inside else str(workshop_folder / "cluster_profiles" / name)
    session = [sys.executable, "session.py", profile, "solutions.json"]
    launch = ["salloc", "--quiet", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"] if inside else []
    in_folder = ["env", f"--chdir={workshop_folder}", f"PYTHONPATH={ROOT}", *launch, *session]
    log = workshop_folder / "said"
    with open(log, "w") as output:
        program = cluster.start("h1", in_folder, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True)
        with suppress(AssertionError):  # what was said tells more
            wait_until(lambda: "\nready" in log.read_text() or program.poll() is not None, hosts.SECONDS)
        said = log.read_text()
        logs = workshop_folder / "cluster_profiles" / name / "log"
        assert "\nready" in said, said + "".join(path.read_text()[-1500:] for path in logs.glob("*.log"))
        jobs = cluster.run("h1", ["squeue", "--noheader", "--format=%D %C"]).split()
        controller = listeners(cluster, "h1", "ipyparallel.controller")
        session_itself = listeners(cluster, "h1", "session.py")
        program.stdin.write("end\n" if inside else "killed\n")  # either way the job ends, too
        program.stdin.close()
        program.wait(hosts.SECONDS)
    assert f"profile {name}\n" in said and "hosts h1 h1 h2 h2" in said
    assert set(re.findall(r"sum (\d) (\S+)", said)) == {("0", "10.0"), ("1", "10.0")}
    assert jobs == ([] if where == "over ssh" else ["2", "4"])
    assert [said.count(f"Passed: {exercise}.") for exercise in EXERCISES] == [1, 1], said
    assert "interrupted True" in said
    # Keys are their owner's alone, and nobody gets in without them.
    assert "modes 0o0\n" in said and "without keys CONNECTED\n" in said
    assert controller == {"127.0.0.1", f"{hosts.NETWORK}.1"}
    # In a job it is named in the command line of salloc, too, which listens for Slurm.
    assert inside or session_itself <= {"127.0.0.1"}
    assert cluster.jobs_end(), "the job outlives its notebook"


# It says who it is, and then is `dtlib train` with the arguments that it was given.
PROGRAM = """
import os, runpy, socket, torch, dtlib
world = dtlib.init()
total = world.comm.all_reduce(torch.tensor(world.rank + 1.0)).item()
# One write: torchrun starts Python with -u, and what is printed piece by piece mixes with that of other ranks.
os.write(1, f"rank {world.rank} {world.node} {world.local_rank} {socket.gethostname()} {total}\\n".encode())
runpy.run_module("dtlib", run_name="__main__")
"""
TINY = {
    "workload": {"model": "mlp"}, "run": {"steps": 3}, "train_batch_size": 24,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}  # fmt: skip


@needs_slurm
@pytest.mark.parametrize("job", ["slurm", "torchrun", "mpiexec"])
def test_a_batch_script_trains_on_all_nodes(cluster, tmp_path, job):
    """The script is the course's, filled in for this cluster; here Python is at home elsewhere than in the course."""
    module = runpy.run_path(str(ROOT / "cluster_profiles" / "render.py"))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    as_root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    prepare = f"export PYTHONPATH={ROOT} {as_root} GLOO_SOCKET_IFNAME=wire"
    site = tomllib.loads((ROOT / "cluster_profiles" / "site.toml").read_text())
    site |= {"ranks_a_node": 2, "course": str(tmp_path), "prepare": prepare, "interface": "wire"}
    site |= {"hosts": ["h1", "h2"], "ssh": str(cluster.agent())}
    train = ["train", "vision", "--config=tiny.json", "--json=result.json", *module["TRAIN"].get(job, [])]
    (tmp_path / "job.sh").write_text(module["render"](job, ["program.py", *train], site))
    output = tmp_path / "output"
    command = ["sbatch", f"--output={output}", str(tmp_path / "job.sh")]
    if job == "mpiexec":
        command = ["sh", "-c", f"bash {tmp_path / 'job.sh'} > {output} 2>&1"]
    try:
        cluster.run("h1", command)
        ended = cluster.jobs_end()
    except RuntimeError as problem:
        pytest.fail(f"{problem}\n{output.read_text() if output.exists() else ''}")
    assert ended and (tmp_path / "result.json").exists(), output.read_text()
    # Not lines: rank 0's progress bar, which ends in none, may stand before what another node says.
    said = sorted(re.findall(r"rank (\d) (\d) (\d) (\w+) ([\d.]+)\n", output.read_text()))
    assert [[rank, node, local, total] for rank, node, local, _, total in said] == [
        [str(rank), str(rank // 2), str(rank % 2), "10.0"] for rank in range(4)
    ]
    assert {host for *_, host, _ in said[:2]} != {host for *_, host, _ in said[2:]}
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["ranks"], result["steps"], len(result["losses"])) == (4, 3, 3)
