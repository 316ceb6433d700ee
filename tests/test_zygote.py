"""Ranks that are forked behave as those that are started one by one, and whatever goes wrong they are started so."""

import ast
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from dtlib.world import forking, launch, zygote
from dtlib.world.compiled import compiled
from dtlib.world.launch import start_ranks
from dtlib.world.processes import Process, with_descendants
from tests.conftest import said_by_ranks, wait_until

ROOT = Path(__file__).parents[1]
REPORT = """
import json, os, random, sys
from pathlib import Path
import numpy, torch
import dtlib
world = dtlib.init()
facts = {
    "parent": os.getppid(), "pid": os.getpid(), "argv": sys.argv, "name": __name__, "file": __file__, "main": __spec__,
    "path": sys.path[0], "cwd": os.getcwd(), "mark": os.environ.get("MARK"), "folder": os.environ.get("ONLY_ZYGOTE"),
    "drawn": [random.random(), float(numpy.random.random()), float(torch.rand(1))], "threads": torch.get_num_threads(),
    "ps": Path("/proc/self/cmdline").read_text().strip(chr(0)).replace(chr(0), " "), "hash": hash("weight"),
    "session": os.getsid(0), "group": os.getpgid(0),
    "total": float(world.comm.all_reduce(torch.ones(300_000))[0]),
}
everyone = world.comm.all_gather_object(facts)
if world.rank == 0:
    print(json.dumps(everyone))
"""
ENDS = {
    "well": "print('words')",
    "status": "import sys; print('words'); sys.exit(3)",
    "sentence": "import sys; sys.exit('words')",
    "error": "def f():\n    raise ValueError('words')\nf()",
    "syntax": "def f(:\n    pass",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "import signal; signal.raise_signal(signal.SIGINT)",
    "open file": "import gzip\nfile = open('out', 'w')\nfile.write('words' * 100)\n"
    "zipped = gzip.open('more', 'wb')\nzipped.write(b'x')",
    "at exit": "import atexit, threading, time\natexit.register(print, 'at exit')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')",
    "workers": "from torch.utils.data import DataLoader\n"
    "loader = iter(DataLoader(range(8), num_workers=2))\nprint(next(loader))",
    "input": "print(input())",
    "progress": "from tqdm.auto import tqdm\nprint(tqdm.__mro__[1], tqdm(range(3)).fp.fileno())",
    "spawn": "from multiprocessing import get_context\ndef f(x):\n    return x + 1\n"
    "if __name__ == '__main__':\n    with get_context('spawn').Pool(1) as pool:\n        print(pool.map(f, [1]))",
}  # fmt: skip


def ranks_said(command, ranks, **popen):
    return json.loads(said_by_ranks(command, ranks, **popen))


def the_zygote() -> psutil.Process:
    """That of this session, once it can fork."""
    if why := forking.why_not(launch.find_mpiexec()):
        pytest.skip(why)

    def parent():
        return int(run(launch.python_of_a_rank(), "import os; print(os.getppid())").stdout)

    wait_until(lambda: parent() != os.getpid())  # it still imports, longer than launchers wait
    return psutil.Process(parent())


