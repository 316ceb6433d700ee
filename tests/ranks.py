"""Run a test on real ranks: ``@on_ranks(1, 2, 3, 4)`` above a test that takes ``world``.

The test's body runs on every rank of an MPI world of each of these sizes. Worlds live as long as the test session, so
that a test costs milliseconds; one that fails or hangs takes its world with it, and the next test gets a new one.

    pytest                                     rank r of n
    connect to each rank  <----------------->  python -m tests.ranks
    (module, test, arguments) -------------->  run the body
    collect n answers     <------------------  None, or a traceback
"""

import functools
import gc
import importlib
import inspect
import os
import secrets
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Listener, wait

import pytest

from dtlib.world.launch import start_ranks
from dtlib.world.processes import Process, end_processes, with_descendants
from dtlib.world.zygote import LATE_IMPORTS
from tests.cases import run_cases, without

IMPORTS = (  # beside those that every rank needs: what many tests would import on each rank of each world
    *("pytest", "_pytest.assertion", *LATE_IMPORTS, "torch.distributed.optim", "torch.distributed.pipelining"),
    *("torch.distributed.checkpoint.state_dict", "dtlib.training.torch_runtime", "dtlib.workloads.summarization"),
    "scipy.stats",
)
TIME_LIMIT = 300  # seconds for one body or case: what hangs
GRACE_SECONDS = 2  # for the other ranks, once one has failed
_worlds = {}


def on_ranks(*sizes: int, time_limit: float = TIME_LIMIT, slow: tuple = (), nightly: tuple = (), device: str = ""):
    """Run a test on worlds of these sizes, of which ``slow`` and ``nightly`` ones are left to those tiers. Its first
    argument is ``world``; others may be fixtures that pickle, and values of ``@for_each`` below. ``device`` is where
    the test creates tensors (devices.py)."""
    marks = dict.fromkeys(slow, pytest.mark.slow) | dict.fromkeys(nightly, pytest.mark.nightly)
    params = [pytest.param(size, id=f"{size} rank{'s' * (size > 1)}", marks=marks.get(size, ())) for size in sizes]

    def decorate(below):
        body, cases = getattr(below, "body", below), getattr(below, "cases", None)
        module, name = body.__module__, body.__name__

        @pytest.mark.parametrize("ranks", params)
        @functools.wraps(below)
        def test(ranks, **fixtures):
            if cases is None:
                run_on(ranks, module, name, fixtures, time_limit, device)
            else:
                run_cases(cases, lambda case: run_on(ranks, module, name, {**fixtures, **case}, time_limit, device))

        fixtures = without(inspect.signature(body), ["world", *(cases or [{}])[0]])
        place = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = fixtures.replace(parameters=[*fixtures.parameters.values(), place])
        test.body = body
        return test

    return decorate


def run_on(ranks: int, module: str, name: str, arguments: dict, time_limit: float, device: str = "") -> None:
    """Run a test's body in the world of this size; a world in which it fails ends."""
    if (ranks, device) not in _worlds:
        _worlds[ranks, device] = RankWorld(ranks, device)
    try:
        _worlds[ranks, device].run(module, name, arguments, time_limit)
    except BaseException:
        _worlds.pop((ranks, device)).end()
        raise


def end_worlds() -> None:
    """End every world of this session."""
    while _worlds:
        _worlds.popitem()[1].end()


class RankWorld:
    """``size`` ranks that wait for tests to run."""

    def __init__(self, size: int, device: str = ""):
        self._folder = tempfile.TemporaryDirectory()
        key = secrets.token_hex(16)
        address = os.path.join(self._folder.name, "socket")
        env = {"DTLIB_TEST_KEY": key, "OMP_NUM_THREADS": "1", **({"DTLIB_TEST_DEVICE": device} if device else {})}
        with Listener(address, "AF_UNIX", authkey=key.encode()) as listener:
            self._mpiexec = start_ranks(["-m", "tests.ranks", address], size, env=env)
            connections = dict(_accept(listener) for _ in range(size))
        self._connections = [connections[rank] for rank in range(size)]
        self._processes = with_descendants(Process.of(self._mpiexec.pid))

    def run(self, module: str, name: str, arguments: dict, time_limit: float) -> None:
        for connection in self._connections:
            connection.send((module, name, arguments))
        deadline = time.monotonic() + time_limit
        missing = dict(zip(self._connections, range(len(self._connections)), strict=True))
        failures = {}
        while missing and time.monotonic() < deadline:
            for connection in wait(list(missing), timeout=max(0, deadline - time.monotonic())):
                rank = missing.pop(connection)
                try:
                    failure = connection.recv()
                except EOFError:
                    failure = "the process ended"
                if failure:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures or missing:
            report = [f"rank {rank}: {failure}" for rank, failure in sorted(failures.items())]
            report += [f"rank {rank}: did not finish" for rank in sorted(missing.values())]
            pytest.fail("\n".join(report), pytrace=False)

    def end(self) -> None:
        for connection in self._connections:
            connection.close()
        end_processes(self._processes)
        self._mpiexec.wait()
        self._folder.cleanup()


def _accept(listener):
    connection = listener.accept()
    return connection.recv(), connection


def _serve(address: str) -> None:
    """What each rank does: run the tests that it is told, until the other side closes the connection."""
    import dtlib
    from tests.devices import on_device

    _explain_assertions()
    world = dtlib.init()
    with Client(address, "AF_UNIX", authkey=os.environ["DTLIB_TEST_KEY"].encode()) as connection:
        connection.send(world.rank)
        while True:
            try:
                module, name, arguments = connection.recv()
            except EOFError:
                os._exit(0)  # after a failed test the other ranks may never come to MPI_Finalize
            gc.collect()
            gc.freeze()  # modules above all, at which collections need not look again
            try:
                body = getattr(importlib.import_module(module), name).body
                with on_device(world):
                    body(world, **arguments)
                connection.send(None)
            except BaseException:
                connection.send(traceback.format_exc())


def _explain_assertions() -> None:
    """Have ``assert a == b`` tell a and b in these processes too, as it does under pytest."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    config = get_config()
    config.parse(["--import-mode=prepend", "-p", "no:cacheprovider", "--disable-plugin-autoload"])
    install_importhook(config).mark_rewrite("tests")


if __name__ == "__main__":
    from tests.ranks import _serve  # under its own name, so that tests find the same module

    _serve(sys.argv[1])
