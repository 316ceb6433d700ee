"""Several users on one machine: what others own stops nobody, and nobody reads or ends what is another's."""

import json
import re
import subprocess
import sys

import pytest

from tests import hosts
from tests.conftest import ROOT
from tests.hosts import Hosts
from tests.users import TMP, Users

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing()),
]

# A learner who is nobody special: a script, then engines behind a notebook, without and with a zygote.
LEARNER = """
import json, os, subprocess, sys, time
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
from dtlib.lab import course
from dtlib.world import forking, launch

os.mkdir("course")
os.chdir("course")
folder, _ = course.open_folder()
shell = InteractiveShell.instance()
from dtlib import lab
shell.user_ns["lab"] = lab
SUM = "import dtlib, os, torch; w = dtlib.init(); "
SUM += "print(w.comm.all_reduce(torch.tensor(w.rank + 1.0)).item(), os.getppid())"

def starts():
    ranks = launch.start_ranks(["-c", SUM], 2, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"script: {ranks.communicate(timeout=300)[0]!r}", flush=True)
    engines = lab.engines(2, restart=True)
    shell.run_cell("%%px\\n" + SUM).raise_error()
    return engines

os.environ[forking.VARIABLE] = "off"
starts()
del os.environ[forking.VARIABLE]
with launch.forked_ranks() as zygote:
    first = os.path.join(os.environ[forking.VARIABLE], forking.SOCKET)
    print("zygote", zygote.pid, os.path.exists(first), flush=True)
    engines = starts()
    profile = engines.record.profile
    closed = (folder, *map(profile.joinpath, ("state", "log", "security")))
    modes = {str(each): oct(each.stat().st_mode & 0o777) for each in closed}
    engines.end()
print("modes", json.dumps(modes), flush=True)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """One host with two learners and a stranger; all that another user may have left in shared places is there."""
    with Hosts(tmp_path_factory.mktemp("machine")) as running:
        running.users = Users(running, "ada", "bob", "eve")
        for name in ("ompi.1", "ompi.999999", "dtlib-zygote-left", f"dtlib-{running.users.ids['ada']}"):
            (running.users.tmp / name).mkdir(mode=0o700)
        running.run("h1", ["sh", "-c", "umask 77; echo > /dev/shm/dtlib-board-left"])
        yield running
    assert not running.inside(), "a process is left over"


def test_what_root_has_left_in_shared_places_stops_no_start(machine):
    (machine.users.tmp / "learner.py").write_text(LEARNER)
    said = machine.run("h1", machine.users.as_user("ada", [sys.executable, f"{TMP}/learner.py"]), timeout=800)
    scripts = [line for line in said.splitlines() if line.startswith("script")]
    assert len(scripts) == 2 and all(line.count("3.0 ") == 2 for line in scripts), said
    parents = re.findall(r"ranks 0 and 1 \|\S* 3\.0 (\d+)", said)
    zygote = said.partition("zygote ")[2].split()
    assert zygote[1] == "True" and zygote[0] == parents[1] != parents[0] and zygote[0] in scripts[1], said
    modes = json.loads(said.partition("modes ")[2])
    assert len(modes) == 4 and set(modes.values()) == {"0o700"}, modes


@pytest.mark.nightly
@pytest.mark.parametrize("file", ["test_engines.py", "test_scripts.py", "test_zygote.py"])
def test_all_tests_of_starting_pass_for_a_user_without_privileges(machine, file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not nightly"]
    command += [str(ROOT / "tests" / file), f"--basetemp={TMP}/home/bob/{file}"]
    runtime = machine.users.home("bob") / ".local" / "share" / "jupyter" / "runtime"  # as a server would have made it
    machine.run("h1", machine.users.as_user("bob", ["mkdir", "-p", str(TMP / runtime.relative_to(machine.users.tmp))]))
    bob = machine.users.as_user("bob", ["env", f"--chdir={ROOT}", *command])
    done = machine.start("h1", bob, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, _ = done.communicate(timeout=800)
    assert done.returncode == 0, said[-6000:]
