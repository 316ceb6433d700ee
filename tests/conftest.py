import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from dtlib.lab.course import LEFT_BEHIND
from dtlib.world.launch import forked_ranks, python_of_a_rank, rank_environment, start_ranks
from dtlib.world.machine import gpu_names
from tests.ranks import IMPORTS, end_worlds

ROOT = Path(__file__).parents[1]
pytest_plugins = ["tests.skipped"]
# Shells start background jobs with SIGINT ignored, and every process that a test starts would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules.setdefault("rfc3987_syntax", None)  # nbformat would have jsonschema import it, which takes seconds


def pytest_addoption(parser):
    parser.addoption("--ranks", type=int, help="run the tests of this many ranks alone")


def pytest_collection_modifyitems(config, items):
    if wanted := config.getoption("--ranks"):
        items[:] = [item for item in items if hasattr(item, "callspec") and item.callspec.params.get("ranks") == wanted]
    if not gpu_names():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and there is none here"))


def pytest_configure(config):
    """Have the workers of pytest-xdist fork their ranks from one process, which imports torch while they collect."""
    if getattr(config.option, "numprocesses", None):
        ranks = forked_ranks(*IMPORTS)
        ranks.__enter__()
        config.add_cleanup(lambda: ranks.__exit__(None, None, None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of two processes that run tests one has the worlds: ranks of two would wait for each other's cores."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.endswith(("rank]", "ranks]")) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def wants_ranks(session) -> bool:
    """Whether the tests of this process start so many that importing torch once for all of them is worth it."""
    if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist: it has been done
        return False
    names = ("on_ranks", "start_ranks", "said_by_ranks", "start_python", "lab", "recovery")
    return any(hasattr(item.module, name) for item in session.items for name in names)


def pytest_runtest_setup():
    """What nobody holds any more ends, workers of a loader too; what stays, modules above all, is looked at once."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_over(request):
    """No process that a test started outlives the session. Ranks are forked from a process that lives as long as it."""
    if "torch" in sys.modules:  # two threads that wait for each other's core make small products 500 times as slow
        sys.modules["torch"].set_num_threads(1)
    with forked_ranks(*IMPORTS) if wants_ranks(request.session) else nullcontext():
        yield
        end_worlds()
    gc.unfreeze()
    gc.collect()  # a loader that nobody holds any more ends its workers
    children = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=30)
    names = [" ".join(child.cmdline()) for child in alive]
    for child in alive:
        child.kill()
    assert not names, f"tests left processes behind: {names}"


@pytest.fixture
def workshop_folder(tmp_path):
    return make_workshop(tmp_path)


def make_workshop(folder):
    """A workshop of its own, so that a test cannot meet the engines of whoever works in this one."""
    ignore = shutil.ignore_patterns(*LEFT_BEHIND)
    shutil.copytree(ROOT / "cluster_profiles", folder / "cluster_profiles", ignore=ignore)
    (folder / "notebooks").mkdir()
    return folder


def said_by_ranks(command, ranks: int, **popen) -> str:
    """What a program prints on so many new ranks, all of which end well."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_ranks(command, ranks, **pipes, **popen) as started:
        said, errors = started.communicate(timeout=120)
    assert started.returncode == 0, said + errors
    return said


def start_python(*words, env=None, **popen) -> subprocess.Popen:
    """A new Python, without MPI, as `python words`; forked like ranks, which have imported torch, where that can be."""
    env = {**os.environ, **rank_environment(1), "OMP_NUM_THREADS": "1", **(env or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*python_of_a_rank(), *map(str, words)], env=env, **{**pipes, **popen})


@pytest.fixture
def run_here(capsys):
    """Run the ``dtlib`` command in this process: its arguments, and variables of the environment."""
    from dtlib.cli import main

    def run(*arguments, **environment):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                status = main(list(map(str, arguments)))
            except SystemExit as ended:
                status = ended.code
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


@contextmanager
def files_of_at_most(count: int):
    """Files of this process cannot grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_until(condition, seconds: float = 300) -> bool:
    """Until ``condition()`` holds, which is returned as true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.05)
    return True
