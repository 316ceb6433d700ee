"""Ranks die, and training goes on: the same parameters as in one process that nothing happened to."""

import json
import random
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors import safe_open
from torch import nn

from dtlib import checkpoint
from dtlib.errors import DtlibError
from dtlib.lab.checks.exercise import EXERCISES
from dtlib.lab.checks.predictions import predictions
from dtlib.lessons.l11b import fault_lab, figures
from dtlib.lessons.l11b.training import PARAMETERS, alone
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.recovery import Replica, Run, journal, supervise
from dtlib.recovery.journal import recovery_seconds
from dtlib.world.launch import survives
from tests.cases import refuses
from tests.lessons.l11b import wrong_recovery
from tests.ranks import on_ranks
from tests.wrong_answers.cases import judged_soon

PROGRAM = ["-m", "dtlib.lessons.l11b.training"]
SECONDS = 400  # until a run counts as stuck, on a busy machine
pytestmark = pytest.mark.timeout(4 * SECONDS)
_alone = {}


def program(**options) -> list[str]:
    return [*PROGRAM, json.dumps(options)]


def fault(kind, rank, step, at="begin", **more):
    return {"kind": kind, "rank": rank, "step": step, "at": at, **more}


def trained(folder, ranks, survive=True, **options) -> Run:
    """A run that has ended well, or fails the test."""
    run = Run(program(**options), ranks, folder, survive).start()
    status = run.wait(SECONDS)
    assert status == 0, (options, run.reports, run.output()[-3000:])
    check_outcome(folder, run, options)
    return run


def check_outcome(folder, run, options) -> None:
    """Parameters and losses of a run that was never disturbed; nobody is left over."""
    steps = options.get("steps", 60)
    if steps not in _alone:
        _alone[steps] = alone({"steps": steps})
    model, losses = _alone[steps]
    with safe_open(folder / PARAMETERS, "pt") as file:
        for name, expected in model.state_dict().items():
            assert (file.get_tensor(name) - expected).abs().max() < 1e-9, name
        got = json.loads(file.metadata()["losses"])
    assert len(got) == steps
    assert max(abs(a - b) for a, b in zip(got, losses, strict=True)) < 1e-9
    assert nobody_lives(run)


def nobody_lives(run) -> bool:
    return run.mpiexec.poll() is not None and not any(process.find() for process in run.processes.values())


def steps_told(run) -> list[tuple[int, int]]:
    return [(event["step"], event["ranks"]) for event in run.events if event["what"] == "step"]


def test_shrink_from_four_ranks_to_two(tmp_path):
    """Rank 0 dies in the backward pass, and another one when its step is done and others may still be in it."""
    faults = [fault("kill", 0, 8, "backward"), fault("kill", 3, 14, "update")]
    run = trained(tmp_path, 4, by="shrink", steps=20, faults=faults)
    assert [event["lost"] for event in run.events if event["what"] == "lost"] == [[0], [3]]
    assert run.reports == [
        "Rank 0 has died: 3 ranks are left, and go on.", "Rank 3 has died: 2 ranks are left, and go on."
    ]  # fmt: skip
    told = steps_told(run)
    assert (8, 4) in told and (9, 3) in told and (20, 2) in told


def test_a_rank_that_ends_well_during_a_look_has_not_died(tmp_path, monkeypatch):
    run, reads = Run(["-c", ""], 1, tmp_path, survive=True), []

    def read(folder, place=0):  # the rank writes that it has ended, and ends, just after the first time
        reads.append(place)
        return [{"what": "ended", "rank": 0}] if len(reads) == 2 else [], place

    monkeypatch.setattr(journal, "read", read)
    run.mpiexec, run._read, run._stopped = SimpleNamespace(poll=lambda: None), 0, {}
    run.processes = {
        0: SimpleNamespace(pid=1, find=lambda: None if reads else SimpleNamespace(status=lambda: "running"))
    }
    run.poll(), run.poll()
    assert not run.reports and not run.lost


def test_a_step_is_undone_in_memory_and_tried_once_more(tmp_path):
    faults = [fault("kill", 2, 6, "update"), fault("nan", 1, 10, "nan"), fault("raise", 0, 14, "backward")]
    run = trained(tmp_path, 3, by="memory", steps=20, faults=faults)
    # On a busy machine a look comes late, and finds a death and the step after it at once.
    died, undone = sorted(run.reports[:2])
    assert died == "Rank 2 has died: 2 ranks are left, and go on."
    assert undone.startswith("The gradient of rank 1 is not finite in step 10")
    assert run.reports[2] == "this rank's data cannot be read. The step is undone on all ranks, and tried once more."


