"""Every wrong answer: its exercise, its mistake, and on how many ranks it shows; on none where it needs none.

The ``wrong_*.py`` in tests/lessons have them in tables: exercise -> answer -> mistake, or (mistake, fewest ranks):

    WRONG       an answer is a function or a class, which has a name
    NAMED       name -> (answer, mistake), for others
    MADE        as WRONG; what is handed in is ``answer(comm)``
"""

import inspect
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from dtlib.lab.checks import judging
from dtlib.lab.checks.exercise import EXERCISES
from tests.lessons.l07.wrong_pipelines import Step

LESSONS = Path(__file__).parents[1] / "lessons"


def judged_soon(exercise: str, names: dict, *expected: str) -> judging.Verdict:
    """The verdict of all ranks, where a rank whose wait cannot end gives up sooner than in class.

    Ranks of a busy machine may wait longer for those that do arrive. So a mistake that is none of the ``expected`` ones
    counts only if it is seen with more patience.
    """
    for seconds in (1.0, 10 * judging.WAIT_SECONDS):
        with patch.object(judging, "WAIT_SECONDS", seconds):
            verdict = judging.judge_on_this_rank(exercise, names)
        if verdict.mistake in expected:
            break
    return verdict


@dataclass(frozen=True)
class Case:
    """``mistake`` is shown on ``ranks`` ranks; ``by_comm``: what is handed in is ``answer(comm)``, and has no name."""

    exercise: str
    name: str
    answer: object
    mistake: str
    ranks: int = 3
    by_comm: bool = False

    @property
    def key(self) -> str:
        return f"{self.exercise}: {self.name}"

    def names(self, world) -> dict:
        """What the learner has defined on this rank."""
        answer = self.answer(world.comm) if self.by_comm else self.answer
        return {EXERCISES[self.exercise].name: handed_in(answer)}


def handed_in(answer):
    """A class of steps of a pipeline is called with the arguments of a step, so what is judged is an object of it."""
    return answer() if inspect.isclass(answer) and issubclass(answer, Step) else answer


def _cases():
    for file in sorted(LESSONS.glob("l*/wrong_*.py")):
        tables = vars(import_module(f"tests.lessons.{file.parent.name}.{file.stem}"))
        for kind in ("WRONG", "NAMED", "MADE"):
            for exercise, answers in tables.get(kind, {}).items():
                for name, shown in answers.items():
                    name, answer, shown = (name, *shown) if kind == "NAMED" else (name.__name__, name, shown)
                    mistake, ranks = (shown, 3) if isinstance(shown, str) else shown
                    if kind != "NAMED":
                        ranks = max(3, ranks)
                    ranks = ranks if EXERCISES[exercise].needs_ranks else 0
                    yield Case(exercise, name, answer, mistake, ranks, by_comm=kind == "MADE")


CASES = {case.key: case for case in _cases()}
