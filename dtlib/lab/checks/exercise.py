"""Predictions, exercises and verdicts, and where exercises are found; for all lessons.

An exercise belongs to its lesson's folder: ``judge_*.py`` is imported when the exercise is needed.
``lab.check("mine.py")`` uses an instructor's own file, which defines it as ``EXERCISE``.

The tests contain plausible wrong answers (``wrong_*.py``), and prove that each is rejected for its own reason.
"""

import builtins
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from html import escape
from numbers import Number
from pathlib import Path
from runpy import run_path
from typing import NamedTuple

from dtlib.errors import DtlibError
from dtlib.lab import lesson_files
from dtlib.lab.tables import fold


@dataclass(frozen=True)
class Prediction:
    """A question whose answer a learner guesses, and the source of the answer.

    ``got`` computes the answer, or a dictionary for several questions. If ``got`` has parameters, the answer is
    measured: the parameters are names in the notebook, and ``got`` is called after a cell has assigned the first of
    them. After a ``%%px`` cell, each argument is the list of the values on all ranks.

    A number is right within the fraction ``tolerance`` of the answer, or within the distance ``within``. A set contains
    answers that are equally right. ``kind`` is the type of a guess; with ``choices``, the guess must be one of them.
    ``hint`` is shown with a wrong guess; a dictionary has one hint for each question. ``of_this_computer`` marks a
    speed, which differs between computers, so the build of the notebooks accepts a wrong guess.
    """

    got: Callable
    hint: str | dict = ""
    tolerance: float = 0.0
    within: float = 0.0
    kind: type = Number
    choices: tuple = ()
    of_this_computer: bool = False


class Score(NamedTuple):
    """A score in exercises where a learner can do better than pass: less is better, and ``par`` is enough to pass."""

    value: float
    par: float
    unit: str
    words: str


class Wrong(Exception):
    """An answer that is wrong: the rank, what was expected, what was found, and hints from vague to plain.

    ``mistake`` names the mistake. The tests prove that each planted wrong answer is recognised as its own mistake. An
    answer that is wrong only because it exceeds par has a ``score``.
    """

    def __init__(
        self, mistake: str, rank: int | None, expected: str, got: str, *hints: str, score: Score | None = None
    ):
        super().__init__(mistake)
        self.mistake, self.rank, self.expected, self.got, self.hints = mistake, rank, expected, got, hints
        self.score = score


def rows(rank: int | None, *expected: str) -> Callable[..., None]:
    """Return a function ``wrong(mistake, holds, expected, got, *hints)`` that raises ``Wrong`` if ``holds`` is true.

    A judge calls it once for each possible mistake, like the rows of a table; the first that holds is reported. With
    ``rows(rank, expected)``, all calls share ``expected`` and omit it. The texts are formatted even if a row does not
    hold, so their values must exist for right answers too.
    """

    def wrong(mistake: str, holds: object, *told: str, score: Score | None = None) -> None:
        if holds:
            raise Wrong(mistake, rank, *expected, *told, score=score)

    return wrong


@dataclass(frozen=True)
class Exercise:
    """An exercise: what the learner defines, and how it is judged.

    ``name`` is the name that the learner defines. ``observe(answer, comm)`` runs on every rank, and returns something
    that pickles. ``judge(observations)`` gets the observations of all ranks in rank order, and raises ``Wrong``; it may
    return a ``Score`` or a text. ``picture(observations)`` draws the answer, right or wrong: a text, or an object with
    ``str`` and ``_repr_html_``. ``needs_ranks=False``: the answer is defined and judged in the notebook, without a
    communicator. ``any_size=True``: a right answer is judged again with one rank less, so that a fixed number of ranks
    in it fails.
    """

    name: str
    observe: Callable
    judge: Callable
    picture: Callable | None = None
    needs_ranks: bool = True
    any_size: bool = False