@pytest.mark.slow
def test_all_start_again_from_the_checkpoint_on_fewer_ranks(tmp_path):
    """A rank is killed between two checkpoints; then a scheduler asks for the end, and all is saved."""
    faults = [fault("kill", 1, 13), fault("ask to end", 0, 17)]
    options, said = {"by": "checkpoint", "steps": 20, "every": 5, "faults": faults}, []
    runs = supervise(program(**options), 3, tmp_path, replace=False, say=said.append)
    check_outcome(tmp_path, runs[-1], options)
    assert [run.ranks for run in runs] == [3, 2, 2]
    assert [steps_told(run)[0][0] for run in runs] == [1, 11, 18]
    assert said[0].startswith("Rank 1 on ") and "was ended by SIGKILL" in said[0] and "again on 2 ranks" in said[1]
    assert "Rank 0 was asked to end" in said[2] and "ends after 17 steps. They are saved" in said[2]


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_and_counts_as_dead_once_it_is_killed(tmp_path):
    """SIGSTOP: MPI does not notice, so somebody outside must say it. One that computes long is named too."""
    faults = [fault("stop", 1, 14), fault("late", 2, 0, seconds=0.05)]
    run = Run(program(by="shrink", steps=20, faults=faults), 3, tmp_path, survive=True).start()
    deadline = time.monotonic() + SECONDS
    while not any("is stopped" in sentence for sentence in run.reports) and time.monotonic() < deadline:
        run.poll()
        time.sleep(0.02)
    assert steps_told(run)[-1] == (14, 3), "nobody goes on without it"
    run.send_signal(1)
    assert run.wait(SECONDS) == 0, run.output()
    check_outcome(tmp_path, run, {"steps": 20})
    late, stopped, died = run.reports
    assert late.startswith("Rank 2 computes ") and "all ranks wait for it" in late
    assert stopped.startswith(f"Rank 1 (process {run.processes[1].pid}) is stopped") and "kill -CONT" in stopped
    assert died == "Rank 1 has died: 2 ranks are left, and go on."


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_training_at_the_time_limit(tmp_path):
    faults = [fault("stop", 1, 5)]
    run = Run(program(by="shrink", steps=20, time_limit=6, faults=faults), 2, tmp_path, survive=True).start()
    assert run.wait(SECONDS) != 0
    assert "WaitTimeout: Waited 6 s in all_reduce" in run.reports[-1] and "rank 1 has not arrived" in run.reports[-1]
    assert nobody_lives(run)


def test_faults_that_are_no_accident_end_the_training_with_their_sentence(tmp_path):
    """A disk that is full, and a program that ends as often as it is started."""
    faults = [fault("full disk", 1, 7)]
    run = Run(program(by="checkpoint", steps=20, every=5, faults=faults), 2, tmp_path / "disk").start()
    assert run.wait(SECONDS) != 0 and nobody_lives(run)
    assert "CheckpointError" in run.reports[-1] and "rank1-" in run.reports[-1] and "File too large" in run.reports[-1]
    assert steps_told(run)[-1] == (10, 2)

    with pytest.raises(DtlibError, match=r"mpiexec ended with status 3: it said nothing.* Three times"):
        supervise(["-c", "raise SystemExit(3)"], 1, tmp_path / "exit", say=lambda sentence: None)


PRTERUN_SAYS = """PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-here-1@0,0] on node here
  Remote daemon: [prterun-here-1@0,2] on node there7

This is usually due to either a failure of the TCP network connection to the node.
"""


def test_a_node_that_is_cut_off_is_named_although_mpiexec_ends_well(tmp_path):
    """Its words, and its status, as with two nodes of which one was ended; here a rank says them."""
    run = Run(["-c", f"print({PRTERUN_SAYS!r})"], 1, tmp_path).start()
    assert run.wait(SECONDS) == 1
    assert run.reports == ["Node there7 does not answer: it is down, or has no network."]


RAISED = {"at": 0.0, "what": "raised", "rank": 0, "kind": "RuntimeError", "sentence": "Connection closed by peer"}
ENDS = """
import sys
print("prterun noticed that process rank 1 with PID 7 on node here exited on", "signal 9 (Killed).", sep="\\n")
open(sys.argv[1] + "/journal.jsonl", "w").write({line!r} + "\\n")
raise SystemExit(1)
"""


def test_a_rank_that_was_killed_is_lost_although_others_have_raised_errors_of_lost_connections(tmp_path):
    """What torch's gloo does: it notices before mpiexec does."""
    run = Run(["-c", ENDS.format(line=json.dumps(RAISED))], 1, tmp_path).start()
    assert run.wait(SECONDS) == 1 and run.events == [RAISED]
    assert run.reports[0].startswith("Rank 1 on here was ended by SIGKILL") and run.lost == {1}