def run(python, program, **settings):
    """A program, by Python or by the launcher and Python, as one rank without mpiexec."""
    env = {**os.environ, **launch.rank_environment(1), "OMP_NUM_THREADS": "1", **settings.pop("env", {})}
    first = [] if isinstance(program, Path) else ["-c"]
    return subprocess.run(
        [*python, *first, str(program)], capture_output=True, text=True, env=env, timeout=100, **settings
    )


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))])
def test_they_are_forked_and_each_is_a_process_of_its_own(ranks, tmp_path, monkeypatch):
    parent = the_zygote()
    (tmp_path / "report.py").write_text(REPORT)
    monkeypatch.setenv("MARK", "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    facts = ranks_said(["report.py", "one", "two words"], ranks, cwd=tmp_path)
    assert len(facts) == ranks == facts[0]["total"]
    for each in facts:
        assert each["parent"] == parent.pid
        assert each["argv"] == ["report.py", "one", "two words"] and each["name"] == "__main__"
        assert each["main"] is None and each["file"] == str(tmp_path / "report.py")
        assert each["path"] == each["cwd"] == str(tmp_path) and each["mark"] == "here"
        assert each["threads"] == 2
        # A group for itself, the session of all: between two sessions a yield gives nothing away (Linux's autogroup).
        assert each["group"] == each["pid"] and each["session"] == os.getsid(parent.pid)
        assert each["ps"] == f"{sys.executable} report.py one two words"
    for drawn in zip(*(each["drawn"] for each in facts), strict=True):
        assert len(set(drawn)) == ranks
    assert all(Path(f"/proc/{each['pid']}").exists() is False for each in facts)


@pytest.mark.parametrize("end", [pytest.param(end, marks=[pytest.mark.slow] * (end == "workers")) for end in ENDS])
def test_they_end_as_others_do(end, tmp_path):
    the_zygote()
    said, files = [], []
    program = tmp_path / "program.py"
    program.write_text(ENDS[end])
    for python in ([sys.executable], launch.python_of_a_rank()):
        for path in ("out", "more"):
            (tmp_path / path).unlink(missing_ok=True)
        ran = run(python, program, cwd=tmp_path, input="given\n")
        err = [line for line in ran.stderr.splitlines() if "stands for" not in line]
        said.append((ran.returncode, ran.stdout, err))
        files.append([(tmp_path / path).stat().st_size for path in ("out", "more") if (tmp_path / path).exists()])
    assert len(launch.python_of_a_rank()) == 2 and said[0] == said[1] and files[0] == files[1]
    assert (end == "open file") == bool(files[0] and all(files[0]))


def test_modules_and_words_run_as_python_runs_them(tmp_path):
    the_zygote()
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv, __name__, __spec__.name, sys.path[0])")
    for words in (["-m", "mine", "a"], ["-c", "import sys; print(sys.argv, __name__, repr(sys.path[0]))", "a"]):
        outs = []
        for python in ([sys.executable], launch.python_of_a_rank()):
            env = {**os.environ, **launch.rank_environment(1), "OMP_NUM_THREADS": "1"}
            outs.append(subprocess.check_output([*python, *words], cwd=tmp_path, env=env, text=True))
        assert outs[0] == outs[1]


def test_what_a_fork_cannot_do_is_started(tmp_path):
    """Options of Python, what is read when it starts, a module beside the program with the name of one imported."""
    ours = the_zygote().pid
    python, who = launch.python_of_a_rank(), "import os; print(os.getppid())"

    def forked(*arguments, **settings):
        return int(run(*arguments, **settings).stdout.split()[-1]) == ours

    assert forked(python, who) and forked(python, who, env={"OMP_NUM_THREADS": "2", "ANY": "thing"})
    assert not forked([*python, "-E"], who)
    assert not forked(python, who, env={"PYTHONHASHSEED": "1"})
    assert not forked(python, who, env={"MKL_NUM_THREADS": "3"})
    assert not forked(python, who, env={"DTLIB_ZYGOTE": str(tmp_path)})
    (tmp_path / "program.py").write_text(who)
    assert forked(python, tmp_path / "program.py")
    (tmp_path / "queue.py").write_text("")
    assert not forked(python, tmp_path / "program.py")


@pytest.mark.slow
def test_what_imports_leave_in_the_environment_keeps_ranks_forked(monkeypatch):
    """A notebook that has imported these starts engines. The zygote is the test's own."""
    imports = "import os; before = {*os.environ}; import sklearn, torch._dynamo; "
    imports += "print({name: os.environ[name] for name in {*os.environ} - before})"
    of_imports, who = ast.literal_eval(run([sys.executable], imports).stdout), "import os; print(os.getppid())"
    monkeypatch.delenv(forking.VARIABLE, raising=False)
    with launch.forked_ranks() as started:
        wait_until(lambda: int(run(launch.python_of_a_rank(), who, env=of_imports).stdout) == started.pid)


def test_limits_are_those_of_who_starts_it():
    the_zygote()
    program = "import os; from resource import *; "
    program += "print(os.umask(0), os.sched_getaffinity(0), getrlimit(RLIMIT_NOFILE), os.nice(0))"
    limit = f"ulimit -n 777; umask 0027; nice -n 3 taskset -c 0 {' '.join(launch.python_of_a_rank())} -c '{program}'"
    said = subprocess.check_output(limit, shell=True, text=True, env={**os.environ, **launch.rank_environment(1)})
    assert said.strip() == f"23 {{0}} (777, 777) {os.nice(0) + 3}"


