"""The exercises of lesson 09: plausible wrong answers are rejected for their own reasons, unusual right ones pass."""

import pytest
from torch.utils.data import get_worker_info

from dtlib.lab.checks.checks import judge_here
from dtlib.lab.checks.registry import EXERCISES
from dtlib.lab.lessons.l09.judge_input import cost
from tests.wrong_answers import input_wrong
from tests.wrong_answers.input_wrong import Right, _Stream

CASES = [
    pytest.param(exercise, answer, mistake, id=f"{exercise}: {answer.__name__}")
    for exercise, answers in input_wrong.WRONG.items() for answer, mistake in answers.items()
] + [
    pytest.param("format-budget", answer, mistake, id=f"format-budget: {name}")
    for name, (answer, mistake) in input_wrong.COSTS.items()
]  # fmt: skip


def verdict_on(exercise, answer):
    return judge_here(exercise, {EXERCISES[exercise].name: answer})


@pytest.mark.parametrize("exercise,answer,mistake", CASES)
def test_each_wrong_answer_is_rejected_for_its_own_reason(exercise, answer, mistake):
    verdict = verdict_on(exercise, answer)
    assert verdict.mistake == mistake, verdict.text()
    assert verdict.hints and all(verdict.hints)


def contiguous(order, rank, ranks):
    each, more = divmod(len(order), ranks)
    first = rank * each + min(rank, more)
    return tuple(order[first : first + each + (rank < more)])


class Dealt(_Stream):
    def __iter__(self):
        worker = get_worker_info()
        at, of = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from self.order[self.rank * of + at :: self.ranks * of]


class KeepsWhatIsLeft(Right):
    """The whole rest as a list, the same on all ranks: long, and right."""

    def state_dict(self):
        return {"rest": self.order[self.taken :]}

    def load_state_dict(self, state):
        self.order, self.taken = state["rest"], 0


@pytest.mark.parametrize("exercise,answer", [
    ("shard-mend", contiguous), ("shard-mend", lambda order, rank, ranks: order[rank::ranks]),
    ("twice-mend", Dealt), ("resume-build", Right), ("resume-build", KeepsWhatIsLeft), ("format-budget", cost),
])  # fmt: skip
def test_right_answers_pass(exercise, answer):
    assert verdict_on(exercise, answer).passed, verdict_on(exercise, answer).text()
