"""Answers may call dtlib, torch.distributed or mpi4py: right ones pass, and planted mistakes are still recognised."""

import inspect

import pytest

from dtlib.lab.checks.exercise import EXERCISES
from tests.lessons import right_answers
from tests.ranks import on_ranks
from tests.three_apis import APIS, by
from tests.wrong_answers.cases import CASES, judged_soon

TRIED = (
    "pi-on-ranks", "ring-build", "hook-fix", "buckets-build", "zero2-fix", "sharded-adam", "gather-on-demand",
    "gpipe-build", "1f1b-build", "dispatch-build", "outer-fix", "top-k-build",
)  # fmt: skip


@on_ranks(3)
def test_right_answers_pass_in_three_apis(world):
    for exercise in TRIED:
        name = EXERCISES[exercise].name
        answer = getattr(right_answers, name)
        for api, answered in {"dtlib": answer, **{api: by(kind, answer) for api, kind in APIS.items()}}.items():
            verdict = judged_soon(exercise, {name: answered})
            assert verdict.passed, f"{api}: {verdict.text()}"
            assert ("cannot be counted" in verdict.note) == (api == "mpi4py" and uses_collectives(answer)), verdict


def uses_collectives(answer):
    words = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
    return any(f"comm.{word}" in inspect.getsource(answer) for word in words)


# What cannot be told from what is right, as MPI does not say what it sends, or as there is no such mistake.
NOT_SEEN = {
    "mpi4py": {"not-waited"},
    "torch.distributed": set(),
}


def planted(exercise):
    cases = [case for case in CASES.values() if case.exercise == exercise and case.ranks == 3 and not case.by_comm]
    assert cases
    return cases


@pytest.mark.slow
@on_ranks(3)
@pytest.mark.parametrize("exercise", TRIED)
def test_planted_mistakes_are_recognised_in_other_apis(world, exercise):
    for case in planted(exercise):
        for api, kind in APIS.items():
            answers = {name: by(kind, answer) for name, answer in case.names(world).items()}
            verdict = judged_soon(exercise, answers, 1.0)
            if case.mistake not in NOT_SEEN[api]:
                assert verdict.mistake == case.mistake, f"{case.key} by {api}: {verdict.text()}"
