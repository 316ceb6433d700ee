"""Each plausible wrong answer is rejected for its own reason.

The fast tier judges what was recorded of it; the slow tier observes one of each exercise anew on ranks, and the nightly
one all of them. One that is not recorded is observed on ranks in the fast tier too.
"""

import inspect
import re

import pytest

from dtlib.lab.checks.exercise import EXERCISES, exercise_files
from dtlib.lab.checks.judging import fingerprint, judge_here
from tests.cases import run_cases
from tests.ranks import on_ranks
from tests.wrong_answers import recordings
from tests.wrong_answers.cases import CASES, LESSONS, judged_soon
from tools import instructor
from tools.instructor import recorded, verdict_on

NAMES = {exercise: recordings.names(exercise) for exercise in {case.exercise for case in CASES.values()}}
RECORDED = [key for key, case in CASES.items() if case.name in NAMES[case.exercise]]


@pytest.mark.parametrize("exercise", sorted({CASES[key].exercise for key in RECORDED}))
def test_each_wrong_answer_is_rejected_for_its_own_reason(exercise):
    recorded_ones = [{"key": key} for key in RECORDED if CASES[key].exercise == exercise]
    run_cases(recorded_ones, lambda case: rejected_as_recorded(**case))


def rejected_as_recorded(key):
    case = CASES[key]
    then = recorded(case.exercise)[case.name]["verdict"]
    name = EXERCISES[case.exercise].name
    codes = {fingerprint(names[name]) for names in (case.names(None), case.names(None))} if not case.by_comm else ()
    if len(codes) == 1:  # what is known by its address alone is another one each time
        changed = "the answer has changed, record it anew: python -m tests.wrong_answers.record WORD"
        assert codes == {then["code"]}, changed
    verdict = verdict_on(key)
    assert verdict.mistake == case.mistake, verdict.text()
    judged = (
        exercise_files()[case.exercise].parent.name < "l08" and verdict.mistake != "waited"
    )  # whose hint is recorded
    assert len(verdict.hints) >= 1 + judged and all(verdict.hints)
    assert (verdict.mistake, verdict.rank, verdict.ranks) == (then["mistake"], then["rank"], case.ranks)
    said = verdict.without_code()
    assert said and ".py" not in said and "in line" not in said, "what others may read of it"
    if case.mistake == "other-size":
        assert "ranks 0 and 1 alone" in verdict.expected and len(verdict.hints) == 2
    if inspect.isroutine(case.answer) and not case.by_comm:
        assert verdict.judged.startswith(f"def {case.answer.__name__}("), (
            "the line by which a learner recognises what was judged"
        )


def test_what_an_instructor_may_say_to_them_is_made_of_them():
    page = instructor.page()
    assert instructor.FILE.read_text(encoding="utf-8") == page, "run python -m tools.instructor"
    known = [exercise for exercise in exercise_files() if f"\n### {exercise}\n" in page]
    rows = [
        re.split(r" (?<!\\)\| ", line[2:-2]) for line in page.splitlines() if re.match(r"\| (?!the learner's)", line)
    ]
    assert [row for row in rows if len(row) != 3 or not row[0].strip() or "?" not in row[2] or row[1] == row[2]] == []
    assert len(known) >= 27 and page.count("\n| ") > 150
    lessons = re.findall(r"^## Lesson (\S+)$", page, re.M)
    assert lessons == list(dict.fromkeys(lessons)) and {"00", "03", "11b"} <= set(lessons)


FIRST = {CASES[key].exercise: key for key in reversed(RECORDED)}


def shown_on(ranks):
    """What is recorded is observed anew: of each exercise one answer on every commit, and the others at night."""
    return [
        pytest.param(
            key,
            marks=() if key not in RECORDED
            else pytest.mark.slow if key in FIRST.values()
            else pytest.mark.nightly,
        )
        for key, case in CASES.items() if case.ranks == ranks
    ]  # fmt: skip


def test_nothing_is_recorded_that_is_no_case():
    kept = {path.name.removesuffix(".json.xz"): path for path in LESSONS.glob("l*/recorded/*")}
    assert kept == {exercise: recordings.file_of(exercise) for exercise in kept}, "beside another lesson"
    assert {f"{exercise}: {name}" for exercise in kept for name in recorded(exercise)} == set(RECORDED)


@pytest.mark.parametrize("key", shown_on(0))
def test_the_notebook_rejects_it(key):
    verdict = judge_here(CASES[key].exercise, CASES[key].names(None))
    assert verdict.mistake == CASES[key].mistake, verdict.text()


@on_ranks(3)
@pytest.mark.parametrize("key", shown_on(3))
def test_three_ranks_reject_it(world, key):
    rejected(world, key)


@on_ranks(2)
@pytest.mark.parametrize("key", shown_on(2))
def test_two_ranks_reject_it(world, key):
    rejected(world, key)


@on_ranks(4)
@pytest.mark.parametrize("key", shown_on(4))
def test_four_ranks_reject_it(world, key):
    rejected(world, key)


def rejected(world, key):
    case = CASES[key]
    verdict = judged_soon(case.exercise, case.names(world), case.mistake)
    assert verdict.mistake == case.mistake, verdict.text()
    assert verdict.hints and all(verdict.hints)
    if key in RECORDED and case.mistake != "waited":  # of several ranks that wait, any may give up first
        assert verdict.rank == recorded(case.exercise)[case.name]["verdict"]["rank"], verdict.text()
