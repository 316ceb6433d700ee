"""A real JupyterHub: learners log in and run ranks on one machine and in jobs, and a third one tries to spy."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

import pytest

from dtlib.cli import main
from dtlib.lab import course, server
from tests import hub, slurm
from tests.conftest import ROOT, wait_until
from tests.hosts import NETWORK, Hosts
from tests.users import TMP, Users

pytestmark = pytest.mark.timeout(1200)
needs_hub = pytest.mark.skipif(bool(hub.missing()), reason=hub.missing())
SECRET = "ada's own words"
SUM = "%%px\nimport dtlib, torch\nworld = dtlib.init()\nprint(world.comm.all_reduce(torch.tensor(world.rank)))"


def test_without_jupyterhub_and_without_a_hub_one_sentence_each(monkeypatch, capsys):
    monkeypatch.delenv(server.HUB_TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    assert main(["lab", "--hub"]) == 2 and "pip install 'dtlib[hub]'" in capsys.readouterr().err
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: name)
    assert main(["lab", "--hub"]) == 2 and "leave --hub out" in capsys.readouterr().err


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A hub for ada and bob; tess teaches; eve has an account on the machine, and is not on the list."""
    with Hosts(tmp_path_factory.mktemp("hub")) as machine:
        users = Users(machine, "ada", "bob", "eve", "tess")
        site = ("teachers = []", 'teachers = ["tess"]'), ('wall = ""', 'wall = "tess"')
        with hub.Hub(machine, users, ["ada", "bob"], site=site) as started:
            yield started
        wait_until(lambda: not any(map(started.processes, users.ids)))
    assert not machine.inside(), "a process is left over"


@pytest.mark.nightly
@needs_hub
def test_a_learner_logs_in_finds_the_course_and_runs_ranks(running):
    assert "Learners have no limits" in running.log.read_text() or Path("/run/systemd/system").is_dir()
    eve = running.learner("eve")
    assert eve.logs_in().status_code == 403, "she is not on the list"
    ada = running.learner("ada")
    assert ada.logs_in("wrong").status_code == 403
    page = ada.logs_in()
    running.wait_until(ada.is_ready)
    page = ada.there(ada.web.get, f"{running.url}/user/ada/", timeout=300)
    assert page.status_code == 200 and page.url.endswith(f"/user/ada/lab/tree/{course.START_PAGE}"), page.url
    settings = ada.asks("GET", "/user/ada/lab/api/settings/@jupyterlab/apputils-extension:notification").json()
    assert settings["schema"]["properties"]["fetchNews"]["default"] == "false", "those of dtlib lab"
    ada.opens()
    assert "Run the first cell" in ada.runs("%%px\n1"), "the kernel of dtlib lab"
    shown = ada.runs(
        "import os; from dtlib import lab; lab.engines(4); print(os.getcwd(), os.environ['OMP_NUM_THREADS'])"
    )
    assert shown.endswith(f"{TMP}/home/ada/course/notebooks/lectures 1\n")
    assert ada.runs(SUM) == "ranks 0 to 3 | tensor(6)\n"
    lines = running.processes("ada").values()
    assert any("ranks are forked" in line for line in lines) and any("jupyterhub.singleuser" in line for line in lines)
    ada.stops()
    wait_until(lambda: not running.processes("ada"))


@pytest.mark.nightly
@needs_hub
def test_the_wall_is_a_service_that_shows_learners_to_teachers_alone(running):
    ada, tess = running.learner("ada"), running.learner("tess")
    where = f"{running.url}/services/wall/"
    (file,) = running.users.home("tess").glob(".local/share/jupyter/dtlib-wall/*.json")
    secret = json.loads(file.read_text())
    assert file.stat().st_uid == running.users.ids["tess"] and file.stat().st_mode & 0o777 == 0o600
    ada.logs_in()
    running.wait_until(ada.is_ready)
    ada.opens()
    assert "on the wall" in ada.runs(f"from dtlib import lab; lab.join('{secret['code']}@{where}', 'heron')")
    assert ada.there(ada.web.get, where, timeout=300).status_code == 403
    page = tess.there(tess.web.get, where, timeout=300)
    assert "/hub/login" in page.url and secret["key"] not in page.text + page.url
    tess.logs_in()
    page = tess.there(tess.web.get, where, timeout=300)
    assert page.url == f"{where}page.html#{secret['key']}" and "The wall" in page.text

    def room(key):
        head = {"Authorization": f"Bearer {key}"}
        return tess.there(tess.web.get, f"{where}room", headers=head, timeout=300)

    assert room("wrong").status_code == 403
    wait_until(lambda: [tile["alias"] for tile in room(secret["key"]).json()["tiles"]] == ["heron"])
    ada.runs("lab.leave()")
    assert room(secret["key"]).json()["tiles"] == []
    for each in (ada, tess):
        each.stops()
    wait_until(lambda: not running.processes("ada"))


