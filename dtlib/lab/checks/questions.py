"""Read the multiple-choice questions of all lessons; pure Python.

They are in ``quiz.toml`` beside the lessons, and for tracks and the tests before and after the course in
``dtlib/lessons/quiz_*.toml``. A teacher can edit them. The right option is written first. Learners see the options in
an order that depends on the text of the question only, so all learners see the same order:

    [[questions]]
    asks = "A ring all-reduce of 120 MB on four ranks: how much does each rank send?"
    right = ["180 MB", "Six messages of a quarter each: 2 (N-1)/N of the array."]
    wrong = [["240 MB", "That is the limit for very many ranks."], ...]
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape

from dtlib.lab import lesson_files
from dtlib.lab.tables import fold

LETTERS = "abcdef"


@dataclass(frozen=True)
class Option:
    """One option of a question."""

    says: str
    because: str  # why it is right or wrong; shown only after this option was chosen
    right: bool


@dataclass(frozen=True)
class Question:
    """A question with its ``options``, in the order in which they are shown."""

    asks: str
    options: tuple[Option, ...]

    @property
    def letters(self) -> str:
        """The letters of the options."""
        return LETTERS[: len(self.options)]

    def chosen(self, letter: str) -> Option:
        """Return the option with this letter."""
        return self.options[LETTERS.index(letter)]


@dataclass(frozen=True)
class Quiz:
    """The questions of one quiz.

    ``discuss`` is a question without options, and ``answer`` is a possible answer for instructors.
    """

    name: str
    questions: tuple[Question, ...]
    discuss: str = ""
    answer: str = ""

    def text(self) -> str:
        """Return the questions without explanations."""
        dots = "." * len(self.questions)
        lines = [f'To answer without buttons: lab.quiz("{self.name}", answers="{dots}"), one letter per question.']
        for number, question in enumerate(self.questions, 1):
            lines += ["", f"{number}. {question.asks}"]
            lines += [f"   {letter}  {question.chosen(letter).says}" for letter in question.letters]
        if self.discuss:
            lines += ["", f"Discuss: {self.discuss}"]
        return fold("\n".join(lines))


@cache
def quizzes() -> dict[str, Quiz]:
    """Return the quizzes of all lessons and tracks, and the tests before and after the course, by name."""
    found = {}
    others = sorted(lesson_files.FOLDER.glob("quiz_*.toml"), reverse=True)
    for lesson, file in [*lesson_files.found("quiz*.toml"), *(("", file) for file in others)]:
        name = lesson + file.stem.removeprefix("quiz").removeprefix("_")
        found[name] = _read(name, tomllib.loads(file.read_text(encoding="utf-8")))
    return dict(sorted(found.items(), key=lambda item: (not item[0][0].isdigit(), item[0])))


def _read(name: str, table: dict) -> Quiz:
    questions = []
    for each in table["questions"]:
        rows = [(each["right"], True), *((wrong, False) for wrong in each["wrong"])]
        options = [Option(says, because, right) for (says, because), right in rows]
        options.sort(key=lambda option: sha256((each["asks"] + option.says).encode()).digest())
        questions.append(Question(each["asks"], tuple(options)))
    return Quiz(name, tuple(questions), **table.get("discussion", {}))


def as_html(text: str) -> str:
    """Return a text as HTML, with code for the parts between backquotes."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
