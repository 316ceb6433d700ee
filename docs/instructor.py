"""What an instructor has beside the lessons: ``python -m docs.instructor`` writes two pages in docs/instructor.

wrong_answers.md: from the plausible wrong answers of the tests, as they were recorded on ranks, and the checks' hints.
discussions.md: from the lessons' quizzes, the question that is for all, and what may be said to it.
"""

import functools
import re
from pathlib import Path

from dtlib.lab.checks.checks import judge_rounds
from dtlib.lab.checks.quiz import quizzes
from dtlib.lab.checks.registry import HOMES
from tests.wrong_answers import recordings
from tests.wrong_answers.cases import CASES

FILE = Path(__file__).parent / "instructor" / "wrong_answers.md"
DISCUSSIONS = FILE.with_name("discussions.md")
HEAD = """# Wrong answers, and what to say

Made by `python -m docs.instructor` from the wrong answers of the tests: these are the mistakes that come. On the left
what the learner has before them; then the hint that the check gives first, to be asked as a question, and the plainest
one, which is what to say before you move on. An exercise that is judged without ranks (09, the schedule puzzle) draws
what was handed in, and says there what is wrong.
"""


@functools.cache
def _recorded(exercise: str) -> dict:
    return recordings.read(exercise)


def mistakes(exercise: str) -> dict:
    """Name of a mistake -> the first verdict on a wrong answer that makes it, and how many of them do."""
    found = {}
    for case in CASES.values():
        if case.exercise == exercise and case.name in _recorded(exercise):
            recorded = _recorded(exercise)[case.name]
            judged = recorded["verdict"]["judged"], recorded["verdict"]["code"]
            verdict = judge_rounds(exercise, recordings.decoded(recorded["rounds"]), judged)
            found.setdefault(verdict.mistake, [verdict, 0])[1] += 1
    return found


def page() -> str:
    """The whole page, as Markdown."""
    text, lesson = HEAD, ""
    for exercise, home in HOMES.items():
        rows = [
            f"| {_cell(_in_short(verdict.came))} | {_cell(verdict.hints[0])} | {_cell(verdict.hints[-1])} |"
            for mistake, (verdict, _) in mistakes(exercise).items() if mistake not in ("missing", "other-size")
        ]  # fmt: skip
        if not rows:
            continue
        number = re.search(r"\.l(\w+)\.", home)[1]
        if number != lesson:
            text, lesson = f"{text}\n## Lesson {number}\n", number
        text += f"\n### {exercise}\n\n| what came | ask | say |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    return text


def discussions() -> str:
    """The page of questions to discuss, as Markdown."""
    rows = [(quiz.name, quiz.discuss, quiz.answer) for quiz in quizzes().values() if quiz.discuss]
    head = "# Questions to discuss\n\nOne a lesson, last in its quiz, and what may be said to it.\n"
    return head + "".join(
        f"\n## Lesson {name}\n\n**{asks}**\n\n{' '.join(says.split())}\n" for name, asks, says in rows
    )


def _in_short(text: str) -> str:
    return text if len(text) <= 110 else text[:107].rsplit(" ", 1)[0] + " ..."


def _cell(text: str) -> str:
    """Within one row of a table: numbers in it, and angles that are no tags, stay as they are."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
    DISCUSSIONS.write_text(discussions(), encoding="utf-8")
    print(f"{FILE}: {page().count(chr(10) + '| ')} lines")
