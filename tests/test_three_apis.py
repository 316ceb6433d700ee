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
            verdict = judged_soon(exercise, {name: answered}, "")
            assert verdict.passed, f"{api}: {verdict.text()}"
            assert ("cannot be counted" in verdict.note) == (api == "mpi4py" and uses_collectives(answer)), verdict


def uses_collectives(answer):
    words = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
    return any(f"comm.{word}" in inspect.getsource(answer) for word in words)


# mpi4py: a missing wait is not seen, as Waitall would not be. MPI ends what ours refuses before, under another name.
OTHERWISE = {
    ("mpi4py", "not-waited"): ("",),
    ("mpi4py", "too-many-bytes"): ("",),  # MPI does not say what its collectives send: see COUNTED
    ("mpi4py", "other-type"): ("other-values", "rounded", "truncated"),
    ("mpi4py", "other-chunk"): ("truncated",),
    ("mpi4py", "all-reduced"): ("memory-kept", ""),  # its bytes are not counted: the second mistake, if there is one
    ("mpi4py", "raised"): ("waited",),  # MPI receives from a rank that never sends
    ("mpi4py", "rounded"): ("raised",),  # numpy has no bfloat16
    **{(api, "bubble"): ("outputs-kept",) for api in APIS},  # by the handles of this file
}


COUNTED = ("dispatch-build",)  # by the arguments of all-to-alls and all-gathers


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
            counted = exercise in COUNTED and case.mistake == "too-many-bytes"
            expected = (case.mistake, *(() if counted else OTHERWISE.get((api, case.mistake), ())))
            verdict = judged_soon(exercise, answers, *expected)
            assert verdict.mistake in expected, f"{case.key} by {api}: {verdict.text()}"
