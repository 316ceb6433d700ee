"""Every wrong answer: its exercise, its mistake, and on how many ranks it shows; on none where it needs none."""

import inspect
from dataclasses import dataclass
from unittest.mock import patch

from dtlib.lab.checks import checks
from dtlib.lab.checks.registry import EXERCISES
from tests.wrong_answers import (
    buckets_wrong,
    byte_golf_wrong,
    clock_wrong,
    collectives_wrong,
    data_parallel_wrong,
    hangs_wrong,
    input_wrong,
    large_batches_wrong,
    mlp_wrong,
    one_f_one_b_wrong,
    pi_wrong,
    pipelines_wrong,
    recovery_wrong,
    replicator_wrong,
    resuming_wrong,
    scaling_wrong,
    sizes_wrong,
    start_wrong,
    tensor_wrong,
    two_models_wrong,
    zero2_wrong,
    zero3_wrong,
    zero_wrong,
)

LESSONS = (
    pi_wrong, collectives_wrong, data_parallel_wrong, buckets_wrong, byte_golf_wrong, large_batches_wrong, zero_wrong,
    zero2_wrong, zero3_wrong, pipelines_wrong, clock_wrong, one_f_one_b_wrong, tensor_wrong, mlp_wrong,
    replicator_wrong, recovery_wrong, scaling_wrong,
)  # fmt: skip


def judged_soon(exercise: str, names: dict, seconds: float = 2.0) -> checks.Verdict:
    """The verdict of all ranks, where one that waits in vain gives up sooner than in class."""
    with patch.object(checks, "WAIT_SECONDS", seconds):
        return checks.judge_on_this_rank(exercise, names)


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
        if inspect.isclass(answer) and issubclass(answer, pipelines_wrong.Step):
            answer = answer()  # which is called with the arguments of a step
        return {EXERCISES[self.exercise].name: answer}


def _cases():
    for lesson in LESSONS:
        for exercise, answers in lesson.WRONG.items():
            for answer, shown in answers.items():
                mistake, fewest = (shown, 3) if isinstance(shown, str) else shown
                yield Case(exercise, answer.__name__, answer, mistake, max(3, fewest))
    for answer, mistake in collectives_wrong.ON_TWO_RANKS.items():
        yield Case("ring-build", f"{answer.__name__} on two ranks", answer, mistake, 2)
    for answer, mistake in start_wrong.WRONG["first-sum"].items():
        yield Case("first-sum", answer.__name__, answer, mistake, by_comm=True)
    for answer, exercise in sizes_wrong.WRONG.items():
        yield Case(exercise, answer.__name__, answer, "other-size")
    for name, (explained, mistake) in hangs_wrong.answers_to_hangs().items():
        yield Case("hangs", name, explained, mistake)
    for exercise, answers in (input_wrong.WRONG | resuming_wrong.WRONG).items():
        for answer, mistake in answers.items():
            yield Case(exercise, answer.__name__, answer, mistake, 0)
    for name, (answer, mistake) in input_wrong.COSTS.items():
        yield Case("format-budget", name, answer, mistake, 0)
    for name, (fit, mistake) in zero3_wrong.FITS.items():
        yield Case("fit-it", name, fit, mistake)
    for exercise, answers in two_models_wrong.NAMED.items():
        for name, (answer, mistake) in answers.items():
            yield Case(exercise, name, answer, mistake)


CASES = {case.key: case for case in _cases()}
