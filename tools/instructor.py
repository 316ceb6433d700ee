"""Pages for teachers: ``python -m tools.instructor`` writes two pages in docs/reference.

wrong_answers.md: plausible wrong answers of the tests, as recorded on ranks, with a question from the checks' hints.
questions_to_discuss.md: the last question of each quiz and its answer; the prompts of the lectures, with answers of
tools/data/prompts.toml.
"""

import functools
import re
import tomllib
from pathlib import Path

from dtlib.lab.checks.exercise import exercise_files
from dtlib.lab.checks.judging import judge_rounds
from dtlib.lab.checks.questions import quizzes
from dtlib.lab.lesson_files import notebooks
from tests.wrong_answers import recordings
from tests.wrong_answers.cases import CASES

FILE = Path(__file__).parents[1] / "docs" / "reference" / "wrong_answers.md"
DISCUSSIONS = FILE.with_name("questions_to_discuss.md")
PROMPTS = Path(__file__).parent / "data" / "prompts.toml"
HEAD = """# Wrong answers

This page is for teachers. It lists common wrong answers of each exercise: what the learner did, the text that the check
shows (if there is one), and a question that you can ask. Some questions begin with a fact: say the fact, then ask. If
the learner checks the same answer again, the check gives more explicit hints.

`python -m tools.instructor` writes this page from the wrong answers of the tests.
"""
SENTENCE = re.compile(r"[^.?!]+(?:[.?!](?!\s|$)[^.?!]*)*[.?!]*")
SHORT = 22  # words
ASKS = {
    r"(?i)(return|yield)\b": " What do you return?",
    r"(This|That|These|It) (is|are|begins|divides|leaves)\b": " Which line does that?",
    "": " What does this mean for your code?",
}  # after a hint that only states something


recorded = functools.cache(recordings.read)


@functools.cache
def verdict_on(key: str):
    """The verdict on what was recorded of one of the tests' wrong answers."""
    case = CASES[key]
    then = recorded(case.exercise)[case.name]
    judged = then["verdict"]["judged"], then["verdict"]["code"]
    return judge_rounds(case.exercise, recordings.decoded(then["rounds"]), judged)


def mistakes(exercise: str) -> dict:
    """Name of a mistake -> the first verdict on a wrong answer that makes it, and the name of that answer."""
    found = {}
    for key, case in CASES.items():
        if case.exercise == exercise and case.name in recorded(exercise):
            verdict = verdict_on(key)
            found.setdefault(verdict.mistake, (verdict, case.name))
    return found


def question(hints: tuple[str, ...]) -> str:
    """The first hint that asks, or its question alone if the hint is long; else the first sentence, and a question."""
    for hint in hints:
        if "?" in hint:
            return hint if len(hint.split()) <= SHORT else next(filter(_asks, SENTENCE.findall(hint))).strip()
    says = SENTENCE.findall(hints[0])[0].strip()
    says += "" if says.endswith((".", ":")) else "."
    return says + next(asks for start, asks in ASKS.items() if re.match(start, says))


def deed(name: str) -> str:
    """What the learner did: the name that the tests give the wrong answer, in words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("_", " ").replace("-", " ").lower()


def shown(got: str) -> str:
    """What the check shows of an answer, if that has words; no object of Python, and no place in a file."""
    got = re.sub(r" ?\(`?\w+\.py:.*", "", got)
    return "" if len(re.findall(r"[A-Za-z]{2,}", got)) < 3 or got[:1] in "([{<" else _in_short(got)


def page() -> str:
    """The whole page, as Markdown: a table for each exercise, with one row for each question."""
    text, lesson = HEAD, ""
    asked = "".join(source.read_text(encoding="utf-8") for source in notebooks().values())
    for exercise in sorted(exercise_files(), key=lambda name: asked.index(f'lab.check("{name}")')):
        rows: dict[str, list[tuple[str, str]]] = {}
        for mistake, (verdict, name) in mistakes(exercise).items():
            if mistake not in ("missing", "other-size"):
                rows.setdefault(question(verdict.hints), []).append((deed(name), shown(verdict.got)))
        if not rows:
            continue
        number = exercise_files()[exercise].parent.name[1:]
        if number != lesson:
            text, lesson = f"{text}\n## Lesson {number}\n", number
        text += f"\n### {exercise}\n\n| the learner's code | the check shows | ask |\n|---|---|---|\n"
        for asks, answers in rows.items():
            did, seen = (_cell("; ".join(dict.fromkeys(filter(None, each)))) for each in zip(*answers, strict=True))
            text += f"| {did} | {seen} | {_cell(asks)} |\n"
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
    text = (
        "# Questions to discuss\n\nThis page is for teachers. For each lesson it has the last question of the quiz, "
        "then the questions of the lecture. An answer follows each question.\n"
    )
    for lesson in sorted({lesson for lesson, _, _ in rows}):
        text += f"\n## Lesson {lesson}\n" if lesson[0].isdigit() else f"\n## {lesson}\n"
        for _, asks, says in (row for row in rows if row[0] == lesson):
            text += f"\n**{asks[0].upper()}{asks[1:]}**\n\n{' '.join(says.split())}\n"
    return text


def _asks(sentence: str) -> bool:
    return sentence.rstrip().endswith("?")


def _in_short(text: str) -> str:
    return text if len(text) <= 80 else text[:77].rsplit(" ", 1)[0] + " ..."


def _cell(text: str) -> str:
    """Within one row of a table: numbers in it, and angles that are no tags, stay as they are."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
    DISCUSSIONS.write_text(discussions(), encoding="utf-8")
    print(f"{FILE}: {page().count(chr(10) + '| ')} lines")
