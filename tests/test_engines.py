import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import psutil
import pytest
import zmq
from ipyparallel.controller.heartmonitor import HeartMonitor

from dtlib import lab
from dtlib.lab import course
from dtlib.lab.engines import heartbeats, keeper, start_queue, starting
from dtlib.lab.engines.rank_table import RankTable
from dtlib.lab.engines.workshop import Record
from dtlib.lab.server import SETTINGS
from dtlib.world import loopback
from dtlib.world.machine import usable_cores
from dtlib.world.processes import Process, listening
from tests.cases import for_each, refuses
from tests.conftest import ROOT, make_workshop, wait_until
from tests.kernels import Notebook

ENGINES = "from dtlib import lab; lab.engines({})"


@contextmanager
def opened_in(folder):
    """A function that opens notebooks in one workshop; at the end they are closed, and nothing may be left."""
    opened = []

    def open_notebook(name="lesson.ipynb"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JUPYTER_PATH", str(SETTINGS / "jupyter"))  # the kernel that `dtlib lab` gives them
            opened.append(Notebook(folder / "notebooks", name))
        return opened[-1]

    yield open_notebook
    for notebook in opened:
        notebook.close()
    assert wait_until(lambda: not processes_of(folder)), processes_of(folder)


@pytest.fixture
def notebooks(workshop_folder):
    with opened_in(workshop_folder) as open_notebook:
        yield open_notebook


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def shared(shared_folder):
    """One notebook with three ranks for several tests: each test starts the cell of the engines again."""
    with opened_in(shared_folder) as open_notebook:
        yield open_notebook()


def processes_of(folder) -> list[str]:
    """Command lines of the living processes that belong to the engines of a workshop: they name its profile."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def heard(ports, do) -> list[list[bytes]]:
    """What anybody on this machine who subscribes to these ports hears while something is done."""
    with zmq.Context() as context, ExitStack() as opened:
        sockets = [opened.enter_context(context.socket(zmq.SUB)) for _ in ports]
        for socket, port in zip(sockets, ports, strict=True):
            socket.subscribe(b"")
            socket.connect(f"tcp://127.0.0.1:{port}")
        time.sleep(0.3)  # until those who would speak know of the subscription
        do()
        time.sleep(0.3)
        return [socket.recv_multipart() for socket in sockets if socket.poll(0)]


def meanwhile(condition, do) -> None:
    """``do()`` as soon as the condition holds, while a cell runs."""
    threading.Thread(target=lambda: wait_until(condition) and do()).start()


def engine_pids(folder) -> list[int]:
    return [pid for _, pid in Record(folder / course.PROFILE).read("ranks.json")["places"]]


def test_from_the_first_cell_to_the_last(shared, shared_folder):
    notebook, workshop_folder = shared, shared_folder
    assert notebook.run("%%px\n1").startswith("DtlibError: Run the first cell")
    notebook.run(ENGINES.format(3))
    assert notebook.live[0].startswith("Starting 3 ranks ... 0 s") and "process id" in notebook.live[-1]
    table = notebook.run(ENGINES.format(3))
    assert "process id" in table and "torch ready" in table
    assert [line.split()[0] for line in table.splitlines()[3:6]] == ["0", "1", "2"]

    # Output comes in rank order and carries its rank; a silent cell says where it ran.
    assert notebook.run(
        "%%px\nimport dtlib, time; world = dtlib.init(); time.sleep(0.1 * (2 - world.rank))\nprint('a\\nb')"
    ) == ("ranks 0 to 2 | a\nranks 0 to 2 | b\n")
    assert (
        notebook.run("%px print(world.rank % 2); 5") == "ranks 0 and 2 | 0\nranks 0 and 2 | 5\nrank 1 | 1\nrank 1 | 5\n"
    )
    shown = notebook.run("%px print('many words ' * 20)").splitlines()
    assert len(shown) == 3 and all(line.startswith("ranks 0 to 2 |") and len(line) <= 95 for line in shown)
    shown = notebook.run("%%px\nfrom dtlib import lab\nif world.rank == 1: lab.table([(1, 2000)], ('rank', 'bytes'))")
    assert shown == "rank 1 | shows:\n  rank    bytes\n------  -------\n     1    2,000\n"
    assert "ranks 0 to 2 | show:" in notebook.run("%px from dtlib.lab.tables import Table; Table([('a', 'b')])")
    assert notebook.run("%%px\nx = 10 * world.rank") == "(ran on ranks 0 to 2)\n"
    assert notebook.run("%px x") == "rank 0 | 0\nrank 1 | 10\nrank 2 | 20\n"
    assert notebook.run("%%px --targets 1\nx") == "rank 1 | 10\n"
    assert notebook.run("lab.values('x')") == "[0, 10, 20]\n"

    # What ranks print appears while they run, and is grouped once they are done.
    notebook.run("%px import os, time")
    notebook.live, seen = [], shared_folder / "seen"
    meanwhile(lambda: "step 0" in "".join(notebook.live), seen.touch)
    shown = notebook.run(
        f"%%px\nfor step in range(3):\n    print('step', step)\n    while not os.path.exists('{seen}'): time.sleep(0.1)"
    )
    assert shown == "".join(f"ranks 0 to 2 | step {step}\n" for step in range(3))
    first = next(text for text in notebook.live if "step" in text)  # the table of an earlier cell may come first
    assert "rank 0 | step 0" in first and "step 1" not in first, notebook.live
    shown = notebook.run("%%px\nfor _ in range(50): print('x'); time.sleep(0.02)\nprint('long\\n' * 100_000)")
    assert "99,051 lines are left out" in shown
    assert all(text.count("rank 1 |") <= 20 for text in notebook.live), notebook.live
    assert "lines before these ..." in "".join(notebook.live)
    assert "Ranks cannot await at the top level" in notebook.run("%%px\nimport asyncio\nawait asyncio.sleep(0)")

    # Rank 0 answers Tab, Shift+Tab and the question mark; a line that stays in the notebook, the notebook.
    notebook.run("%px only_there = 'a name of rank 0'")
    # It has a third of a second for it: on a busy machine not every question gets its answer.
    assert wait_until(lambda: notebook.complete("%%px\nprint(only_th") == ["only_there"])
    assert wait_until(lambda: notebook.complete("%px world.co") == [".comm"])
    assert not notebook.complete("only_th")
    assert wait_until(lambda: "a name of rank 0" in notebook.inspect("%%px\nonly_there"))
    assert notebook.run("%%px\nonly_there?").count("a name of rank 0") == 1
    assert notebook.run("%px only_there?").count("a name of rank 0") == 1

    # Nobody on another machine, or under another name on this one, gets at any of it.
    notebook.run("%px import torch; from dtlib.training.torch_runtime import process_group; process_group(world.comm)")
    profile = workshop_folder / course.PROFILE
    family = [Process.of(notebook.pid), Process.of(Record(profile).keeper().pid)]
    found = [each for process in family for each in listening(process)]
    names = " ".join(sorted({name for name, _, _ in found}))
    assert "python" in names and "prterun" in names, found
    if loopback.closed("mpiexec") == ["mpiexec"]:  # `dtlib doctor` says so
        found = [each for each in found if each[0] != "prterun"]
    outside = [each for each in found if each[1] not in ("127.0.0.1", "::1")]
    assert not outside
    assert not heard({port for _, _, port in found}, lambda: notebook.run("%px print('a secret', world.rank)"))
    assert (profile / "security").stat().st_mode & 0o777 == 0o700
    keys = list((profile / "security").iterdir())
    assert keys and {path.stat().st_mode & 0o777 for path in keys} == {0o600}, keys

    # The cell may be run again: names stay. The ranks' folder is the notebook's.
    assert "lab.last() shows output that a closed page missed" in notebook.run(ENGINES.format(3))
    assert notebook.run("%px x").startswith("rank 0 | 0\n")
    assert notebook.run("%px import os; print(os.getcwd())").count(str(workshop_folder / "notebooks")) == 1

    # What belongs in the notebook says so on the ranks.
    assert "remove %%px from this cell" in notebook.run("%px from dtlib import lab; lab.engines(3)")
    assert "send the answer with lab.push" in notebook.run("%px input()")
    assert "this rank does not exist; the ranks are ranks 0 to 2" in notebook.run("%%px --targets 7\n1")
    assert "cannot be copied" in notebook.run("lab.values('nowhere')")
    notebook.run("lab.push(pushed=5)")
    assert notebook.run("%%px --local\nprint(pushed if 'pushed' in globals() else 'here')").startswith(
        "here\nranks 0 to 2 | 5\n"
    )
    assert notebook.run("%%px --local\nprint(1 / 0)").endswith("so it did not run on the ranks.\n")

    # A NameError on either side names its cure.
    assert "`x` is defined on the ranks but not in the notebook: start the cell with %%px" in notebook.run("x")
    notebook.run("y = 1")
    assert "`y` is defined in the notebook but not on the ranks: remove %%px" in notebook.run("%px y")
    assert "`z` is not defined on the ranks: run the %%px cell that defines it first" in notebook.run("%px z")
    assert "`only_theer` is not defined: did you mean `only_there`?" in notebook.run("%px only_theer")
    notebook.run("here_alone = 1")
    assert "`here_alon` is not defined: did you mean `here_alone`?" in notebook.run("here_alon")
    assert notebook.run("# a comment\n\n%%px\nprint(x)").startswith("rank 0 | 0\n"), "%%px may stand below it"
    assert notebook.run("%px dtlib.reset()") == "(ran on ranks 0 to 2)\n", "and not the world of each"
    for _ in range(2):  # the second time also without the communicator that the first one created
        assert "type %px dtlib.reset()" in notebook.run("import dtlib; dtlib.reset()")

    # An error is shown once, with the ranks that raised it, beside what the others printed.
    shown = notebook.run("%%px\nif world.rank: raise ValueError(f'no')\nprint('fine')")
    assert shown.count("ValueError: no") == 1 and "On ranks 1 and 2:" in shown and "rank 0 | fine" in shown
    assert f"Cell In[{notebook.number}], line 1" in shown and "out of step" not in shown
    refused = notebook.run("%px import torch; world.comm.all_reduce(torch.ones(1), op='median')")
    assert "all_reduce has no op 'median'" in refused and "Traceback" not in refused

    # The check finds the answer on the ranks, from a plain cell and from a %%px cell.
    newer = "the last that defines `total`, ran in the notebook, but `total` on the ranks is judged"
    missing = " ".join(notebook.run("total = 3; lab.check('first-sum')").split())
    assert newer in missing and "no such name" in missing
    notebook.run("%px total = world.comm.all_reduce(torch.tensor(world.rank))")
    assert notebook.run("lab.check('first-sum')").endswith("Passed: first-sum.\n")
    assert newer in " ".join(notebook.run("total = 3; lab.check('first-sum')").split()), "the ranks' is right still"
    notebook.run("%%px\nheld = None")
    assert "ran on the ranks, but `held` in the notebook" in " ".join(notebook.run("lab.check('held-fix')").split())
    notebook.run("%px total = world.comm.all_reduce(torch.tensor(world.rank))")
    said = notebook.run("%px from dtlib import lab; lab.check('first-sum')")
    assert said.startswith("rank 0 |") and said.count("Passed") == 1
    notebook.run("%%px\nraise ValueError\ntotal = 7")
    failed = f"Cell [{notebook.number}], the last that defines `total`, ended with an error"
    assert failed in " ".join(notebook.run("lab.check('first-sum')").split())
    notebook.run("# again\n%%px\ntotal = world.comm.all_reduce(torch.tensor(world.rank))")
    assert "ended with an error" not in notebook.run("lab.check('first-sum')")
    refused = notebook.run("lab.check('sum')")
    assert "There is no exercise 'sum': choose one of" in refused and "first-sum" in refused


def test_the_stop_button_ends_a_wait_and_reset_brings_the_ranks_back(shared, shared_folder):
    notebook = shared
    notebook.run(ENGINES.format(3))
    notebook.run("%px import dtlib, pathlib, time; world = dtlib.init()")
    for cell, waiting in (("time.sleep(600)", 3), ("if world.rank: world.comm.barrier()", 2)):
        here = shared_folder / f"waiting{waiting}"
        here.mkdir()
        meanwhile(lambda: len([*here.iterdir()]) == 3, threading.Timer(0.5, notebook.stop_button).start)  # noqa: B023
        shown = notebook.run(f"%%px\npathlib.Path('{here}', str(world.rank)).touch()\n{cell}")
        assert "Interrupted on rank" in shown and ("out of step" in shown) == ("barrier" in cell)
    assert "ranks 0 to 2 | [0, 1, 2]" in notebook.run(
        "%px dtlib.reset(); print(world.comm.all_gather_object(world.rank))"
    )


def test_reset_ends_a_wait_from_another_thread_and_the_panel_says_who_waits(shared):
    notebook = shared
    notebook.run(ENGINES.format(3))
    notebook.run("%px import dtlib, time; dtlib.reset(); world = dtlib.init()")
    press = (
        "import threading, time; from dtlib.lab.engines import panel, engine_set; seen = [panel.drawn()]\n"
        "def once(ready, do):\n"
        "    def work():\n        while not ready(panel.drawn()): time.sleep(0.1)\n        do()\n"
        "    threading.Thread(target=work).start()\n"
        "def press():\n    seen.append(panel.drawn())\n    engine_set.current().reset()\n    seen.append('reset')\n"
        "once(lambda page: page.count('waits for rank 1') == 2 and 'busy in' in page, press)"
    )
    notebook.run(press)
    shown = notebook.run("%%px\nif world.rank == 1: time.sleep(60)\nworld.comm.barrier()")
    assert "Interrupted on ranks 0 to 2." in shown and "Reset was pressed: the ranks are back in step." in shown
    assert "run %px dtlib.reset()" not in shown
    assert "ranks 0 to 2 | [0, 1, 2]" in notebook.run("%px print(world.comm.all_gather_object(world.rank))")
    before, meanwhile, after = notebook.run("print('|'.join([*seen, panel.drawn()]).replace('|reset', ''))").split("|")
    assert "Ranks of <b>lesson.ipynb</b>" in before
    assert before.count(">idle<") == after.count(">idle<") == 3
    assert meanwhile.count("waits for rank 1 (barrier) in line 2: world.comm.barrier()<") == 2
    assert "busy in line 1: if world.rank == 1: time.sleep(60)<" in meanwhile
    # With nothing to end, it resets all the same; and what another cell of the notebook waits for ends too.
    assert notebook.run("engine_set.current().reset(); lab.values('world.comm.name')").count("world.") == 3
    # Widgets show it, where there is a page.
    assert "Error" not in notebook.run("lab.panel(); lab.panel(); panel._panel.button.click(); panel._panel.said.value")
    notebook.run("once(lambda page: page.count('busy in') == 3, panel._panel.stop.click)")
    assert "Interrupted on ranks 0 to 2." in notebook.run("%px time.sleep(60)")


def test_what_a_cell_showed_is_shown_again(shared):
    notebook = shared
    notebook.run("import sys; from dtlib import lab; from IPython.display import display, clear_output")
    notebook.run(
        "print('out'); print('err', file=sys.stderr); h = display('first', display_id=True); h.update('second'); 7"
    )
    number = notebook.number
    shown = notebook.run("lab.last()")
    assert shown.startswith(f"Cell [{number}], \"print('out'); print('err'") and "ended at" in shown
    assert "out\n" in shown and "err\n" in shown and "'second'" in shown and "1st'" not in shown.split("\n", 1)[1]
    assert shown.endswith("7\n")
    notebook.run("1 / 0")
    assert "ZeroDivisionError" in notebook.run("lab.last()") and "out\n" in notebook.run(f"lab.last({number})")
    notebook.run("print('gone'); clear_output(wait=True); print('stays')")
    shown = notebook.run("lab.last()")
    assert "stays" in shown and "gone\n" not in shown
    notebook.run("print('drawn'); clear_output(wait=True); 1 / 0")  # between two pictures
    assert "drawn\n" not in notebook.run("lab.last()"), "the error replaces it"
    notebook.run("print('drawn'); clear_output(wait=True)")
    assert "drawn\n" in notebook.run("lab.last()"), "nothing replaces it, as on the page"
    notebook.run("for _ in range(30): print('x' * 100_000)")
    shown = notebook.run("lab.last()")
    assert len(shown) < 1.3e6 and "the rest, beyond 1 MB, was not stored" in shown
    for _ in range(20):
        notebook.run("print('one more')")
    assert f"Cell [{number}] is stored" in notebook.run(f"lab.last({number})")


@contextmanager
def called(name, folder, count=1):
    """Processes of this name that do nothing."""
    (folder / name).symlink_to(shutil.which("sleep"))
    started = [subprocess.Popen([str(folder / name), "100"]) for _ in range(count)]
    yield started
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names of processes that all can read")
def test_starts_take_turns_with_those_that_began_before(tmp_path, monkeypatch):
    for name in ("WAITS", "STARTS"):  # no test beside this one has these
        monkeypatch.setattr(start_queue, name, f"{name} {os.getpid()}")
    queue = start_queue.Queue(at_once=1)
    with ExitStack() as opened:
        names = (start_queue.WAITS, start_queue.STARTS, "mine")
        *_, (mine,) = [opened.enter_context(called(name, tmp_path)) for name in names]
        assert queue.before() == 0, "nobody began before this process"
        queue._me = Process.of(mine.pid)
        assert wait_until(lambda: queue.before() == 2)
        queue.at_once = 3
        assert queue.before() == 0, "three may start at once"
        queue.at_once = 1
        monkeypatch.setattr(start_queue, "LONGEST_START", 0)
        assert queue.before() == 1, "who starts for too long is passed over"
        monkeypatch.setattr(start_queue, "LONGEST_WAIT", -1)
        assert queue.before() == 0, "and nobody waits for ever"


def test_time_limits_grow_with_the_load(monkeypatch):
    cores = usable_cores()
    for load, times in ((0, 1), (cores, 1), (3 * cores, 3), (1000 * cores, start_queue.LARGEST_LOAD_FACTOR)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0, 0))
        assert start_queue.load_factor() == times


def test_heartbeats_slow_down_once_all_engines_are_there(monkeypatch):
    monkeypatch.setenv("DTLIB_RANKS", "2")
    monkeypatch.setattr(HeartMonitor, "handle_new_hearts", lambda self, hearts: self.hearts.update(hearts))
    heartbeats.slow_down()
    monitor = SimpleNamespace(hearts=set(), caller=SimpleNamespace(callback_time=heartbeats.FAST))
    found = []
    for heart in "ab":
        HeartMonitor.handle_new_hearts(monitor, {heart})
        found.append(monitor.caller.callback_time)
    assert found == [heartbeats.FAST, heartbeats.SLOW]
    assert monitor.max_heartmonitor_misses * heartbeats.SLOW == heartbeats.DEAD_AFTER


def test_a_second_notebook_takes_over_and_the_last_one_ends_the_engines(notebooks, workshop_folder, tmp_path):
    first, second = notebooks("first.ipynb"), notebooks("second.ipynb")
    with called(start_queue.STARTS, tmp_path, start_queue.Queue().at_once) as others:
        first.live = []
        meanwhile(lambda: "first" in str(first.live), lambda: [other.kill() or other.wait() for other in others])
        first.run(ENGINES.format(2))
    assert any("on this machine start" in line for line in first.live) == (sys.platform == "linux"), first.live
    first.run("%px x = 1; from dtlib.lab.engines import panel")
    assert first.run("lab.panel(); from dtlib.lab.engines import panel") == ""
    pids = engine_pids(workshop_folder)
    shown = second.run(ENGINES.format(""))
    is_open = "print(panel._panel is not None and panel._panel.table.comm is not None)"
    assert second.run("from dtlib.lab.engines import panel; " + is_open) == "True\n", "with the ranks comes the panel"
    assert wait_until(lambda: first.run(is_open) == "False\n")
    assert "These 2 ranks were running for first.ipynb: this notebook takes them over." in shown
    assert engine_pids(workshop_folder) == pids
    assert "NameError" in second.run("%px x")
    second.run("%px x = 2")
    assert "second.ipynb has taken over the ranks" in first.run("%px x")
    assert "second.ipynb" in first.run(ENGINES.format(""))

    # Engines end with the last notebook, however that ends.
    first.kill()
    record = Record(workshop_folder / course.PROFILE)
    assert wait_until(lambda: len(record.attached()) == 1)
    restarted = notebooks("first.ipynb")
    shown = restarted.run(ENGINES.format(2))
    assert "The ranks of this notebook still run." in shown and "takes them over" not in shown
    restarted.kill()
    assert "NameError" not in second.run(ENGINES.format("") + "\n%px print(1)")
    assert engine_pids(workshop_folder) == pids
    second.kill()
    assert wait_until(lambda: not processes_of(workshop_folder)), processes_of(workshop_folder)
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert record.read("set.json") == {}, "the keeper has ended in good order"


def test_a_wait_says_for_whom_everybody_waits(shared):
    notebook = shared
    notebook.run(ENGINES.format(3))
    notebook.run("%px import dtlib, torch; dtlib.reset(); world = dtlib.init()")
    notebook.live = []
    meanwhile(lambda: "Waiting: " in "".join(notebook.live), notebook.stop_button)
    shown = notebook.run("%%px\nworld.comm.barrier()\nif world.rank != 2: world.comm.barrier()")
    # The line appears with the first rank that has waited for long enough, is brought up to date, and stays after Stop.
    whom = r"ranks? [01].* for \d s in barrier: rank 2 has finished its cell; its last operation was barrier"
    assert any(re.search("Waiting: " + whom, text) for text in notebook.live), notebook.live
    shown = " ".join(shown.split())
    assert re.search("Until then they waited: " + whom, shown), shown
    assert "(`line 1: world.comm.barrier()`)" in shown
    everybody_adds = "%px dtlib.reset(); print(world.comm.all_reduce(torch.tensor(1)).item())"
    assert "ranks 0 to 2 | 3" in notebook.run(everybody_adds)

    # A rank that raised an error does not arrive: the others are told at once, and nobody goes on out of step.
    shown = notebook.run("%%px\nif world.rank == 2: 1 / 0\nworld.comm.barrier()")
    assert (
        "On ranks 0 and 1:\nPeerFailed: barrier (`line 2: world.comm.barrier()`) cannot end: rank 2 raised "
        "ZeroDivisionError: division by zero" in shown
    )
    assert "The ranks are out of step: run %px dtlib.reset()" in shown
    shown = notebook.run("%px world.comm.barrier()")
    assert shown.count("so ranks are out of step. Run %px dtlib.reset() to go on") == 2 and "On rank 2:" in shown
    assert "ranks 0 to 2 | 3" in notebook.run(everybody_adds)
    notebook.run("%%px\nif world.rank == 0: world.comm.send(torch.ones(1), 1)\nif world.rank == 1: 1 / 0")
    assert "out of step" in notebook.run("%px world.comm.barrier()"), "what was sent must not meet the next receive"
    assert "ranks 0 to 2 | 3" in notebook.run(everybody_adds)
    # Where all raised at the same point, all go on from there.
    assert "out of step" not in notebook.run("%px world.comm.barrier(); 1 / 0")
    assert "ranks 0 to 2 | 3" in notebook.run(everybody_adds.replace("dtlib.reset(); ", ""))

    # In a notebook ranks compare what they call.
    shown = notebook.run("%px world.comm.all_reduce(torch.ones(3), 'max' if world.rank == 1 else 'sum')")
    assert "ranks 0, 2 call all_reduce(sum) of (3,) float32 in `line 1:" in shown
    assert "rank 1 calls all_reduce(max) of (3,) float32 in" in shown
    assert "ranks 0 to 2 | 3" in notebook.run(everybody_adds)


@pytest.mark.slow
def test_ranks_that_are_gone_or_stuck_are_replaced(notebooks, workshop_folder):
    notebook = notebooks()
    notebook.run(ENGINES.format(2))
    old = engine_pids(workshop_folder)
    shown = notebook.run(
        "%%px\nimport dtlib, os; world = dtlib.init()\nif world.rank: os.kill(os.getpid(), 9)\nworld.comm.barrier()"
    )
    assert "Rank 1 was ended by signal 9 (Killed)" in shown and "2 new ones have been started" in shown
    assert set(engine_pids(workshop_folder)).isdisjoint(old)
    assert "ranks 0 and 1 | 1" in notebook.run("%px 1")
    psutil.Process(engine_pids(workshop_folder)[0]).kill()
    assert wait_until(lambda: "Rank 0 was ended by signal 9 (Killed)" in notebook.run("%px 1"))
    assert "ranks 0 and 1 | 1" in notebook.run("%px 1")
    assert "Starting 3 new ranks: before, there were 2." in notebook.run(ENGINES.format(3))
    assert "ranks 0 to 2 | 1" in notebook.run("%px 1")

    # A keeper that is itself killed takes its engines along.
    old = engine_pids(workshop_folder)
    Record(workshop_folder / course.PROFILE).keeper().kill()
    assert wait_until(lambda: not processes_of(workshop_folder)), processes_of(workshop_folder)
    notebook.run(ENGINES.format(2))
    assert set(engine_pids(workshop_folder)).isdisjoint(old)
    assert "ranks 0 and 1 | 1" in notebook.run("%px 1")

    # So do processes that ranks have started, however soon.
    notebook.run("%px import subprocess; subprocess.Popen(['sleep', '987'], start_new_session=True)")
    assert "Starting 2 new ranks: the 2 that ran have been ended" in notebook.run("lab.engines(restart=True)")
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987"]]


# What is on record once a start has come so far.
PHASES = {
    "keeper": lambda record: record.keeper(),
    "controller": lambda record: record.read("set.json").get("connection"),
    "ranks": lambda record: record.read("ranks.json"),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_stop_while_engines_start_leaves_one_set_or_none(notebooks, workshop_folder, phase):
    notebook, record = notebooks(), Record(workshop_folder / course.PROFILE)
    notebook.run("from dtlib import lab")
    meanwhile(lambda: PHASES[phase](record), notebook.stop_button)
    assert "KeyboardInterrupt" in notebook.run("lab.engines(2); import time; time.sleep(60)", timeout=120)
    notebook.run(ENGINES.format(2))
    assert sum("ipyparallel.controller" in line for line in processes_of(workshop_folder)) <= 1 + 12  # and its threads
    assert len([line for line in processes_of(workshop_folder) if "dtlib.lab.engines.keeper" in line]) == 1
    assert "ranks 0 and 1 | 1" in notebook.run("%px 1")


def test_a_kernel_that_is_killed_while_engines_start_leaves_nothing(notebooks, workshop_folder):
    notebook, record = notebooks(), Record(workshop_folder / course.PROFILE)
    notebook.send(ENGINES.format(2))
    assert wait_until(record.keeper)
    psutil.Process(notebook.pid).kill()
    assert wait_until(lambda: not processes_of(workshop_folder)), processes_of(workshop_folder)


@pytest.mark.slow
def test_an_mpiexec_that_fails_leaves_nothing(workshop_folder, monkeypatch):
    monkeypatch.chdir(workshop_folder)
    config = workshop_folder / course.PROFILE / "ipcluster_config.py"
    config.write_text(config.read_text() + "\nc.MPILauncher.mpi_cmd = ['/bin/false']\n")
    refuses(r"had started|did not start|ended immediately after their start", lab.engines, 2)
    assert wait_until(lambda: not processes_of(workshop_folder)), processes_of(workshop_folder)


def test_what_a_killed_keeper_left_is_removed_by_the_next(tmp_path, monkeypatch):
    left = ["log/ipcontroller-dtlib-1.log", "pid/ipcontroller-dtlib-1.pid", "security/cluster-dtlib-1.json",
            "security/ipcontroller-dtlib-1-client.json", "state/torch-here-1"]  # fmt: skip
    others = ["security/mine.json", "state/set.json"]
    for name in left + others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")

    class Started(Exception):
        pass

    def cluster(**_):
        raise Started

    monkeypatch.setattr("ipyparallel.Cluster", cluster)
    monkeypatch.setattr(keeper, "python_of_a_rank", list)
    monkeypatch.setenv("DTLIB_RANKS", "2")
    with pytest.raises(Started):
        keeper._start(tmp_path, 2, "dtlib-2")
    assert [name for name in left + others if (tmp_path / name).exists()] == others


def test_a_profile_that_is_none(tmp_path):
    refuses("is not an ipyparallel profile", lab.engines, 2, profile=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_table_of_ranks_says_when_torch_is_there(tmp_path):
    row = {"rank": 0, "host": "here", "pid": 7, "device": "cpu", "cores": 2}
    shown, table = [], RankTable([row], tmp_path)
    table.handle = SimpleNamespace(update=lambda each: shown.append(repr(each)))
    table.show()
    assert "importing" in shown[0]
    (tmp_path / "torch-here-7").touch()
    assert wait_until(lambda: len(shown) == 2) and "importing" not in shown[1] and "yes" in shown[1]


def test_why_ranks_are_new_and_why_a_start_has_failed(tmp_path, monkeypatch):
    assert starting.why_new({"ranks": 2}, 3, False) == "before, there were 2."
    assert "do not answer" in starting.why_new({"ranks": 4}, 4, False)
    assert "restart=True" in starting.why_new({"ranks": 4}, None, True)
    said = starting.too_few(0, 16, 124.0, course.PROFILE)
    assert said.startswith("Only 0 of 16 ranks have started in 124 s") and re.search(r"such as lab.engines\(\d\)", said)
    assert "log says why" in starting.too_few(3, 4, None, tmp_path / "log")
    (tmp_path / "ipengine-1.log").write_text("-----\nNo components were able to be opened.\n\nHost: a\n")
    assert starting.too_few(3, 4, None, tmp_path).endswith("mpiexec said: No components were able to be opened.")
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    assert "sets OMPI_MCA_pml=ucx, perhaps for another Open MPI: unset it" in starting.too_few(3, 4, None, tmp_path)


def test_more_ranks_than_a_machine_carries_are_warned_of(monkeypatch):
    monkeypatch.setattr(starting, "usable_cores", lambda: 2)
    monkeypatch.setattr(starting.psutil, "virtual_memory", lambda: SimpleNamespace(available=6e9))
    assert starting.warning(4) is None
    assert "64 ranks on 2 cores will be slow: 32 share a core" in starting.warning(64)
    assert "they need about 28.2 GB of memory, and 6.0 GB are free" in starting.warning(64)
    assert "16 ranks" in starting.warning(16)
    monkeypatch.setattr(starting.psutil, "virtual_memory", lambda: SimpleNamespace(available=1e9))
    assert "and 1.0 GB are free" in starting.warning(4)


@for_each(n=[0, -1, 1000, "four", 2.5, True])
def test_a_number_of_ranks_that_makes_no_sense(n):
    refuses(r"n of lab.engines\(n\) is .*: give a whole number from 1 to 64", lab.engines, n)


def test_a_profile_that_cannot_be_written(workshop_folder, monkeypatch):
    monkeypatch.chdir(workshop_folder)
    # A file where a folder must go stops root too, which a missing permission does not.
    (workshop_folder / course.PROFILE / "state").write_text("")
    refuses(r"cannot be written .*chmod", lab.engines, 2)


@pytest.mark.parametrize("where", ["folder", "notebook", "keeper"])
def test_a_keeper_that_does_not_start(workshop_folder, monkeypatch, where):
    if where == "folder":
        workshop_folder = workshop_folder.rename(workshop_folder.with_name("for $5"))
        expected = r"cannot run in .*for \$5.* rename that folder"
    monkeypatch.chdir(workshop_folder)
    if where == "notebook":
        (workshop_folder / course.PROFILE / "log").write_text("")  # a file where a folder must go
        expected = r"The process that starts the engines cannot be started .*dtlib doctor"
    elif where == "keeper":
        monkeypatch.setenv("PYTHONPATH", str(workshop_folder))
        (workshop_folder / "dtlib").mkdir()
        (workshop_folder / "dtlib" / "__init__.py").write_text("raise ImportError('half a package')")
        expected = r"ended immediately \(.*half a package\): fix this.*keeper.log"
    refuses(expected, lab.engines, 2)
    assert not processes_of(workshop_folder)


def test_a_keeper_whose_notebook_s_child_dies_before_it_is_on_record(workshop_folder):
    keeper = (
        "import os, signal, sys; from dtlib.lab.engines import keeper, workshop;"
        "workshop.Record.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        f"sys.argv[1:] = [{str(workshop_folder / course.PROFILE)!r}, '2']; keeper.main()"
    )
    assert subprocess.run([sys.executable, "-c", keeper]).returncode == -signal.SIGKILL
    assert wait_until(lambda: not processes_of(workshop_folder)), processes_of(workshop_folder)


def test_another_mpi_is_refused_before_anything_starts(workshop_folder, monkeypatch, tmp_path):
    from tests.test_cli import fake_mpiexec

    monkeypatch.chdir(workshop_folder)
    monkeypatch.setenv("DTLIB_MPIEXEC", fake_mpiexec(tmp_path, "mpirun (Open MPI) 4.1.4"))
    refuses(r"starts Open MPI 4.1.4, but mpi4py uses Open MPI", lab.engines, 2)
    assert not processes_of(workshop_folder)


def test_outside_a_workshop_the_package_s_own_is_used(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert (course.folder() / "notebooks" / "source").is_dir()


def test_the_call_keeps_its_name_beside_the_room_of_that_name():
    import dtlib.lab.engines.workshop  # noqa: F401

    assert [callable(lab.engines) for _ in range(2)] == [True, True]
    assert lab.engines.__module__ == "dtlib.lab.engines.engine_set"


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile,where", [
    ("pass", "rank 1 has not arrived; it last finished barrier (`line 3: comm.barrier()`)"),
    ("while time.time() < end: pass", "rank 1 is in `line 6: while time.time() < end: pass`; its last"),
])  # fmt: skip
def test_a_check_says_where_the_missing_rank_is(shared, meanwhile, where):
    shared.run(ENGINES.format(3))
    shared.run(
        "%%px\nimport time\ndef estimate_pi(points, comm):\n    comm.barrier()\n    end = time.time() + 8\n"
        f"    if comm.rank == 1:\n        {meanwhile}\n    else:\n        comm.barrier()\n"
    )
    shown = " ".join(shared.run("lab.check('pi-on-ranks')").split())
    assert f"Waited 5 s in barrier (`line 8: comm.barrier()`): {where}" in shown, shown


def test_a_reader_follows_a_cell_through_few_files(shared):
    """The notebook's side of a %%px cell, as tests/test_walk.py counts the others: a number here may only fall."""
    shared.run(ENGINES.format(3))
    said = shared.run(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.test_walk import COUNTS, Walk\n"
        "found = []\n"
        "for repeat in range(5):\n"
        "    with Walk() as one:\n"
        "        get_ipython().run_cell_magic('px', '', 'x = 1')\n"
        "    found.append([one.counts()[name] for name in COUNTS])\n"
        "print('walk', *min(found))"
    )
    files, functions, lines, returns = map(int, said.split("walk ")[1].split()[:4])
    assert 5 < files <= 10 and functions <= 25 and lines <= 122 and returns <= 7, said
