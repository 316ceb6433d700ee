"""``lab.quiz("03")``: a lesson's multiple-choice questions; each answer is explained once it is chosen.

Teachers can edit the questions, which are text files (questions.py).
"""

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.checks.questions import Option, Quiz, as_html, quizzes
from dtlib.lab.checks.verdict_view import NOT_YET, PASSED
from dtlib.lab.drawing import show_widget
from dtlib.lab.hooks import report
from dtlib.lab.tables import fold
from dtlib.world import in_engine

OPEN = "-"  # marks a question without an answer
_first: dict[tuple[str, int], str] = {}  # (quiz, number of the question) -> the letter chosen first


def quiz(name: str, answers: str | None = None) -> None:
    """Show a quiz: as buttons for mouse and keyboard (Tab, then Enter or Space), or as text without a page.

    Args:
        name: a lesson's number such as "03"; "two-hours" or "half-day" for a track; "before" or "after" for the test
            before or after the course.
        answers: one letter for each question, in order, such as "bacda"; "-" for no answer. Each answer is explained at
            once. None shows the questions, and reveals nothing.

    Raises:
        DtlibError: for an unknown quiz, for letters that are no options, or in a ``%%px`` cell.
    """
    if in_engine():
        raise DtlibError("lab.quiz belongs in a cell without %%px, because you answer, and not each rank.")
    if name not in quizzes():
        raise DtlibError(f"There is no quiz {name!r}: choose one of {', '.join(map(repr, quizzes()))}.")
    found = quizzes()[name]
    if answers is not None:
        print(fold(_explained(found, answers)))
    else:
        show_widget(_Shown(found).box, found.text())


def _choose(quiz: Quiz, number: int, letter: str) -> Option:
    """Record a choice and return the option. Only the first choice for each question counts for the result."""
    _first.setdefault((quiz.name, number), letter)
    report("quiz", quiz=quiz.name, number=number, letter=letter)
    if (right := _right_at_first(quiz)) is not None:
        course.done(f"quiz {quiz.name}", [right, len(quiz.questions)])
    return quiz.questions[number].chosen(letter)


def _right_at_first(quiz: Quiz) -> int | None:
    """Return the number of right first choices; None if a question has no answer yet."""
    keys = [(quiz.name, number) for number in range(len(quiz.questions))]
    if not _first.keys() >= set(keys):
        return None
    first = [_first[key] for key in keys]
    return sum(question.chosen(letter).right for question, letter in zip(quiz.questions, first, strict=True))


def _result(quiz: Quiz) -> str:
    """Return the result, or the number of answers if some are missing."""
    of, right = len(quiz.questions), _right_at_first(quiz)
    if right is not None:
        return f"{right} of {of} right at first choice."
    return f"{sum(name == quiz.name for name, _ in _first)} of {of} answered."


def _explained(quiz: Quiz, answers: str) -> str:
    letters = "".join(answers.split()).lower()
    for question, letter in zip(quiz.questions, letters, strict=False):
        if letter not in question.letters + OPEN:
            raise DtlibError(f"{letter!r} in {answers!r} is not an answer: write one of {question.letters}, or {OPEN}.")
    if len(letters) != len(quiz.questions):
        raise DtlibError(
            f"Quiz {quiz.name!r} has {len(quiz.questions)} questions, but {answers!r} has {len(letters)} answers: "
            f"write one letter for each, in order, and {OPEN} to leave a question open."
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
    """Widgets: one button per option with its text beside it, and one line per question for the explanation."""

    def __init__(self, quiz: Quiz):
        from ipywidgets import HTML, VBox

        self.quiz, self.said, self.result = quiz, [], HTML()
        rows = []
        for number, question in enumerate(quiz.questions):
            self.said.append(HTML())
            rows += [HTML(f"<b>{number + 1}. {as_html(question.asks)}</b>")]
            rows += [self._row(number, letter) for letter in question.letters]
            rows += [self.said[number]]
        if quiz.discuss:
            rows.append(HTML(f"<b>Discuss.</b> {as_html(quiz.discuss)}"))
        self.box = VBox([*rows, self.result])

    def _row(self, number: int, letter: str):
        from ipywidgets import HTML, Button, HBox, Layout

        says = self.quiz.questions[number].chosen(letter).says
        button = Button(description=letter, tooltip=f"{letter}: {says}", layout=Layout(width="3.5em", flex="0 0 auto"))
        button.on_click(lambda _: self._answer(number, letter, button))
        return HBox([button, HTML(as_html(says), layout=Layout(flex="1 1 0", min_width="0"))])

    def _answer(self, number: int, letter: str, button) -> None:
        option = _choose(self.quiz, number, letter)
        sign, colour = ("✓", PASSED) if option.right else ("✗", NOT_YET)
        button.description = f"{letter} {sign}"
        button.style.button_color, button.style.text_color = colour, "black"
        words = f"{letter}, {'right' if option.right else 'not right'}."
        self.said[number].value = (
            f'<div role="status" style="border-left:6px solid {colour};background:{colour}1A;padding:.3em .8em;'
            f'line-height:1.4"><b>{words}</b> {as_html(option.because)}</div>'
        )
        self.result.value = f'<div role="status">{_result(self.quiz)}</div>'
