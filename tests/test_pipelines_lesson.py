"""The figures and the explorer of lesson 07."""

import pytest
import torch
from torch import nn

from dtlib.comm.watch.recorder import Event
from dtlib.lab.tables import WIDEST
from dtlib.lessons.l07 import explorer
from dtlib.lessons.l07 import figures as pipelines
from dtlib.measure.trace import Timeline, Trace
from dtlib.parallel.pipeline import defer_weight_gradients
from dtlib.schedule import Simulation, draw, gpipe, interleaved, parse, simulate
from tests.cases import for_each
from tests.ranks import on_ranks

# Measured


def phase(rank, name, start, end):
    return Event(rank, "phase", name, start, end, action=None if name == "warm-up" else parse(name))


def wait(rank, start, end):
    return Event(rank, "wait", "recv", start, end)


def test_what_is_measured_begins_after_waiting():
    """Rank 1 comes to 1F0 at once, and waits for a header and then for a tensor; other phases are not actions."""
    events = [
        [phase(0, "0F0", 10.0, 11.0), wait(0, 11.5, 13.0), phase(0, "0B0", 11.2, 15.0), phase(0, "warm-up", 9, 10)],
        [phase(1, "1F0", 9.5, 12.5), wait(1, 9.6, 11.0), wait(1, 11.1, 11.5), phase(1, "1B0", 12.5, 14.5)],
    ]
    found = pipelines.measured(Timeline([Trace(rank, 0.0, mine) for rank, mine in enumerate(events)]), unit=0.5)
    assert found.schedule == [[parse("0F0"), parse("0B0")], [parse("1F0"), parse("1B0")]]
    assert {str(action): start for action, start in found.start.items()} == {"0F0": 0, "0B0": 6, "1F0": 3, "1B0": 5}
    assert {str(action): end for action, end in found.end.items()} == {"0F0": 2, "0B0": 10, "1F0": 5, "1B0": 9}
    assert found.makespan == 10 and found.busy == [6, 6]


@on_ranks(1, 2, 3, slow=(1, 2))
@for_each(name=explorer.ORDERS)
def test_what_runs_is_what_is_simulated(world, name):
    """The order and what is held exactly; the makespan from below, as sleeping takes no less than asked."""
    microbatches = 2 * world.size
    for settings in ({}, {"message": 0.5}, {"message": 0.5, "one_by_one": True})[: 2 + (world.size < 3)]:
        trace, peak = explorer.run(name, world.size, microbatches, 1.0, **settings)
        timeline = trace.gather()
        found = pipelines.measured(timeline, explorer.SECONDS)
        simulated = explorer.simulate(name, world.size, microbatches, 1.0, settings.get("message", 0.0))
        assert found.schedule == simulated.schedule
        assert peak == simulated.peak_activations[world.rank]
        assert found.makespan >= simulated.makespan - 1e-6
        assert timeline.emulated or world.size == 1 or not settings


@on_ranks(3)
def test_a_pipeline_on_some_of_the_ranks(world):
    trace, peak = explorer.run("1F1B", 2, 3, 1.0)
    traces = world.comm.all_gather_object(trace)
    assert pipelines.measured(Timeline(traces[:2])).schedule == explorer.simulate("1F1B", 2, 3).schedule
    assert peak == (2, 1, 0)[world.rank]
    assert len(traces[2].events) == 0


def test_an_emulated_stage_has_the_values_of_its_module(monkeypatch):
    slept = []
    monkeypatch.setattr(explorer.time, "sleep", slept.append)
    torch.manual_seed(0)
    plain, x = nn.Linear(3, 2), torch.randn(4, 3)
    stage = explorer.EmulatedStage(nn.Linear(3, 2), forward=0.5, backward=4.0)
    stage.module.load_state_dict(plain.state_dict())
    plain(x).square().sum().backward()
    out = stage(x)
    assert slept == [0.5] and torch.equal(out, plain(x))
    out.square().sum().backward()
    assert slept == [0.5, 2.0, 2.0]
    assert torch.equal(stage.module.weight.grad, plain.weight.grad)
    with defer_weight_gradients() as halves:
        stage(x).sum().backward()
    assert slept[3:] == [0.5, 2.0]
    halves[0]()
    assert slept[5:] == [2.0]