def test_signals_reach_a_rank_and_its_launcher_takes_it_along(tmp_path):
    ours, python = the_zygote(), launch.python_of_a_rank()
    # Python heeds a signal that comes just before a sleep only after that sleep.
    program = "import os, time; print(os.getpid(), flush=True)\nwhile True: time.sleep(0.1)"
    env = {**os.environ, **launch.rank_environment(1)}
    for number, whom in [(9, "rank"), (9, "launcher"), (15, "launcher"), (2, "launcher"), (11, "rank")]:
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        with subprocess.Popen([*python, "-c", program], **pipes) as process:
            rank = psutil.Process(int(process.stdout.readline()))
            assert rank.ppid() == ours.pid
            family = with_descendants(Process.of(process.pid))
            assert [each.pid for each in family] == [process.pid, rank.pid]
            for other, state in ((signal.SIGTSTP, "stopped"), (signal.SIGCONT, "sleeping")):
                process.send_signal(other)
                wait_until(lambda: rank.status() == state)  # noqa: B023
            os.kill(rank.pid if whom == "rank" else process.pid, number)
            assert process.wait(60) == -number
            gone, _ = psutil.wait_procs([rank], timeout=60)
            assert gone
            assert (f"process {rank.pid}, which signal {number}" in process.stderr.read()) == (whom == "rank")


def test_it_forks_with_one_thread_and_without_mpi():
    look = "from dtlib.world.zygote import cannot_fork; print(cannot_fork())"
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start();"
    said = [run([sys.executable], first + look).stdout.strip() for first in ("", thread, "import mpi4py.MPI;")]
    assert said[0] == "" and "2 threads" in said[1] and "MPI is loaded" in said[2]


def test_a_socket_for_its_owner_alone():
    ours = the_zygote()
    folder = Path(os.environ[forking.VARIABLE])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    if os.getuid() == 0:  # although it may connect, another user is not heard
        ask = "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        ask += f"s.connect({str(folder / '0')!r}); print(s.recv(8))"
        folder.chmod(0o755)
        (folder / "0").chmod(0o666)
        try:
            assert run(["/usr/bin/env", "python3"], ask).stdout.strip() == "b''"
        finally:
            folder.chmod(0o700)
            (folder / "0").chmod(0o600)
    assert the_zygote() == ours


