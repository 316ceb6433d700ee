"""The room with exercises that need no ranks: the lessons' own tasks, stubs, judges and hints."""

from importlib import import_module

from dtlib.browser.fields import Button, Choice, Hidden, Text, put
from dtlib.browser.simulated.cells import Ranks
from dtlib.browser.sources import cells
from dtlib.browser.svg import sentence
from dtlib.browser.verdicts import verdict
from dtlib.lab.checks.questions import as_html

TITLE, LESSON = "Exercises", "11_beyond_one_machine_exercises"
SAYS = "Write a function in plain Python. A check says what is wrong with it, and gives a plainer hint the next time."
LESSONS = {"l05": "judge_rates", "l09": "judge_formats", "l11": "judge_scaling"}


def _named() -> dict:
    """Map the name of each exercise to its lesson's folder and the exercise; leave out one that needs ranks."""
    return {name: (lesson, each) for lesson, judges in LESSONS.items()
            for name, each in import_module(f"dtlib.lessons.{lesson}.{judges}").EXERCISES.items()
            if name != "efficiency-fix"}  # fmt: skip


def task(name: str) -> tuple[str, str]:
    """Return the text of an exercise and the cell from which a learner starts.

    Both are the last ones before the check in the lesson's exercises.
    """
    found = cells(f"{_named()[name][0]}/exercises.py")
    # Find the check's cell, then the nearest stub above it, then the nearest text above the stub.
    at = next(at for at, (_, body) in enumerate(found) if body.startswith(f'lab.check("{name}")'))
    stub = max(each for each in range(at) if "stub" in found[each][0])
    text = max(each for each in range(stub) if "[markdown]" in found[each][0])
    lines = [line.removeprefix("#").strip() for line in found[text][1].splitlines()]
    return "\n".join(lines).removeprefix("## "), f"import math\n\n{found[stub][1]}\n"


FIRST = "warmup-fix"
FORM = (
    Choice("exercise", "exercise", FIRST, {name: f"{lesson[1:]} {name}" for name, (lesson, _) in _named().items()}),
    Button("take", "Begin"),
    Text("code", "your function", task(FIRST)[1], 12),
    Button("check", "Check"),
    Hidden("attempt", "0"),
)


def show(exercise: str, code: str, attempt: str, pressed: str = "") -> str:
    """Return the text of an exercise and, after a press of ``check``, the verdict, as HTML."""
    asked, stub = task(exercise)
    said = f'<div class="said">{as_html(asked)}</div>'
    if pressed == "take":
        return put("code", stub) + put("attempt", 0) + said
    return (_checked(exercise, code, attempt) if pressed == "check" else "") + said


def _checked(name: str, code: str, attempt: str) -> str:
    judged, rank = _named()[name][1], Ranks(1)
    found = rank.run(code)
    if problem := found.problem or found.failed[0]:
        return sentence(problem, False)
    answer = rank.ranks[0].names.get(judged.name)
    if answer is None:
        return sentence(f"Your cell defines no {judged.name}.", False)
    try:
        return verdict(name, lambda: judged.judge([judged.observe(answer, None)]), attempt)
    except Exception as problem:
        return sentence(f"Not yet: {name}. Your function raised {type(problem).__name__}: {problem}", False)
