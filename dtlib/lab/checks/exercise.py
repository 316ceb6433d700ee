"""What predictions and exercises are made of, where exercises are found, and what a judge says: for all lessons.

An exercise is found in its lesson's folder: in ``judge_*.py``, imported when the exercise is asked for.
``lab.check("mine.py")`` takes one from a file of an instructor's own, which has it as ``EXERCISE``.

Plausible wrong answers stand in the tests (``wrong_*.py``), which prove that each is rejected for its own reason.
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
    """What a learner guesses, and where the answer comes from.

    ``got`` computes the answer, a dict where several are asked for. With parameters it is measured: they are names of
    the notebook, and the answer is there when a cell has run that assigns the first of them. Where that was a ``%%px``
    cell, each is the list of what the name is on the ranks. A number is right within the fraction ``tolerance`` of the
    answer, or ``within`` so much of it; a set has answers that are equally right. ``kind`` is the type of a guess, or
    it is one of ``choices``. ``hint`` is shown beside a wrong guess; a dict has one for each answer.
    ``of_this_computer``: a speed, for which no solution can be right everywhere, so the build of the notebooks does
    not insist."""

    got: Callable
    hint: str | dict = ""
    tolerance: float = 0.0
    within: float = 0.0
    kind: type = Number
    choices: tuple = ()
    of_this_computer: bool = False


class Score(NamedTuple):
    """Where one can do better than pass: ``value`` in ``unit``, the less the better; at ``par`` an answer passes."""

    value: float
    par: float
    unit: str
    words: str


class Wrong(Exception):
    """An answer that is not right: on which rank, what was expected, what was there, and hints from vague to plain.

    ``mistake`` names the mistake; the tests prove that each planted wrong answer is recognised as its own. One that is
    wrong only because it is over par has a ``score``.
    """

    def __init__(
        self, mistake: str, rank: int | None, expected: str, got: str, *hints: str, score: Score | None = None
    ):
        super().__init__(mistake)
        self.mistake, self.rank, self.expected, self.got, self.hints = mistake, rank, expected, got, hints
        self.score = score


def rows(rank: int | None, *expected: str) -> Callable[..., None]:
    """A judge's table of mistakes on a rank: ``wrong(mistake, holds, expected, got, *hints)`` is a row, and raises
    ``Wrong`` where it holds. Rows are tried in the order in which they stand, so that the first is what is told.

    ``rows(rank, expected)``: what was expected is the same for all of them, and left out of each.
    What is told is put into words whether a row holds or not: let it be there for right answers, too.
    """

    def wrong(mistake: str, holds: object, *told: str, score: Score | None = None) -> None:
        if holds:
            raise Wrong(mistake, rank, *expected, *told, score=score)

    return wrong


@dataclass(frozen=True)
class Exercise:
    """``name`` is what the learner defines; ``observe(answer, comm)`` runs on every rank and returns something that
    pickles; ``judge(observations)`` gets those of all ranks, in rank order, and raises ``Wrong``; where there is a
    score, it returns that, as a ``Score`` or as text. ``picture(observations)`` draws what was handed in, right or
    wrong: a text, or what has one (``str``) and HTML (``_repr_html_``).
    ``needs_ranks=False``: the answer is defined in the notebook itself and judged there, with no communicator.
    ``any_size=True``: an answer that is right is judged once more with a rank less, where no number of ranks that is
    written into it is right."""

    name: str
    observe: Callable
    judge: Callable
    picture: Callable | None = None
    needs_ranks: bool = True
    any_size: bool = False


@cache
def homes() -> dict[str, Path]:
    """Name -> the file whose ``EXERCISES`` has it, in the order of lessons: read as text, as imports take longer."""
    found: dict[str, Path] = {}
    for _, file in lesson_files.found("judge_*.py"):
        table = re.search(r"^EXERCISES = \{(.*?)\}$", file.read_text(encoding="utf-8"), re.M | re.S)
        names = re.findall(r'"([\w-]+)": ', table[1]) if table else ()
        assert not found.keys() & set(names), f"two lessons have {sorted(found.keys() & set(names))}"
        found.update(dict.fromkeys(names, file))
    return found


class Registry(Mapping):
    """Name -> exercise, as the ``EXERCISES`` of its home has it, or a file in the notebook's folder."""

    def __getitem__(self, name: str) -> Exercise:
        return _of_file(Path(name)) if name.endswith(".py") else _of_lesson(name)

    def __iter__(self) -> Iterator[str]:
        return iter(homes())

    def __len__(self) -> int:
        return len(homes())


@cache
def _of_lesson(name: str) -> Exercise:
    return lesson_files.module_of(homes()[name]).EXERCISES[name]


