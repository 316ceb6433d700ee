"""How far a reader walks: the code of dtlib that runs for each of ten questions, seen by a tracer.

    python -m tests.test_walk           the table, and the files of each walk
    python -m tests.test_walk --all     with each function, in the order of the walk

Of one question, asked again of objects that have answered it before (imports, construction and caches do not count), on
rank 0 of two new ranks and in its main thread:

    files        of dtlib/ of which a line is executed
    functions    that are entered, each once; a comprehension belongs to the function in which it stands
    lines        that are executed, each once
    returns      functions in the order in which they are first entered: how often the next one lies in another file
                 than the one before, and in a file that was left before

Whoever waits executes more lines: those of a wait do not count, and the shortest of some walks does. The world's
communicator is as outside of notebooks: it compares no calls (comm.verify), and nobody watches it.
"""

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import chdir, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import dtlib
from dtlib.comm import waiting
from tests.conftest import ROOT
from tests.ranks import RankWorld

PACKAGE = os.path.dirname(dtlib.__file__) + os.sep
REPEATS = 20
IN_ITS_FUNCTION = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
WAITING = ("Operation._wait", "Operation._show", "Operation._publish", "Queue.advance", "advance_all")
COUNTS = ("files", "functions", "lines", "returns")


class Walk:
    """A context in which all that this thread runs of dtlib is noted; ``counts()`` afterwards."""

    def __init__(self):
        self.functions = {}  # (file, name) of each code object, in the order in which they are first entered
        self.lines = set()

    def begin(self) -> None:
        """From here on, in functions that run already, too."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                frame.f_trace = self._line
            frame = frame.f_back
        sys.settrace(self._call)

    def end(self) -> None:
        sys.settrace(None)

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, *error):
        self.end()

    def _call(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_qualname in WAITING:
            return None
        if code.co_name not in IN_ITS_FUNCTION:
            self.functions.setdefault(code, (code.co_filename.removeprefix(PACKAGE), code.co_qualname))
        return self._line

    def _line(self, frame, event, argument):
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def counts(self) -> dict:
        steps = list(self.functions.values())
        seen, returns = set(), 0
        for before, (file, _) in zip([("", ""), *steps], steps, strict=False):
            returns += file != before[0] and file in seen
            seen.add(file)
        files = sorted({file.removeprefix(PACKAGE) for file, _ in self.lines})
        found = {"files": len(files), "functions": len(steps), "lines": len(self.lines), "returns": returns}
        return {**found, "where": files, "steps": steps}


def walk(ask) -> dict:
    """The shortest walk of those that ``ask()`` takes, after it was asked twice; all ranks call it."""
    comm, found = dtlib.init().comm, []
    gc.collect()
    gc.freeze()
    gc.disable()  # what a collection ends would be walked through, too
    with mock.patch.multiple(waiting, SPIN_SECONDS=10.0, oversubscribed=False):
        for repeat in range(2 + REPEATS):
            comm.barrier()
            with Walk() as one:
                ask()
            if repeat >= 2:
                found.append(one.counts())
    gc.enable()
    return min(found, key=lambda counts: [counts[name] for name in COUNTS])


# A question is a context: it is given the world, and yields a function without arguments that all ranks call.


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def gradient_of(wrapped) -> callable:
    x = torch.ones(3, 4)

    def ask():
        wrapped.zero_grad()
        wrapped(x).sum().backward()

    return ask


@contextmanager
def gradient_in_plain(world):
    from dtlib.parallel.data.plain import DataParallelBuckets

    yield gradient_of(DataParallelBuckets(net(), world.comm))


@contextmanager
def gradient_in_full(world):
    from dtlib.parallel.data import DataParallel

    yield gradient_of(DataParallel(net(), world.comm))


@contextmanager
def micro_batch_of_1f1b(world):
    """A step of two micro-batches on two stages."""
    from dtlib.parallel.pipeline import Linear, PipelineStage, Schedule1F1B

    stage = PipelineStage(Linear(4, 4), world.rank, world.size, world.comm)
    schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
    x = torch.ones(4, 4)
    yield lambda: schedule.step(*[x] * (world.rank == 0), target=x if world.rank == world.size - 1 else None)


@contextmanager
def all_reduce(world):
    tensor = torch.ones(1000)
    yield lambda: world.comm.all_reduce(tensor)


@contextmanager
def folder_of_a_learner():
    """The folder in which the course was laid out, with a record of what was done, is where this process works."""
    from dtlib.lab import course

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        (Path(folder) / course.PROFILE).mkdir(parents=True)
        (Path(folder) / course.PROFILE / "ipcluster_config.py").touch()
        shutil.copy(ROOT / "notebooks" / "start.md", folder)
        (Path(folder) / course.RECORD).write_text("{}")
        yield


@contextmanager
def answer_that_is_checked(world):
    """The first of lesson 00, as its cell runs on an engine."""
    from dtlib.lab.checks import judging

    total = torch.tensor(world.rank)
    world.comm.all_reduce(total)
    with (
        folder_of_a_learner(),
        mock.patch.object(judging, "in_engine", lambda: True),
        mock.patch("dtlib.world.in_engine", lambda: True),
        mock.patch.object(judging, "get_ipython", lambda: SimpleNamespace(user_ns={"total": total})),
    ):
        yield lambda: silently(judging.check, "first-sum")


@contextmanager
def batch_to_the_engine(world):
    """From a file to a step of the engine that ``dtlib.initialize`` has made."""
    import numpy as np

    from dtlib.storage import open_samples, write

    dtype = np.dtype([("x", "f4", (1,)), ("y", "f4", (1,))])
    folder = world.comm.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    if world.rank == 0:
        write(Path(folder) / "samples", np.ones(1000, dtype), dtype, "shards", per_shard=500)
    world.comm.barrier()
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, _, loader, _ = dtlib.initialize(
        model=nn.Linear(1, 1), config=config, training_data=open_samples(Path(folder) / "samples")
    )
    batches = iter(loader)

    def ask():
        x, y = next(batches)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()

    yield ask
    world.comm.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@contextmanager
def all_reduce_of_torch(world):
    from torch import distributed as dist

    import dtlib.backend  # noqa: F401
    from benchmarks.peers import torch_group

    torch_group(world)
    group, tensor = dist.new_group(backend="dtlib"), torch.ones(1000)
    yield lambda: dist.all_reduce(tensor, group=group)


@contextmanager
def checkpoint_that_is_saved(world):
    from dtlib import checkpoint

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = world.comm.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    yield lambda: checkpoint.save(Path(folder) / "saved", model, optimizer, world.comm)
    world.comm.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@contextmanager
def guess_that_is_compared(world):
    from dtlib.lab.checks.predictions import predict

    with folder_of_a_learner():
        yield lambda: silently(predict, "sum-for-eight", 28)


def silently(call, *arguments) -> None:
    with redirect_stdout(StringIO()):
        call(*arguments)


FAULT = "a fault to the next good step"

# Files, functions, lines and returns as they are, the last three rounded up: a number here may only fall. Three have
# risen by a file, files.py, which is the one way to read and write records, two by two files, as buckets are made for
# each step and freed after it, an answer and a prediction by the hook for listeners, and a checkpoint
# and a fault by ShardInfo. A gradient in plain has risen by four, those of torch's group, an answer by the observer of
# mpi4py's calls, a checkpoint, a batch and a fault by the comparison of values. An answer has two files more, as a
# verdict's data and its display stand in files of their own.
QUESTIONS = {
    "a gradient in plain": (gradient_in_plain, (10, 60, 255, 25)),
    "a gradient in full": (gradient_in_full, (7, 43, 235, 9)),
    "a 1F1B micro-batch": (micro_batch_of_1f1b, (10, 80, 330, 32)),
    "an all-reduce": (all_reduce, (4, 30, 140, 6)),
    "an answer that is checked": (answer_that_is_checked, (17, 98, 398, 40)),
    "a batch from file to engine": (batch_to_the_engine, (17, 85, 370, 26)),
    "torch's all-reduce": (all_reduce_of_torch, (10, 55, 220, 18)),
    "a checkpoint": (checkpoint_that_is_saved, (13, 75, 365, 28)),
    "a prediction": (guess_that_is_compared, (9, 26, 105, 5)),
}
LIMITS = {name: limits for name, (_, limits) in QUESTIONS.items()} | {FAULT: (13, 85, 430, 30)}


def longer_than_allowed(found: dict) -> list[str]:
    return [
        f"{question} walks through {counts[name]} {name}, and {limit} are allowed: {counts['where']}"
        for question, counts in found.items()
        for name, limit in zip(COUNTS, LIMITS[question], strict=True)
        if counts[name] > limit
    ]


@pytest.mark.parametrize("ranks", [2], ids=["2 ranks"])  # so named, it runs where all worlds of ranks do
def test_no_walk_grows_and_a_plain_gradient_has_no_more_files_of_its_own_than_a_full_one(ranks, tmp_path):
    found = walks_on_new_ranks(ranks, tmp_path / "walks")
    assert not longer_than_allowed(found)
    plain, full = found["a gradient in plain"], found["a gradient in full"]
    plain, full = ([file for file in walk["where"] if not file.startswith("comm/")] for walk in (plain, full))
    assert len(plain) <= len(full), (plain, full)  # below it plain goes through torch.distributed, and full does not


@pytest.mark.slow
def test_the_walk_from_a_fault_to_the_next_good_step_does_not_grow(tmp_path):
    assert not longer_than_allowed(walk_of_a_fault(tmp_path / "fault"))


def note_walks(world, file: str) -> None:
    found = {}
    for name, (question, _) in QUESTIONS.items():
        with question(world) as ask:
            found[name] = walk(ask)
    if world.rank == 0:
        Path(file).write_text(json.dumps(found))


note_walks.body = note_walks  # as tests/ranks.py asks for it


def walks_on_new_ranks(ranks: int, file) -> dict:
    """Each walk, on ranks that have run no other test: a walk is longer where others have left something behind."""
    world = RankWorld(ranks)
    try:
        world.run("tests.test_walk", "note_walks", {"file": str(file)}, 120)
    finally:
        world.end()
    return json.loads(Path(file).read_text())


def of_a_fault(file: str) -> None:
    """On ranks that survive others: the last one dies, and rank 0 walks from its last good step to the next one."""
    from dtlib.recovery import Replica, leave, train_and_shrink

    world, one = dtlib.init(), Walk()
    model = net()

    def batch_of(step):
        if step == 2 and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(8, 4), torch.zeros(8).long()

    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, batch_of)

    def tell(what, **facts):
        if what == "step" and replica.steps == 2:
            one.begin()
        elif what == "step" and replica.steps == 3:
            one.end()

    comm = train_and_shrink(replica, world.comm, 4, tell)
    if world.rank == 0:
        assert comm.size == world.size - 1
        Path(file).write_text(json.dumps({FAULT: one.counts()}))
    leave(comm)


def walk_of_a_fault(file) -> dict:
    from dtlib.world.launch import start_ranks

    process = start_ranks(["-m", "tests.test_walk", "--fault", str(file)], 2, survive=True)
    process.wait(60)
    return json.loads(Path(file).read_text())


def table(all_walks: dict, with_functions: bool) -> None:
    print(f"{'':32}" + "".join(f"{name:>11}" for name in COUNTS))
    for question, counts in all_walks.items():
        print(f"{question:32}" + "".join(f"{counts[name]:11}" for name in COUNTS))
    for question, counts in all_walks.items():
        print(f"\n{question}\n    {'  '.join(counts['where'])}")
        for file, name in counts["steps"] if with_functions else ():
            print(f"        {file:40} {name}")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--fault"]:
        return of_a_fault(arguments[1])
    with tempfile.TemporaryDirectory() as folder:
        found = walks_on_new_ranks(2, Path(folder, "walks")) | walk_of_a_fault(Path(folder, "fault"))
    table(found, arguments == ["--all"])


if __name__ == "__main__":
    main(sys.argv[1:])