# Pictures


def test_a_picture_has_its_text(capsys):
    pipelines.picture({"GPipe": simulate(gpipe(2, 2)), "faster": simulate(gpipe(2, 2), 1, 1)})
    text = capsys.readouterr().out
    assert draw(gpipe(2, 2)) in text
    assert "rank 1  .. F0 F1 B0 B1 .." in text
    rows = [line.split() for line in text.splitlines()[-2:]]
    assert rows == [["GPipe", "9.0", "33.3%", "50.0%", "2", "2"], ["faster", "6.0", "33.3%", "50.0%", "2", "2"]]


def test_half_forward_passes_have_columns_of_their_own_and_long_rows_go_on_below():
    found = simulate(interleaved(4, 8, 2), 0.5, 1.0)
    text, whole = pipelines._as_text(found), draw(found, 0.5)
    assert max(map(len, text.splitlines())) <= WIDEST < max(map(len, whole.splitlines()))
    pieces = [piece.splitlines() for piece in text.split("\n\n")]
    for rank, row in enumerate(whole.splitlines()):
        joined = [cell for piece in pieces for cell in piece[rank].split()[2:]]
        assert joined == row.split()[2:] + [".."] * (len(joined) - len(row.split()[2:]))


def test_what_is_held_over_time(capsys):
    """1F1B on the last rank: one at a time, from the start of F to the end of B."""
    found = explorer.simulate("1F1B", 2, 2)
    assert pipelines._held(found, found.schedule[1]) == ([0.0, 1.0, 4.0, 4.0, 7.0, 9.0], [0, 1, 0, 1, 0, 0])
    split = explorer.simulate("ZB-H1", 2, 2)
    for rank, actions in enumerate(split.schedule):
        assert max(pipelines._held(split, actions)[1]) == split.peak_activations[rank]
    pipelines.in_flight({"1F1B": found})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["1F1B", "2", "1"]


# The explorer


@pytest.fixture
def runs(monkeypatch):
    """What the explorer asks the engines for; they answer with the simulation."""
    asked = []

    def measure(*arguments):
        asked.append(arguments)
        simulated = explorer.simulate(*arguments)
        return explorer.Measured(Simulation(simulated.schedule, simulated.start, simulated.end), [7] * arguments[1])

    monkeypatch.setattr(explorer, "measure", measure)
    return asked


def test_sliders_simulate_and_the_button_runs(runs, capsys):
    shown = explorer.Explorer(engines=4)
    assert "GPipe, simulated" in capsys.readouterr().out and not runs
    shown.name.value = "1F1B"
    text = capsys.readouterr().out
    assert "1F1B, simulated" in text and "measured" not in text
    assert "By the formula the bubble is 27.3% of the makespan." in text
    shown.message.value = 0.5
    assert "41.0" in capsys.readouterr().out.splitlines()[-2]  # the makespan
    shown.button.click()
    text = capsys.readouterr().out
    assert runs == [("1F1B", 4, 8, 2.0, 0.5)]
    assert "EMULATED stages, measured" in text and text.endswith("by rank: 7 7 7 7\n")


def test_what_cannot_run_is_said(runs, capsys):
    shown = explorer.Explorer(engines=3)
    assert shown.button.disabled and shown.button.description == "needs 4 engines, and there are 3"
    shown.ranks.value = 3
    assert not shown.button.disabled and shown.button.description == "run it on the engines"
    capsys.readouterr()
    shown.name.value = "interleaved 1F1B"
    assert "8 is not a multiple of 3" in capsys.readouterr().out
    shown.button.click()
    assert "8 is not a multiple of 3" in capsys.readouterr().out
    shown.microbatches.value = 9
    assert "interleaved 1F1B, simulated" in capsys.readouterr().out