@cache
def exercise_files() -> dict[str, Path]:
    """Map the name of each exercise to the file that defines it, in the lessons' order.

    The files are read as text, because importing them takes longer.
    """
    found: dict[str, Path] = {}
    for _, file in lesson_files.found("judge_*.py"):
        table = re.search(r"^EXERCISES = \{(.*?)\}$", file.read_text(encoding="utf-8"), re.M | re.S)
        names = re.findall(r'"([\w-]+)": ', table[1]) if table else ()
        assert not found.keys() & set(names), f"two lessons have {sorted(found.keys() & set(names))}"
        found.update(dict.fromkeys(names, file))
    return found


class Registry(Mapping):
    """A mapping from name to exercise, in a lesson's ``EXERCISES`` or in a file in the notebook's folder."""

    def __getitem__(self, name: str) -> Exercise:
        return _of_file(Path(name)) if name.endswith(".py") else _of_lesson(name)

    def __iter__(self) -> Iterator[str]:
        return iter(exercise_files())

    def __len__(self) -> int:
        return len(exercise_files())


@cache
def _of_lesson(name: str) -> Exercise:
    return lesson_files.module_of(exercise_files()[name]).EXERCISES[name]


def _of_file(path: Path) -> Exercise:
    """Load an exercise from a file, again on each call, so that an instructor can correct it during a class."""
    if not path.is_file():
        raise DtlibError(
            f"There is no file {path.name} in {path.absolute().parent}: put the exercise beside the notebook."
        )
    found = run_path(str(path)).get("EXERCISE")
    if not isinstance(found, Exercise):
        raise DtlibError(f"{path.name} has no exercise: end the file with EXERCISE = Exercise(name, observe, judge).")
    return found


EXERCISES = Registry()


def known(name: str) -> str:
    """Return the name of an exercise as a string.

    Raises:
        DtlibError: for a name that is no exercise.
    """
    name = str(name)
    if name not in EXERCISES:
        near = get_close_matches(name, EXERCISES, n=1)
        other = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(sorted(EXERCISES))}."
        raise DtlibError(f"There is no exercise {name!r}: {other}")
    return name


@dataclass
class Verdict:
    """The verdict that all ranks agree on.

    ``rank`` is the lowest rank with a mistake; None if the answer passed, or if the mistake belongs to no rank.
    ``ranks`` is the number of ranks on which it was judged: 0 for an exercise without ranks.
    """

    exercise: str
    judged: str
    ranks: int
    rank: int | None = None
    mistake: str = ""
    expected: str = ""
    got: str = ""
    hints: tuple = ()
    score: str = ""  # text of the score, if the exercise has one
    scored: tuple[float, float, str] | tuple[()] = ()  # value, par, unit of a score that is recorded
    picture: object = ""
    code: str = ""  # fingerprint of the answer
    note: str = ""  # what a learner should know about this judgement

    @property
    def passed(self) -> bool:
        """Whether the answer is right."""
        return not self.mistake

    def text(self, attempt: int = 0) -> str:
        """Return the text for the learner; later attempts get plainer hints."""
        lines = [self.what_was_judged() + (f"\n\n{self.picture}\n" if self.picture else ""), self.outcome()]
        return "\n".join(lines + [f"  {name + ':':9} {value}" for name, value in self.details(attempt)])

    def what_was_judged(self) -> str:
        """Return the line that names the judged answer and the number of ranks."""
        return f"Judged on {self.ranks} ranks: {self.judged}" if self.ranks else f"Judged: {self.judged}"

    def outcome(self) -> str:
        """Return the line that says whether the answer passed."""
        if self.passed:
            few = " So few ranks hide mistakes: check it with lab.engines(3) too." if 0 < self.ranks < 3 else ""
            return f"Passed: {self.exercise}.{few}{self._score()}"
        return f"Not yet: {self.exercise}{'' if self.rank is None else f', on rank {self.rank}'}."

    def details(self, attempt: int = 0) -> list[tuple[str, str]]:
        """Return (name, text) for what was expected, what was found, and the hint of this attempt."""
        note = [("note", self.note)] * bool(self.note)
        if self.passed:
            return note
        hints = [("hint", self.hints[min(attempt, len(self.hints) - 1)])] if self.hints else []
        return [*note, ("expected", self.expected), ("got", self.got), *hints]

    def without_code(self) -> str:
        """Return one sentence about the mistake for other readers, without a line or value of the learner's answer."""
        if self.passed:
            return ""
        says = self.hints[0] if self.hints else self.expected
        # The error message and the hint contain lines of the learner's code.
        if self.mistake == "raised":
            kind = self.got.partition(":")[0]
            says = f"{kind if hasattr(builtins, kind) else 'An error'} was raised."
        return says if self.rank is None else f"Rank {self.rank}: {says}"

    def _score(self) -> str:
        return f" {self.score}" if self.score else ""


