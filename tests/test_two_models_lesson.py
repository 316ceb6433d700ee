"""Lesson 10: answers that are right pass, and what a cell shows while engines train."""

import pytest

from dtlib.lab.checks.registry import EXERCISES
from dtlib.lab.engines.live import sparkline
from tests.ranks import on_ranks
from tests.wrong_answers.cases import judged_soon
from tests.wrong_answers.two_models_wrong import RIGHT


@on_ranks(3)
@pytest.mark.parametrize("exercise", RIGHT)
def test_right_answers_pass(world, exercise):
    for answer in RIGHT[exercise]:
        verdict = judged_soon(exercise, {EXERCISES[exercise].name: answer}, 30.0)
        assert verdict.passed, verdict.text()


def test_a_curve_is_a_line_of_text():
    assert sparkline([2.0, 1.0, 0.0]) == "2 \u2588\u2585\u2581 0"
    assert sparkline([1.0, 1.0]) == "1 \u2581\u2581 1"
    assert len(sparkline([float(i) for i in range(1000)]).split()[1]) <= 40
    assert sparkline([]) == ""
