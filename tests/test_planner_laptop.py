"""Ten meshes on four ranks: what a rank will hold and send was written down by `python -m tests.test_planner_laptop`
before they were run, and is compared to the byte; how long a step takes is predicted by the runs of other meshes."""

import json
import math
from pathlib import Path

import pytest

import dtlib
from benchmarks.machine_fit import COEFFICIENTS, MESHES, RANKS, WIDTHS, amounts, engine_of, fitted, show, stages_of
from dtlib.planner import Plan, PlanError
from dtlib.planner.exact import of_rank
from tests.cases import refuses
from tests.ranks import on_ranks

PREDICTED = Path(__file__).with_name("laptop_plans.json")
WIDTH = 128
HEADER = 600  # bytes: a loss, flags, the header of alike micro-batches are messages of their own


def predictions() -> list:
    found = []
    for plan in MESHES:
        stages, boundaries = stages_of(WIDTH, plan.pipe)
        each = [of_rank(stages, boundaries, plan, rank) for rank in range(RANKS)]
        found.append({"plan": str(plan), "schedule": plan.schedule, "micro_batches": plan.micro_batches, "ranks": each})
    return found


def test_what_was_written_down_is_what_the_planner_says_today():
    assert json.loads(PREDICTED.read_text()) == predictions()
    assert len(MESHES) == 10 and {plan.gpus for plan in MESHES} == {RANKS}


@pytest.mark.slow
@on_ranks(4)
def test_ranks_hold_and_send_what_was_written_down(world):
    for plan, predicted in zip(MESHES, json.loads(PREDICTED.read_text()), strict=True):
        engine, step = engine_of(WIDTH, plan)
        for _ in range(3):  # passes in which ranks compare values, with more flags
            step()
        with dtlib.memory(engine) as memory, dtlib.trace() as trace:
            step()
        mine = predicted["ranks"][world.rank]
        held = {kind: memory.lines[kind] for kind in mine["held"]}
        assert held == mine["held"], (predicted["plan"], world.rank)
        large = [event for event in trace.events if event.bytes > HEADER]
        sent = {
            "pipe": sum(event.bytes for event in large if event.name == "send"),
            "data": sum(event.bytes for event in large if event.name != "send"),
        }
        assert sent == mine["sent"], (predicted["plan"], world.rank)
        small = sum(event.bytes for event in trace.events if event.bytes <= HEADER)
        assert small <= HEADER * (2 + predicted["micro_batches"]), (predicted["plan"], world.rank)


def test_a_fit_finds_the_coefficients_that_made_the_seconds():
    """Seconds that were made by the formula, with known coefficients: found again, and nothing is off."""
    runs = [(width, plan) for width in WIDTHS for plan in MESHES]
    table = [amounts(*run) for run in runs]
    made = (2e-10, 1e-9, 2e-5, 1e-4, 5e-4)
    seconds = [sum(a * c for a, c in zip(row, made, strict=True)) for row in table]
    rows, found, says = fitted(table, seconds, runs)
    assert [found[name] for name in COEFFICIENTS] == pytest.approx(made, rel=1e-3)
    assert says["error"] < 1e-3 and says["low"] == pytest.approx(1, abs=1e-3) == says["high"]
    assert all(row["left_out"] == pytest.approx(row["seconds"], rel=1e-2) for row in rows)

    noisy = [took * (1.3 if i % 2 else 0.8) for i, took in enumerate(seconds)]
    _, found, says = fitted(table, noisy, runs)
    assert says["error"] > 0.1 and says["low"] < 1 < says["high"]
    assert all(value >= 0 for value in found.values())


@pytest.mark.slow
def test_measured_here_with_its_error(capfd):
    assert show() == 0
    said = capfd.readouterr().out
    assert "Held-out error:" in said and "times what was predicted" in said
    assert said.count("micro-batch") >= 20
    assert all(name in said for name in COEFFICIENTS)
    assert "nan" not in said and math.isfinite(float(said.split("Held-out error: ")[1].split(" %")[0]))


def test_what_the_engine_cannot_do_is_refused():
    refuses("dtlib's engine has a data and a pipe axis", of_rank, [[[1]]], [], Plan(tensor=2), 0, error=PlanError)
    refuses("1 stages with 0 boundaries for pipe 2", of_rank, [[[1]]], [], Plan(pipe=2, batch=2), 0, error=PlanError)


if __name__ == "__main__":
    PREDICTED.write_text(json.dumps(predictions(), indent=1) + "\n")