@pytest.fixture(scope="module")
def report(running):
    """What eve finds out while ada and bob work, and what ada and bob see of it."""
    ada, bob = running.learner("ada"), running.learner("bob")
    for each in (ada, bob):
        each.starts().opens()
        each.runs("from dtlib import lab; lab.engines(2)")
        assert each.runs(SUM) == "ranks 0 and 1 | tensor(1)\n"
    ada.runs("%px from dtlib.training.torch_runtime import process_group; group = process_group(world.comm)")
    (running.users.tmp / "spy.py").write_text((ROOT / "tests" / "spy.py").read_text())
    victims = [str(running.users.ids[name]) for name in ("ada", "bob")]
    found = {}
    for spy in ("eve", "bob"):
        command = running.users.as_user(
            spy, [sys.executable, f"{TMP}/spy.py", *(victims if spy == "eve" else victims[:1])]
        )
        with running.machine.start(
            "h1", command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as spying:
            assert spying.stdout.readline() == "listens\n", spying.stderr.read()
            said = ada.runs(f"%%px\nwords = {SECRET!r}\nprint(words)\nprint(world.comm.all_reduce(torch.tensor(1)))")
            ada.runs(f'print("{SECRET}"); lab.predict("sum-for-eight", 28)')
            time.sleep(1)
            spying.stdin.write("stop\n")
            spying.stdin.flush()
            text = spying.stdout.read()
            assert text, spying.stderr.read()
        found[spy] = json.loads(text)
        assert said == f"ranks 0 and 1 | {SECRET}\nranks 0 and 1 | tensor(2)\n", "a spy changes nothing"
    found["ada after"] = ada.runs(SUM)
    found["bob after"] = bob.runs(SUM)
    yield found
    for each in (ada, bob):
        each.stops()


@pytest.mark.nightly
@needs_hub
@pytest.mark.parametrize("spy", ["eve", "bob"])
def test_nobody_reads_cells_outputs_keys_or_predictions_of_another(running, report, spy):
    assert report[spy]["files"]["read"] == []
    assert report[spy]["processes"]["of"] >= 8 and report[spy]["processes"]["looked into"] == []
    lines = " ".join(report[spy]["processes"]["lines"])
    assert SECRET not in lines and "API_TOKEN" not in lines
    written = [path for path in (running.users.home("ada") / "course").rglob("*.json") if path.is_file()]
    assert written and all(path.stat().st_mode & 0o077 == 0 for path in written if ".progress" in path.name)


@pytest.mark.nightly
@needs_hub
@pytest.mark.parametrize("spy", ["eve", "bob"])
def test_nobody_ends_or_changes_what_is_another_s(report, spy):
    assert report[spy]["processes"]["ended"] == [] and report[spy]["files"]["written"] == []
    assert report["ada after"] == report["bob after"] == "ranks 0 and 1 | tensor(1)\n"


@pytest.mark.nightly
@needs_hub
@pytest.mark.parametrize("spy", ["eve", "bob"])
def test_who_connects_to_the_ports_of_another_hears_nothing(report, spy):
    """Those of JupyterLab's server ask for a password, the controller's for keys; gloo's and the launcher's are
    useless: docs/how-to/run_a_hub.md lists them."""
    assert report[spy]["ports"] and report[spy]["heard"] == []
    answers = [said for of_port in report[spy]["http"].values() for said in of_port]
    assert any(said.startswith("HTTP/1.") for said in answers)
    for said in answers:
        assert not said.startswith("HTTP") or said.split()[1] in ("302", "403", "404", "400", "405"), said[:500]
        assert SECRET not in said and "ipynb" not in said
    assert report[spy]["sockets"] == []


@pytest.mark.nightly
@needs_hub
def test_nobody_traces_or_listens_to_the_network(report):
    if not which("strace"):
        pytest.skip("strace is missing: apt-get install strace")
    assert report["eve"]["processes"]["traced"] == [] and not report["eve"]["sniffs"]


class SlurmWithUsers(slurm.Slurm):
    def _start_daemons(self):
        self.users = Users(self, "ada")
        super()._start_daemons()


@pytest.mark.nightly
@needs_hub
@pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())
def test_a_learner_s_server_is_a_job_of_two_nodes(tmp_path_factory):
    with SlurmWithUsers(tmp_path_factory.mktemp("slurm")) as cluster:
        prepare = f"export PATH={Path(sys.executable).parent}:$PATH"
        site = [("ranks_a_node = 4 ", "ranks_a_node = 2 "), ('prepare = ""', f'prepare = "{prepare}"')]
        with hub.Hub(cluster, cluster.users, ["ada"], "slurm.py", site, f"{NETWORK}.1") as started:
            ada = started.learner("ada")
            ada.logs_in()
            started.wait_until(ada.is_ready)
            page = ada.there(ada.web.get, f"{started.url}/user/ada/", timeout=300)
            assert page.status_code == 200 and page.url.endswith(course.START_PAGE.as_posix())
            assert cluster.run("h1", ["squeue", "--noheader", "--format=%D %u"]).split() == ["2", "ada"]
            shown = ada.opens().runs("from dtlib import lab; lab.engines()")
            assert not ada.failed, shown
            assert ada.runs(SUM) == "ranks 0 to 3 | tensor(6)\n"
            assert (
                ada.runs("%px import socket; print(socket.gethostname())") == "ranks 0 and 1 | h1\nranks 2 and 3 | h2\n"
            )
            ada.stops()
            assert cluster.jobs_end(), "the job outlives its server"
            wait_until(lambda: not started.processes("ada"))
    assert not cluster.inside()


@pytest.mark.nightly
@needs_hub
def test_six_learners_at_once_run_two_lessons(tmp_path_factory):
    names = [f"learner{number}" for number in range(6)]
    with Hosts(tmp_path_factory.mktemp("six")) as machine:
        users = Users(machine, *names)
        with hub.Hub(machine, users, names) as started, ThreadPoolExecutor(6) as together:

            def works(name):
                learner = started.learner(name).starts().opens()
                failed = hub.run_through(learner, "00_start_here") + hub.run_through(learner, "03_collectives")
                learner.stops()
                return failed

            assert list(together.map(works, names)) == 6 * [[]]
            wait_until(lambda: not any(map(started.processes, names)))
    assert not machine.inside()