def net():
    return nn.Linear(4, 2)


def test_what_cannot_be_recovered_from_a_replica_is_refused():
    def replica(model, optimizer=None, batch=4):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        samples = torch.ones(batch, 4), torch.zeros(batch).long()
        return Replica(model, optimizer, nn.functional.cross_entropy, lambda step: samples)

    from dtlib.comm import solo
    from dtlib.recovery import train_and_shrink

    with pytest.raises(DtlibError, match=r"\['torch.float32', 'torch.float64'\]: make all of them float32"):
        replica(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).double()))
    refuses("batch of 4 samples for 5 ranks", lambda: replica(net()).step(solo(0, 5)))
    refuses("extra got no gradient in step 0", lambda: replica(_Unused()).step(solo(0, 1)))
    assert not survives()
    refuses("mpiexec --with-ft ulfm", lambda: train_and_shrink(replica(net()), solo(0, 1), 1))


class _Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.extra = net(), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.used(x)


@on_ranks(2)
def test_states_in_shards_are_refused(world):
    from dtlib.parallel.zero.sharded import fully_shard

    model = net()
    zero = ZeroOptimizer(model.parameters(), torch.optim.AdamW, world.comm, stage=1)
    refuses(r"needs the whole model .*start all ranks again", Replica, model, zero, None, None)
    model = fully_shard(net(), world.comm)
    refuses("needs the whole model", lambda: Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None))


