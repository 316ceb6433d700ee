"""Predictions and exercises, and where exercises are found; for all lessons.

An exercise belongs to its lesson's folder: ``judge_*.py`` is imported when the exercise is needed.
``lab.check("mine.py")`` uses an instructor's own file, which defines the exercise as ``EXERCISE``.

The tests contain plausible wrong answers (``wrong_*.py``), and prove that each is rejected for its own reason.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from numbers import Number
from pathlib import Path
from runpy import run_path
from typing import NamedTuple

from dtlib.errors import DtlibError
from dtlib.lab.lesson_files import found, module_of


@dataclass(frozen=True)
class Prediction:
    """A question whose answer a learner guesses, and the source of the answer.

    ``got`` computes the answer, or a dictionary for several questions. If ``got`` has parameters, the answer is
    measured: ``got`` receives the values of the notebook's variables with these names, after a cell has assigned the
    first variable. After a ``%%px`` cell, each argument is the list of the values on all ranks.

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
    answer that is wrong only because it exceeds par has a ``score``. A rank whose answer raised an error returns
    ``Wrong`` in place of its observation.
    """

    def __init__(
        self, mistake: str, rank: int | None, expected: str, got: str, *hints: str, score: Score | None = None
    ):
        super().__init__(mistake, rank, expected, got, *hints)  # unpickling calls Wrong with these arguments
        self.mistake, self.rank, self.expected, self.got, self.hints = mistake, rank, expected, got, hints
        self.score = score


def rows(rank: int | None, *expected: str) -> Callable[..., None]:
    """Return a function ``wrong(mistake, holds, expected, got, *hints)`` that raises ``Wrong`` if ``holds`` is true.

    A judge calls it once for each possible mistake, like the rows of a table; the first that holds is reported. With
    ``rows(rank, expected)``, all calls share ``expected`` and omit it. The texts are formatted even if a row does not
    hold, so their values must exist for right answers too.
    """

    def wrong(mistake: str, holds: object, *hints: str, score: Score | None = None) -> None:
        if holds:
            raise Wrong(mistake, rank, *expected, *hints, score=score)

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
    files: dict[str, Path] = {}
    for _, file in found("judge_*.py"):
        table = re.search(r"^EXERCISES = \{(.*?)\}$", file.read_text(encoding="utf-8"), re.M | re.S)
        names = re.findall(r'"([\w-]+)": ', table[1]) if table else ()
        assert not files.keys() & set(names), f"two lessons have {sorted(files.keys() & set(names))}"
        files.update(dict.fromkeys(names, file))
    return files


class Registry(Mapping):
    """A mapping from name to exercise, in a lesson's ``EXERCISES`` or in a file in the notebook's folder."""

    def __getitem__(self, name: str) -> Exercise:
        return _of_file(Path(name)) if name.endswith(".py") else module_of(exercise_files()[name]).EXERCISES[name]

    def __iter__(self) -> Iterator[str]:
        return iter(exercise_files())

    def __len__(self) -> int:
        return len(exercise_files())


def _of_file(path: Path) -> Exercise:
    """Load an exercise from a file, again on each call, so that an instructor can correct it during a class."""
    if not path.is_file():
        raise DtlibError(
            f"There is no file {path.name} in {path.absolute().parent}: put the exercise in the notebook's folder."
        )
    found = run_path(str(path)).get("EXERCISE")
    if not isinstance(found, Exercise):
        raise DtlibError(f"{path.name} has no exercise: end the file with EXERCISE = Exercise(name, observe, judge).")
    return found


EXERCISES = Registry()


def exercise_name(name: str) -> str:
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
