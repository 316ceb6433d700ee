"""``lab.quiz("03")``: a lesson's choice questions, each answer explained once it is chosen, right or wrong.

The questions stand with the lessons, as text that a teacher can edit (``dtlib/lessons/l*/quiz.toml``; those of a
track, and the tests before and after the course, in ``dtlib/lessons/quiz_*.toml``). The right option is written
first. Learners see the options in an order that the question's own words decide, so it is the same for everybody:

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

from dtlib.errors import DtlibError
from dtlib.lab import lesson_files
from dtlib.lab.checks import progress
from dtlib.lab.checks.rendering import NOT_YET, PASSED
from dtlib.lab.tables import fold
from dtlib.world.launch import in_engine

LETTERS = "abcdef"
OPEN = "-"  # in the place of a letter: this question is not answered
_first = {}  # (quiz, number of the question) -> the letter that was chosen first


@dataclass(frozen=True)
class Option:
    says: str
    because: str  # why it is right or wrong: shown to who chooses it, and to nobody else
    right: bool


@dataclass(frozen=True)
class Question:
    """``options`` stand in the order in which they are shown."""

    asks: str
    options: tuple[Option, ...]

    @property
    def letters(self) -> str:
        return LETTERS[: len(self.options)]

    def chosen(self, letter: str) -> Option:
        return self.options[LETTERS.index(letter)]


@dataclass(frozen=True)
class Quiz:
    """``discuss`` is a question without options, and ``answer`` what an instructor may say to it."""

    name: str
    questions: tuple[Question, ...]
    discuss: str = ""
    answer: str = ""

    def text(self) -> str:
        """The questions alone."""
        dots = "." * len(self.questions)
        lines = [f'To answer without buttons: lab.quiz("{self.name}", answers="{dots}"), a letter a question.']
        for number, question in enumerate(self.questions, 1):
            lines += ["", f"{number}. {question.asks}"]
            lines += [f"   {letter}  {question.chosen(letter).says}" for letter in question.letters]
        if self.discuss:
            lines += ["", f"Discuss: {self.discuss}"]
        return fold("\n".join(lines))


def quiz(name: str, answers: str | None = None) -> None:
    """Show a quiz: buttons that mouse and keyboard reach (Tab, then Enter or Space), or text where there is no page.

    Args:
        name: a lesson's number such as "03"; "two-hours" or "half-day" for a track's; "before" or "after" for the test
            before or after the course.
        answers: a letter for each question, in order, such as "bacda"; "-" leaves one open. Each is explained at once.
            None shows the questions, and reveals nothing.

    Raises:
        DtlibError: for a quiz that there is not, for answers that are no letters of it, or in a ``%%px`` cell.
    """
    if in_engine():
        raise DtlibError("lab.quiz belongs in a cell without %%px: the answers are yours, and not each rank's.")
    if name not in quizzes():
        raise DtlibError(f"There is no quiz {name!r}: choose one of {', '.join(map(repr, quizzes()))}.")
    found = quizzes()[name]
    if answers is not None:
        print(fold(_explained(found, answers)))
    elif _has_a_page():
        from dtlib.lab.drawing import show_widget

        show_widget(_Shown(found).box, found.text())
    else:
        print(found.text())


@cache
def quizzes() -> dict[str, Quiz]:
    """Those of all lessons, of the tracks, and the tests before and after, by their names."""
    found = {}
    others = sorted(lesson_files.FOLDER.glob("quiz_*.toml"), reverse=True)
    for lesson, file in [*lesson_files.found("quiz*.toml"), *(("", file) for file in others)]:
        name = lesson + file.stem.removeprefix("quiz").removeprefix("_")
        found[name] = _read(name, tomllib.loads(file.read_text(encoding="utf-8")))
    return dict(sorted(found.items(), key=lambda item: (not item[0][0].isdigit(), item[0])))


def _read(name: str, table: dict) -> Quiz:
    questions = []
    for each in table["questions"]:
        options = [Option(*each["right"], True), *(Option(*wrong, False) for wrong in each["wrong"])]
        options.sort(key=lambda option: sha256((each["asks"] + option.says).encode()).digest())
        questions.append(Question(each["asks"], tuple(options)))
    return Quiz(name, tuple(questions), **table.get("discussion", {}))


def _has_a_page() -> bool:
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def _choose(quiz: Quiz, number: int, letter: str) -> Option:
    """What was chosen. First choices count, so who has read an explanation gains nothing by another one."""
    _first.setdefault((quiz.name, number), letter)
    if (right := _right_at_first(quiz)) is not None:
        progress.answered(quiz.name, right, len(quiz.questions))
    return quiz.questions[number].chosen(letter)


def _right_at_first(quiz: Quiz) -> int | None:
    """How many first choices were right; None as long as a question is open."""
    first = [_first.get((quiz.name, number)) for number in range(len(quiz.questions))]
    if None in first:
        return None
    return sum(question.chosen(letter).right for question, letter in zip(quiz.questions, first, strict=True))


def _result(quiz: Quiz) -> str:
    """How it went; what is open, as long as something is."""
    of, right = len(quiz.questions), _right_at_first(quiz)
    if right is not None:
        return f"{right} of {of} right at first choice."
    return f"{sum(name == quiz.name for name, _ in _first)} of {of} answered."


def _explained(quiz: Quiz, answers: str) -> str:
    letters = "".join(answers.split()).lower()
    for question, letter in zip(quiz.questions, letters, strict=False):
        if letter not in question.letters + OPEN:
            raise DtlibError(f"{letter!r} in {answers!r} is no answer: write one of {question.letters}, or {OPEN}.")
    if len(letters) != len(quiz.questions):
        raise DtlibError(
            f"Quiz {quiz.name!r} has {len(quiz.questions)} questions, and {answers!r} has {len(letters)} answers: "
            f"write a letter for each, in order, and {OPEN} for one that you leave open."
        )
    lines = []
    for number, letter in enumerate(letters):
        if letter == OPEN:
            lines.append(f"{number + 1}. open")
        else:
            option = _choose(quiz, number, letter)
            lines.append(f"{number + 1}. {letter}, {'right' if option.right else 'not right'}. {option.because}")
    return "\n".join([*lines, _result(quiz)])


class _Shown:
    """A button for each option, with its text beside it; a line below each question for what is said to a choice."""

    def __init__(self, quiz: Quiz):
        from ipywidgets import HTML, VBox

        self.quiz, self.said, self.result = quiz, [], HTML()
        rows = []
        for number, question in enumerate(quiz.questions):
            self.said.append(HTML())
            rows += [HTML(f"<b>{number + 1}. {_html(question.asks)}</b>")]
            rows += [self._row(number, letter) for letter in question.letters]
            rows += [self.said[number]]
        if quiz.discuss:
            rows.append(HTML(f"<b>Discuss.</b> {_html(quiz.discuss)}"))
        self.box = VBox([*rows, self.result])

    def _row(self, number: int, letter: str):
        from ipywidgets import HTML, Button, HBox, Layout

        says = self.quiz.questions[number].chosen(letter).says
        button = Button(description=letter, tooltip=f"{letter}: {says}", layout=Layout(width="3.5em", flex="0 0 auto"))
        button.on_click(lambda _: self._answer(number, letter, button))
        return HBox([button, HTML(_html(says), layout=Layout(flex="1 1 0", min_width="0"))])

    def _answer(self, number: int, letter: str, button) -> None:
        option = _choose(self.quiz, number, letter)
        sign, colour = ("✓", PASSED) if option.right else ("✗", NOT_YET)
        button.description = f"{letter} {sign}"
        button.style.button_color, button.style.text_color = colour, "black"
        words = f"{letter}, {'right' if option.right else 'not right'}."
        self.said[number].value = (
            f'<div role="status" style="border-left:6px solid {colour};background:{colour}1A;padding:.3em .8em;'
            f'line-height:1.4"><b>{words}</b> {_html(option.because)}</div>'
        )
        self.result.value = f'<div role="status">{_result(self.quiz)}</div>'


def _html(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