def _of_file(path: Path) -> Exercise:
    """Read anew each time, so that it can be fixed while a class works."""
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
    """The name of an exercise, as a string.

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
    """What all ranks agree on: ``rank`` is the lowest on which something was wrong, None if all is well, or where it is
    nobody's in particular. ``ranks`` is on how many it was judged: 0 for an exercise that needs none."""

    exercise: str
    judged: str
    ranks: int
    rank: int | None = None
    mistake: str = ""
    expected: str = ""
    got: str = ""
    hints: tuple = ()
    score: str = ""  # where one can do better than pass
    scored: tuple[float, float, str] | tuple[()] = ()  # value, par and unit, of those scores of which the best is kept
    picture: object = ""
    code: str = ""  # the same for the same answer
    note: str = ""  # what a learner should know of what was judged

    @property
    def passed(self) -> bool:
        return not self.mistake

    def text(self, attempt: int = 0) -> str:
        """What the learner reads; later attempts get plainer hints."""
        lines = [self.what_was_judged() + (f"\n\n{self.picture}\n" if self.picture else ""), self.outcome()]
        return "\n".join(lines + [f"  {name + ':':9} {value}" for name, value in self.details(attempt)])

    def what_was_judged(self) -> str:
        return f"Judged on {self.ranks} ranks: {self.judged}" if self.ranks else f"Judged: {self.judged}"

    def outcome(self) -> str:
        if self.passed:
            few = " So few ranks hide mistakes: check it with lab.engines(3) too." if 0 < self.ranks < 3 else ""
            return f"Passed: {self.exercise}.{few}{self._score()}"
        return f"Not yet: {self.exercise}{'' if self.rank is None else f', on rank {self.rank}'}."

    def details(self, attempt: int = 0) -> list[tuple[str, str]]:
        """What was expected, what was there, and the hint that is due."""
        note = [("note", self.note)] * bool(self.note)
        if self.passed:
            return note
        hints = [("hint", self.hints[min(attempt, len(self.hints) - 1)])] if self.hints else []
        return [*note, ("expected", self.expected), ("got", self.got), *hints]

    def without_code(self) -> str:
        """A sentence for others than the learner: what went wrong, without a line or a value of the answer."""
        if self.passed:
            return ""
        says = self.hints[0] if self.hints else self.expected
        if self.mistake == "raised":  # its message, and the hint with the line, are the learner's
            kind = self.got.partition(":")[0]
            says = f"{kind if hasattr(builtins, kind) else 'An error'} was raised."
        return says if self.rank is None else f"Rank {self.rank}: {says}"

    def _score(self) -> str:
        return f" {self.score}" if self.score else ""


@dataclass
class Problem:
    """Why there is nothing to observe on a rank; the fields are the arguments of ``Wrong``."""

    mistake: str
    rank: int | None
    expected: str
    got: str
    hints: tuple


# A verdict, or an outcome, as the learner reads it: a coloured block that also says in words, and with a sign, which

PASSED, NOT_YET = "#009E73", "#D55E00"  # of the ranks' palette (lab/colours.py), which all eyes can tell apart


def show(verdict: Verdict, attempt: int, solution: str = "") -> None:
    """Display the block where there is a page for it, with the text as its twin; else print the text. A ``solution`` is
    folded away in the block; the text says how to see it."""
    text = verdict.text(attempt)
    if solution:
        text += f'\n  solution: lab.solution("{verdict.exercise}") shows one.'
    _show(text, lambda: html(verdict, attempt, solution))


def show_sentence(right: bool, text: str) -> None:
    """The same for a sentence."""
    _show(text, lambda: f"{_block(right)} {escape(text)}</div>")


def _show(text: str, html) -> None:
    from IPython import get_ipython
    from IPython.display import display

    from dtlib.world import in_engine

    if in_engine():
        print(text)  # the notebook folds what ranks print (engines/outputs.py)
    elif getattr(get_ipython(), "kernel", None) is None:
        print(fold(text))
    else:
        display({"text/plain": fold(text), "text/html": html()}, raw=True)


def html(verdict: Verdict, attempt: int, solution: str = "") -> str:
    """The text of a verdict as a block."""
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
    """How a block begins: its colour, and a sign for who does not see that."""
    colour, sign = (PASSED, "&#10003;") if right else (NOT_YET, "&#8635;")
    return f'<div style="border-left:6px solid {colour};background:{colour}1A;padding:.4em .8em"><b>{sign}</b>'


def _pre(text: str) -> str:
    style = "margin:0;white-space:pre-wrap;word-break:normal;background:none;color:inherit"
    return f'<pre style="{style}">{escape(text)}</pre>'
