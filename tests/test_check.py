import pytest

from dtlib import pi
from dtlib.lab.checks import Verdict, judge_on_this_rank, predict
from dtlib.lab.exercises import EXERCISES, pi_wrong, start_wrong
from tests.ranks import on_ranks


@on_ranks(2, 3)
@pytest.mark.parametrize("exercise,answer,mistake", [
    pytest.param(exercise, answer.__name__, mistake, id=answer.__name__)
    for exercise, answers in pi_wrong.WRONG.items() for answer, mistake in answers.items()
])  # fmt: skip
def test_each_wrong_answer_to_pi_is_rejected_for_its_own_reason(world, exercise, answer, mistake):
    verdict = judge_on_this_rank(exercise, {EXERCISES[exercise].name: getattr(pi_wrong, answer)})
    assert not verdict.passed
    assert verdict.mistake == mistake
    assert verdict.hints
    assert verdict.judged.startswith(f"def {answer}(")


@on_ranks(2, 3)
@pytest.mark.parametrize("answer,mistake", [(a.__name__, m) for a, m in start_wrong.WRONG["first-sum"].items()])
def test_each_wrong_first_sum_is_rejected_for_its_own_reason(world, answer, mistake):
    total = getattr(start_wrong, answer)(world.comm)
    assert judge_on_this_rank("first-sum", {"total": total}).mistake == mistake


def count_right(points, comm):
    return pi.count_numpy(*pi.part(points, comm.rank, comm.size))


def count_right_with_own_kernel(points, comm):
    """Strided, and without dtlib's kernels: as good a way to count every point once."""
    inside = 0
    for i in range(comm.rank, points, comm.size):
        x, y = pi.point(i)
        inside += x * x + y * y < pi.RADIUS_SQUARED
    return inside


def estimate_right(points, comm):
    import torch

    inside = torch.tensor([pi.count_compiled(*pi.part(points, comm.rank, comm.size))])
    return 4 * comm.all_reduce(inside).item() / points


@on_ranks(1, 2, 3, 4)
def test_right_answers_pass(world):
    import torch

    total = torch.tensor([world.rank])
    world.comm.all_reduce(total)
    answers = {"total": total, "count_my_points": count_right, "estimate_pi": estimate_right}
    for exercise in EXERCISES:
        verdict = judge_on_this_rank(exercise, answers)
        assert verdict.passed, verdict.text()
    assert judge_on_this_rank("pi-streams", {"count_my_points": count_right_with_own_kernel}).passed


@on_ranks(2)
def test_an_answer_that_is_missing_or_raises_on_one_rank_is_named_with_the_rank(world):
    def raises_on_rank_1(points, comm):
        if comm.rank == 1:
            raise ValueError("no points for me")
        return estimate_right(points, comm)

    verdict = judge_on_this_rank("pi-on-ranks", {"estimate_pi": raises_on_rank_1})
    assert (verdict.mistake, verdict.rank, verdict.came) == (
        "raised",
        1,
        "ValueError: no points for me, in raises_on_rank_1(2000, comm) on 2 ranks",
    )
    only_on_rank_0 = {"estimate_pi": estimate_right} if world.rank == 0 else {}
    verdict = judge_on_this_rank("pi-on-ranks", only_on_rank_0)
    assert (verdict.mistake, verdict.rank) == ("missing", 1)


def test_later_attempts_get_plainer_hints():
    verdict = Verdict("pi-streams", "def f():", 3, 1, "gap", "all", "some", ("think", "do this"))
    assert [verdict.text(attempt).splitlines()[-1].split()[1] for attempt in (0, 1, 2)] == ["think", "do", "do"]


@pytest.mark.parametrize("guess,came,words", [
    (None, 6, "Predict first"), (6, 6, "right"), (10, 6, "came out as 6. Ranks start at 0."),
    (9.5, 10.0, "right"), ("10", 10.0, "without quotes"), ("yes", "yes", "right"),
])  # fmt: skip
def test_predictions(capsys, guess, came, words):
    predict(guess, came, tolerance=0.1, hint="Ranks start at 0.")
    assert words in capsys.readouterr().out
