"""What an instructor has beside the lessons: ``python -m tools.instructor`` writes two pages in docs/reference.

wrong_answers.md: from the plausible wrong answers of the tests, as they were recorded on ranks, and the checks' hints.
questions_to_discuss.md: from the lessons' quizzes, the question that is for all, and what may be said to it; and the prompts of
the lectures, whose answers are in prompts.toml.
"""

import functools
import re
import tomllib
from pathlib import Path

from dtlib.lab.checks.checks import judge_rounds
from dtlib.lab.checks.exercise import homes
from dtlib.lab.checks.questions import quizzes
from dtlib.lab.lesson_files import notebooks
from tests.wrong_answers import recordings
from tests.wrong_answers.cases import CASES

FILE = Path(__file__).parents[1] / "docs" / "reference" / "wrong_answers.md"
DISCUSSIONS = FILE.with_name("questions_to_discuss.md")
PROMPTS = Path(__file__).parent / "data" / "prompts.toml"
HEAD = """# Wrong answers, and what to say

Made by `python -m tools.instructor` from the wrong answers of the tests: these are the usual mistakes. On the left
what the learner has before them; then the hint that the check gives first, to be asked as a question, and the plainest
one, which is what to say before you move on. Where a check has one hint, it stands in one of the two columns: after
a question, what was expected. The schedule puzzle draws what was handed in, and says there what is wrong.
"""


recorded = functools.cache(recordings.read)


@functools.cache
def verdict_on(key: str):
    """The verdict on what was recorded of one of the tests' wrong answers."""
    case = CASES[key]
    then = recorded(case.exercise)[case.name]
    judged = then["verdict"]["judged"], then["verdict"]["code"]
    return judge_rounds(case.exercise, recordings.decoded(then["rounds"]), judged)


def mistakes(exercise: str) -> dict:
    """Name of a mistake -> the first verdict on a wrong answer that makes it, and how many of them do."""
    found = {}
    for key, case in CASES.items():
        if case.exercise == exercise and case.name in recorded(exercise):
            verdict = verdict_on(key)
            found.setdefault(verdict.mistake, [verdict, 0])[1] += 1
    return found


def ask_and_say(verdict) -> tuple[str, str]:
    """The first hint and the plainest. A single one is asked if it is a question; what was expected is said."""
    ask, say = verdict.hints[0], verdict.hints[-1]
    if ask != say:
        return ask, say
    return (ask, f"Wanted: {verdict.expected}") if "?" in ask else ("", say)


def page() -> str:
    """The whole page, as Markdown."""
    text, lesson = HEAD, ""
    asked = "".join(source.read_text(encoding="utf-8") for source in notebooks().values())
    for exercise in sorted(homes(), key=lambda name: asked.index(f'lab.check("{name}")')):
        rows = [
            f"| {_cell(_in_short(verdict.got))} | {_cell(ask)} | {_cell(say)} |"
            for mistake, (verdict, _) in mistakes(exercise).items() if mistake not in ("missing", "other-size")
            for ask, say in [ask_and_say(verdict)]
        ]  # fmt: skip
        if not rows:
            continue
        number = homes()[exercise].parent.name[1:]
        if number != lesson:
            text, lesson = f"{text}\n## Lesson {number}\n", number
        text += f"\n### {exercise}\n\n| got | ask | say |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    return text


def prompts() -> list[tuple[str, str]]:
    """(lesson, what is asked) for each "Discuss" of the lectures, up to its last question mark, without links."""
    found = []
    for name, source in notebooks().items():
        text = re.sub(r"^# ?", "", source.read_text(encoding="utf-8"), flags=re.M)
        for paragraph in re.findall(r"\*\*Discuss[.:]?\*\*(?: before you run:)?(.+?\?)(?:[^?]*?)\n\n", text, re.S):
            asked = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph).split())
            found.append((name.partition("_")[0], asked))
    return found


def discussions() -> str:
    """The page of questions to discuss, as Markdown: each lesson's, then those that stand in its lecture."""
    answers = tomllib.loads(PROMPTS.read_text(encoding="utf-8"))["prompt"]
    rows = [(quiz.name, quiz.discuss, quiz.answer) for quiz in quizzes().values() if quiz.discuss]
    rows += [(row["lesson"], row["asks"], row["says"]) for row in answers]
    text = "# Questions to discuss\n\nOf each lesson: its quiz's last, then its lecture's; and what may be said.\n"
    for lesson in sorted({lesson for lesson, _, _ in rows}):
        text += f"\n## Lesson {lesson}\n" if lesson[0].isdigit() else f"\n## {lesson}\n"
        for _, asks, says in (row for row in rows if row[0] == lesson):
            text += f"\n**{asks[0].upper()}{asks[1:]}**\n\n{' '.join(says.split())}\n"
    return text


def _in_short(text: str) -> str:
    return text if len(text) <= 110 else text[:107].rsplit(" ", 1)[0] + " ..."


def _cell(text: str) -> str:
    """Within one row of a table: numbers in it, and angles that are no tags, stay as they are."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
    DISCUSSIONS.write_text(discussions(), encoding="utf-8")
    print(f"{FILE}: {page().count(chr(10) + '| ')} lines")
