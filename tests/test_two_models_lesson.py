"""Lesson 10: answers that are right pass, and what a cell shows while engines train."""

import math

from dtlib.lab.checks.exercise import EXERCISES
from dtlib.lab.drawing import Picture
from dtlib.lab.engines import live_view
from tests.cases import for_each
from tests.lessons.l10.wrong_two_models import RIGHT
from tests.ranks import on_ranks
from tests.wrong_answers.cases import judged_soon


@on_ranks(3)
@for_each(exercise=RIGHT)
def test_right_answers_pass(world, exercise):
    for answer in RIGHT[exercise]:
        verdict = judged_soon(exercise, {EXERCISES[exercise].name: answer}, "")
        assert verdict.passed, verdict.text()


def test_a_curve_grows_in_one_picture_and_stays_below_the_output(monkeypatch):
    made, updates = [], []

    class Shown:
        def update(self, content, raw=False):
            updates.append(content)

    def display(content, **_):
        made.append(content)
        return Shown()

    monkeypatch.setattr(live_view, "display", display)
    view = live_view.LiveView(alone=False)
    view._watched, view._began, view._drawn = True, view._began - 9, view._drawn - 9
    reports = [{"curve": [2.0, 1.5], "progress": (64, 640, "samples"), "doing": "data are read"}, {}]
    view.show([0, 1], [True, True], ["", ""], reports)
    text, picture = made
    assert "64 of 640 samples (10%); loss 1.5, at first 2; data are read" in text["text/plain"]
    assert isinstance(picture, Picture)
    assert "after 64 of 640 samples" in picture.alt and "<svg" in picture.svg
    reports = [{"curve": [2.0, 1.5, 1.0], "progress": (96, 640, "samples")}, {}]
    for last, pictures in ((math.inf, 0), (-math.inf, 1)):  # one a second
        view._drawn, view._pictured = view._drawn - 9, last
        view.show([0, 1], [True, True], ["", ""], reports)
        assert len([one for one in updates if isinstance(one, Picture)]) == pictures
    assert len(made) == 2 and updates[-1].svg != picture.svg
    view.close()
    assert updates[-2:] == [{}, {}]
    reports[0]["progress"] = 640, 640, "samples"
    view.keep(reports)
    assert "after 640 of 640 samples" in made[-1].alt and len(made) == 3