@on_ranks(2)
def test_a_step_that_comes_to_nothing_leaves_nothing_behind(world):
    """Batch norm's buffers and the random numbers are as before; the next step is a whole one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).double()
    broken = world.rank == 1

    def batch_of(step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return (x * torch.nan if broken else x), torch.zeros(8).long()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = Replica(model, optimizer, nn.functional.cross_entropy, batch_of)
    before, chance = replica.state(), torch.get_rng_state()
    refuses("gradient of rank 1 is not finite in step 0", replica.step, world.comm)
    for name, value in replica.state()["model"].items():
        assert torch.equal(value, before["model"][name]), name
    assert torch.equal(chance, torch.get_rng_state()) and replica.steps == 0
    broken = False
    replica.step(world.comm)
    assert replica.steps == 1 and not torch.equal(
        replica.state()["model"]["1.running_mean"], before["model"]["1.running_mean"]
    )
    assert torch.isfinite(replica.model[0].weight).all()


@on_ranks(2, 3)
@pytest.mark.parametrize("exercise,answer", [
    ("resume-fix", wrong_recovery.right), ("shrink-build", wrong_recovery.takes_the_latest_state),
])  # fmt: skip
def test_a_right_recovery_passes(world, exercise, answer):
    verdict = judged_soon(exercise, {EXERCISES[exercise].name: answer}, "")
    assert verdict.passed, verdict.text()


def test_seconds_count_until_a_step_that_had_not_been_done_before():
    """A rank is killed at 5.0 in step 4; step 3 is told of later, and done once more: step 4 is the first good one."""
    steps = [(1.0, 1), (2.0, 2), (5.1, 3), (7.0, 3), (8.0, 4), (9.0, 5)]
    events = [{"at": at, "what": "step", "step": step, "ranks": 4 - (at > 6), "loss": 0.5} for at, step in steps]
    events.append({"at": 5.0, "what": "fault", "kind": "kill", "rank": 2})
    events.append({"at": 6.0, "what": "started", "rank": 0})
    assert recovery_seconds(events) == [3.0]
    name = figures.NAMES["checkpoint"]
    ordered = sorted(events, key=lambda event: event["at"])
    assert figures.times({"checkpoint": ordered}) == [(name, "3.00", "4 -> 3", 1)]
    drawn, empty = (figures.picture({"checkpoint": events}, [0.5] * 5) for events in (ordered, []))
    assert "<svg" in drawn.svg and f"{name}, 6 steps" in drawn.alt and "nothing else yet" in empty.alt
    assert predictions()["steps-done-twice"].got(ordered) == 1 and predictions()["ranks-left"].got(ordered) == 3


def test_the_fault_lab_says_what_goes_on_and_when_to_kill():
    steps = [{"what": "step", "step": step} for step in (1, 2, fault_lab.STEPS)]
    assert "the kill buttons wait for the first step" in fault_lab.now(4, [{"what": "started"}], False)
    assert fault_lab.now(4, steps[:2], True) == f"Training, step 2 of {fault_lab.STEPS}: press a kill button now."
    assert "it ends" in fault_lab.now(4, steps, True) and "end" in fault_lab.now(4, steps[:2], False)
    assert len(figures.draw({}, [1.0, 0.5]).axes) == 1, "no empty plot below"
    events = [{"what": "step", "step": 1, "at": 1.0, "loss": 1.0, "ranks": 4}]
    assert len(figures.draw({"shrink": events}, [1.0, 0.5]).axes) == 2


# Chance

STEPS, LAST = 36, 28  # each step has 0.01 s of EMULATED computing: who is to die in step 28, or soon after, does
KINDS = {"shrink": ["kill"], "memory": ["kill", "nan", "raise"], "checkpoint": ["kill", "nan", "raise", "ask to end"]}


def random_fault(chance, kind: str, rank: int, step: int) -> dict:
    """At some moment of this step; a kill may also come at any time after it has begun."""
    moment = chance.choice(("begin", "backward", "update", "later", "later"))
    if kind == "kill" and moment == "later":
        return fault(kind, rank, step, seconds=chance.uniform(0.001, 0.05))
    return fault(kind, rank, step, "nan" if kind == "nan" else "begin" if moment == "later" else moment)


def random_faults(chance, by: str, ranks: int) -> list[dict]:
    """Up to three, none of which leaves nobody alive."""
    faults, victims = [], chance.sample(range(ranks), ranks)
    for step in sorted(chance.sample(range(LAST), 3)):
        kind = chance.choice(KINDS[by])
        if kind == "kill" and len(victims) == 1:
            continue
        faults.append(random_fault(chance, kind, victims.pop() if kind == "kill" else chance.randrange(ranks), step))
    return faults


def trained_one_after_another(folder, trainings: list[dict]) -> Run:
    """In one start of ranks, of which there are enough for the last training, too (tests/spare_ranks.py)."""
    dead, ranks = 0, 0
    for options in trainings:
        options |= {"steps": STEPS, "seconds": 0.01, "time_limit": 30}
        ranks = max(ranks, dead + options["ranks"])
        dead += sum(each["kind"] == "kill" for each in options["faults"])
    run = Run(["-m", "tests.spare_ranks", json.dumps(trainings)], ranks, folder, survive=True).start()
    assert run.wait(SECONDS) == 0, (trainings, run.reports, run.output()[-3000:])
    for number, options in enumerate(trainings):
        check_outcome(folder / f"{number}", run, options)
    return run


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["shrink", "memory"])
def test_ten_random_faults(tmp_path, by):
    """No hang, no process left over, and the result of a run that nothing happened to."""
    chance, trainings, planned = random.Random(by), [], 0
    before = set(psutil.Process().children(recursive=True))
    while planned < 10:
        ranks = (2, 3, 4)[len(trainings) % 3]
        trainings.append({"by": by, "ranks": ranks, "faults": random_faults(chance, by, ranks)})
        planned += len(trainings[-1]["faults"])
    trained_one_after_another(tmp_path, trainings)
    assert not set(psutil.Process().children(recursive=True)) - before
    happened = len(list(tmp_path.glob("*/fault-*")))
    assert happened >= planned - 1, "a rank may have died before its next fault was due"


@pytest.mark.nightly
@pytest.mark.parametrize("ranks, pairs", [(2, 2), (3, 2), (4, 1)])
def test_ten_random_faults_that_end_all_ranks(tmp_path, ranks, pairs):
    """Two at a time, on different ranks, of which the second may happen when all have started again."""
    chance, faults = random.Random(ranks), []
    before = set(psutil.Process().children(recursive=True))
    for step in sorted(chance.sample(range(LAST), pairs)):
        for rank in chance.sample(range(ranks), 2):
            faults.append(random_fault(chance, chance.choice(KINDS["checkpoint"]), rank, step))
    options = {"by": "checkpoint", "steps": STEPS, "seconds": 0.01, "every": 7, "time_limit": 30, "faults": faults}
    runs = supervise(program(**options), ranks, tmp_path, say=lambda sentence: None)
    check_outcome(tmp_path, runs[-1], options)
    assert not set(psutil.Process().children(recursive=True)) - before
    assert len(list(tmp_path.glob("fault-*"))) == len(faults)


@pytest.mark.slow
@pytest.mark.parametrize("runtime, stage", [("dtlib", 3), ("torch", 0)])
def test_a_strategy_with_shards_starts_again_from_its_checkpoint_on_fewer_ranks(tmp_path, runtime, stage):
    options = {"by": "engine", "runtime": runtime, "stage": stage, "steps": 12, "every": 4}
    options["faults"] = [fault("kill", 1, 6)]
    runs = supervise(program(**options), 3, tmp_path, replace=False, say=lambda sentence: None)
    assert [run.ranks for run in runs] == [3, 2] and steps_told(runs[1])[0] == (5, 2)
    expected, model = alone(options)[0], alone({"steps": 0})[0]
    checkpoint.load(tmp_path / "global_step12", model)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-9
    assert nobody_lives(runs[-1])