def test_who_connects_and_goes_at_once_ends_nothing():
    """Ends of a rank and of its launcher that are heard at once are told apart."""
    serve = """if True:
        import sys
        from dtlib.world import forked, forking, zygote
        ours = zygote.Zygote(sys.argv[1], forking.listen(sys.argv[1]), [])
        ours.loaded, ours.files, ours.state = True, [], zygote._state([])
        large = bytearray(200_000_000)  # so that a fork takes as long as with torch
        large[::4096] = b"x" * len(large[::4096])
        print("here", flush=True)
        forked.live(*ours.serve(), ours.pid)"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", serve, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
            assert process.stdout.readline() == "here\n"
            for _ in range(100):
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(f"{folder}/0")
            assert run([str(compiled("launcher.c")), sys.executable], "print(1)", env={"DTLIB_ZYGOTE": folder})
            assert process.poll() is None
            process.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_zygote_of_somebody_else_is_given_nothing():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # into pytest's own nobody else can look
        _thief_is_given_nothing(folder)


def _thief_is_given_nothing(folder):
    serve = f"""if True:
        import os, socket, sys
        os.chdir({folder!r}); os.chmod('.', 0o777)
        listener = socket.socket(socket.AF_UNIX); os.setuid(65534); os.umask(0); listener.bind('0'); listener.listen()
        print('here', flush=True)
        connection, _ = listener.accept(); print(connection.recv(9), flush=True)"""
    with subprocess.Popen(["/usr/bin/env", "python3", "-c", serve], stdout=subprocess.PIPE, text=True) as thief:
        assert thief.stdout.readline() == "here\n"
        launcher = [str(compiled("launcher.c")), sys.executable]
        ran = run(launcher, "print('started')", env={"DTLIB_ZYGOTE": folder})
        assert ran.stdout == "started\n" and thief.stdout.readline() == "b''\n"


def test_a_folder_that_a_killed_zygote_left_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = Path(forking.new_folder())
    forking.new_folder()
    assert left.exists(), "it has no socket yet"
    forking.listen(str(left)).close()
    os.utime(left, (0, 0))
    used = forking.new_folder()
    assert not left.exists()
    with contextlib.closing(forking.listen(used)):
        os.utime(used, (0, 0))
        forking.new_folder()
        assert os.path.exists(used)


@pytest.mark.nightly
def test_life_of_a_zygote(monkeypatch, tmp_path):
    """It begins again with changed files, and is missed by nobody."""
    the_zygote()
    monkeypatch.delenv(forking.VARIABLE)
    (tmp_path / "report.py").write_text(REPORT)
    with launch.forked_ranks() as started:
        first = []

        def are_forked():
            first[:] = ranks_said([str(tmp_path / "report.py")], 2)
            return {each["parent"] for each in first} == {started.pid}

        wait_until(are_forked)
        folder = Path(os.environ[forking.VARIABLE])
        assert first[0]["hash"] == first[1]["hash"]
        file = os.stat(zygote.__file__)
        os.utime(zygote.__file__)
        try:
            changed = ranks_said([str(tmp_path / "report.py")], 1)
        finally:
            os.utime(zygote.__file__, ns=(file.st_atime_ns, file.st_mtime_ns))  # for the zygote of this session
        assert changed[0]["parent"] == started.pid and changed[0]["hash"] != first[0]["hash"]
        os.kill(started.pid, signal.SIGSTOP)  # its launchers wait, and take the plain way
        assert ranks_said([str(tmp_path / "report.py")], 1)[0]["parent"] != started.pid
        os.kill(started.pid, signal.SIGCONT)
        wait = ["-c", "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(60)"]
        with start_ranks(wait, 1, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            rank, parent = map(int, process.stdout.readline().split())
            assert parent == started.pid
            os.kill(parent, signal.SIGKILL)
            assert process.wait(60) != 0 and f"with it process {rank}" in process.stderr.read()
        assert ranks_said([str(tmp_path / "report.py")], 1)[0]["parent"] != started.pid
    assert not folder.exists()


@pytest.mark.nightly
def test_five_hundred_starts_leave_nothing(monkeypatch):
    the_zygote()
    monkeypatch.delenv(forking.VARIABLE)
    with launch.forked_ranks() as started:
        ours, folder, python = psutil.Process(started.pid), os.environ[forking.VARIABLE], launch.python_of_a_rank()

        def held():
            return ours.num_fds(), sorted(os.listdir(folder)), len(ours.children()), ours.num_threads()

        wait_until(lambda: any("numba" in each.path for each in ours.memory_maps()))  # it imports what it has put off
        assert run(python, "pass").returncode == 0  # which is heard after that
        wait_until(lambda: not ours.children())
        before = held()
        assert before[1] == [forking.SOCKET]
        for _ in range(100):
            env = {**os.environ, **launch.rank_environment(1), "OMP_NUM_THREADS": "1"}
            five = [subprocess.Popen([*python, "-c", f"raise SystemExit({i})"], env=env) for i in range(5)]
            assert [each.wait(60) for each in five] == list(range(5))
        wait_until(lambda: held() == before)  # it closes a connection after the launcher has gone
    assert not os.path.exists(folder)


def test_a_session_of_another_user_is_passed_over(tmp_path):
    """``ompi.PID`` of another user among the temporary files, closed and dead, stops nobody."""
    if os.getuid() != 0:
        pytest.skip("only root can make a folder of another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        foreign = Path(folder, "ompi.999999")
        foreign.mkdir(mode=0o700)
        program = "import os, tempfile; from dtlib.world import launch; os.setuid(65534); "
        program += f"tempfile.tempdir = {folder!r}; launch._remove_sessions_of_the_dead(); print('passed over')"
        ran = run([sys.executable], program)
        assert ran.stdout == "passed over\n", ran.stderr
        assert foreign.is_dir()