@dataclass
class Problem:
    """The reason why a rank has no observation; the fields are the arguments of ``Wrong``."""

    mistake: str
    rank: int | None
    expected: str
    got: str
    hints: tuple


# Verdicts as the learner sees them: a coloured block that also says the outcome with words and a sign.

PASSED, NOT_YET = "#009E73", "#D55E00"  # colours of the ranks' palette, safe for any colour vision


def show(verdict: Verdict, attempt: int, solution: str = "") -> None:
    """Display a verdict as a block in a notebook; print its text elsewhere.

    ``solution`` is folded in the block; the text says how to see it.
    """
    text = verdict.text(attempt)
    if solution:
        text += f'\n  solution: lab.solution("{verdict.exercise}") shows one.'
    _show(text, lambda: html(verdict, attempt, solution))


def show_sentence(right: bool, text: str) -> None:
    """Display one sentence as a coloured block in a notebook; print it elsewhere."""
    _show(text, lambda: f"{_block(right)} {escape(text)}</div>")


def _show(text: str, html) -> None:
    from IPython import get_ipython
    from IPython.display import display

    from dtlib.world import in_engine

    if in_engine():
        print(text)  # the notebook folds the output of ranks (engines/outputs.py)
    elif getattr(get_ipython(), "kernel", None) is None:
        print(fold(text))
    else:
        display({"text/plain": fold(text), "text/html": html()}, raw=True)


def html(verdict: Verdict, attempt: int, solution: str = "") -> str:
    """Return a verdict as an HTML block."""
    words, _, rest = verdict.outcome().partition(": ")
    rows = "".join(
        f'<tr><td style="text-align:left;vertical-align:top;opacity:.75">{name}</td>'
        f'<td style="text-align:left">{_pre(value)}</td></tr>'
        for name, value in verdict.details(attempt)
    )
    picture = verdict.picture
    return (
        f"{_block(verdict.passed)} <b>{words}:</b> {escape(rest)}"
        + (f'<table style="margin:.3em 0">{rows}</table>' if rows else "")
        + (picture._repr_html_() if hasattr(picture, "_repr_html_") else _pre(str(picture)) if picture else "")
        + (f"<details><summary>Show a solution</summary>{_pre(solution)}</details>" if solution else "")
        + f'<div style="opacity:.75">{_pre(verdict.what_was_judged())}</div></div>'
    )


def _block(right: bool) -> str:
    """Return the start of a block: its colour, and a sign for readers who cannot see the colour."""
    colour, sign = (PASSED, "&#10003;") if right else (NOT_YET, "&#8635;")
    return f'<div style="border-left:6px solid {colour};background:{colour}1A;padding:.4em .8em"><b>{sign}</b>'


def _pre(text: str) -> str:
    style = "margin:0;white-space:pre-wrap;word-break:normal;background:none;color:inherit"
    return f'<pre style="{style}">{escape(text)}</pre>'
