"""Lesson 10: answers that are right pass, and what a cell shows while engines train."""

import math

import pytest

from dtlib.lab.checks.registry import EXERCISES
from dtlib.lab.drawing import Picture
from dtlib.lab.engines import live
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


def test_a_curve_grows_in_one_picture_which_goes_away(monkeypatch):
    made, updates = [], []

    class Shown:
        def update(self, content, raw=False):
            updates.append(content)

    def display(content, **_):
        made.append(content)
        return Shown()

    monkeypatch.setattr(live, "display", display)
    view = live.LiveView(alone=False)
    view._watched, view._began, view._drawn = True, view._began - 9, view._drawn - 9
    reports = [{"curve": [2.0, 1.5], "progress": (64, 640, "samples")}, {}]
    view.show([0, 1], [True, True], ["", ""], reports)
    text, picture = made
    assert "64 of 640 samples (10%)" in text["text/plain"] and isinstance(picture, Picture)
    assert "after 64 of 640 samples" in picture.alt and "<svg" in picture.svg
    reports = [{"curve": [2.0, 1.5, 1.0], "progress": (96, 640, "samples")}, {}]
    for last, pictures in ((math.inf, 0), (-math.inf, 1)):  # one a second
        view._drawn, view._pictured = view._drawn - 9, last
        view.show([0, 1], [True, True], ["", ""], reports)
        assert len([one for one in updates if isinstance(one, Picture)]) == pictures
    assert len(made) == 2 and updates[-1].svg != picture.svg
    view.close()
    assert updates[-2:] == [{}, {}]
