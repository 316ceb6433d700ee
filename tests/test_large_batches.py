"""Lesson 05: its exercises, and the intervals behind its sentences."""

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from dtlib.lab.checks.judging import judge_here, judge_on_this_rank
from dtlib.lessons.l05 import intervals
from tests.cases import for_each
from tests.lessons.l05.wrong_noise import right as scale_right
from tests.ranks import on_ranks


def with_the_library(a, b):
    found = stats.ttest_rel(a, b).confidence_interval()
    return found.low, found.high, "lower" if found.high < 0 else "higher" if found.low > 0 else "not separated"


def with_torch(a, b):
    """Ends as tensors in float32, and a list in place of a tuple."""
    d = torch.tensor(a) - torch.tensor(b)
    half = float(stats.t.ppf(0.975, len(d) - 1)) * d.std() / len(d) ** 0.5
    inside = bool((d.mean() - half) * (d.mean() + half) <= 0)
    return [d.mean() - half, d.mean() + half, "not separated" if inside else "lower" if d.mean() < 0 else "higher"]


def with_numpy(a, b):
    d = np.subtract(a, b)
    low, high = stats.t.interval(0.95, d.size - 1, loc=d.mean(), scale=stats.sem(d))
    return low, high, ("not separated", "higher", "lower")[int(low > 0) - int(high < 0)]


def settings_right(step, warmup_steps, k):
    fraction = min(1, step / warmup_steps)
    return {"lr": 0.02 + 0.02 * (k - 1) * fraction, "momentum": 0.9}


RIGHT_RATES = {"warmup_settings": settings_right, "noise_scale": scale_right, "paired_interval": with_the_library}


@for_each(answer=[with_the_library, with_torch, with_numpy])
def test_other_ways_to_a_right_interval_pass(answer):
    verdict = judge_here("paired-interval", {"paired_interval": answer})
    assert verdict.passed, verdict.text()


@for_each(answer=[lambda *_: None, lambda *_: ("a", "b", "lower"), lambda *_: 1.0])
def test_what_is_no_interval_is_named(answer):
    assert judge_here("paired-interval", {"paired_interval": answer}).mistake == "type"


@on_ranks(2)
def test_what_is_no_number_is_named(world):
    verdict = judge_on_this_rank("warmup-fix", {"warmup_settings": lambda *_, **__: None})
    assert (verdict.mistake, verdict.got) == ("type", "'None'")


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
