"""Lesson 05: its exercises, and the intervals behind its sentences."""

import math
import random

import pytest
import torch

from dtlib.lab.checks.checks import judge_on_this_rank
from dtlib.lab.checks.exercise import EXERCISES
from dtlib.lessons.l05 import intervals
from dtlib.training.rates import linear_rule
from tests.cases import for_each
from tests.lessons.l05 import wrong_large_batches
from tests.ranks import on_ranks


def settings_right(step, warmup_steps, k):
    fraction = min(1, step / warmup_steps)
    return {"lr": 0.02 + 0.02 * (k - 1) * fraction, "momentum": 0.9}


def scaled_right(rate, ranks, batch, base_batch, step, warmup_steps):
    top = rate * ranks * batch / base_batch
    if step >= warmup_steps:
        return top
    return rate + (top - rate) * step / warmup_steps


def scaled_with_library(rate, ranks, batch, base_batch, step, warmup_steps):
    """As a tensor of one element, in float32."""
    top = linear_rule(rate, ranks * batch, base_batch)
    fraction = min(step, warmup_steps) / warmup_steps if warmup_steps else 1
    return torch.tensor(rate).lerp(torch.tensor(top), fraction)


RIGHT_RATES = {"warmup_settings": settings_right, "scaled_rate": scaled_right}


@on_ranks(3)
def test_another_form_of_a_right_rate_passes(world):
    verdict = judge_on_this_rank("scale-the-rate", {"scaled_rate": scaled_with_library})
    assert verdict.passed, verdict.text()


@on_ranks(2)
@for_each(exercise=sorted(wrong_large_batches.WRONG))
def test_what_is_no_number_is_named(world, exercise):
    verdict = judge_on_this_rank(exercise, {EXERCISES[exercise].name: lambda *_, **__: None})
    assert (verdict.mistake, verdict.got) == ("type", "'None'" if exercise == "warmup-fix" else "None")


def test_intervals_are_those_of_the_tables():
    """Student's t for 5 degrees is 2.571; Wilson's interval of 0 of 30 ends at 11.4 %."""
    middle, low, high = intervals.mean([1, 2, 3, 4, 5, 6])
    assert (middle, (high - low) / 2) == pytest.approx((3.5, 2.571 * math.sqrt(3.5 / 6)), abs=1e-3)
    assert intervals.rate(0, 30) == pytest.approx((0, 0, 0.1135), abs=1e-4)
    assert intervals.rate(16, 32) == pytest.approx((0.5, 0.336, 0.664), abs=1e-3)


def test_the_interval_of_a_mean_covers_it_in_95_of_100_cases():
    chance = random.Random(0)
    covered = 0
    for _ in range(2000):
        _, low, high = intervals.mean([chance.gauss(3, 1) for _ in range(8)])
        covered += low <= 3 <= high
    assert abs(covered / 2000 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 2000)


@pytest.mark.parametrize("a,b,words", [
    ([1, 2, 3, 4], [2, 3.1, 4, 5], "A is lower than B by 0.9 to 1.1 points"),
    ([2, 3.1, 4, 5], [1, 2, 3, 4], "A is higher than B by 0.9 to 1.1 points"),
    ([1, 2, 3, 4], [4, 3, 2, 1], "A and B: not separated (difference -4.1 to 4.1 points)"),
])  # fmt: skip
def test_a_comparison_says_what_its_interval_says(a, b, words):
    assert intervals.compared("A", a, "B", b) == words


@pytest.mark.parametrize("a,b,words", [
    ((0, 32), (30, 32), "A fails less often than B"),
    ((30, 32), (0, 32), "A fails more often than B"),
    ((28, 32), (24, 32), "A and B: not separated"),
])  # fmt: skip
def test_failure_rates_differ_where_their_intervals_do_not_meet(a, b, words):
    assert intervals.rates_compared("A", a, "B", b) == words
