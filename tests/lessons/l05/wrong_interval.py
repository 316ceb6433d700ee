"""Plausible wrong answers to the interval of paired differences, and the mistake that the check recognises in each."""

import math
import statistics

from scipy import stats


def word(low, high):
    return "lower" if high < 0 else "higher" if low > 0 else "not separated"


def made(middle, half):
    return middle - half, middle + half, word(middle - half, middle + half)


def minus(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def t(n):
    return stats.t.ppf(0.975, n - 1)


def unpaired(a, b):
    error = math.sqrt((statistics.variance(a) + statistics.variance(b)) / len(a))
    return made(statistics.mean(a) - statistics.mean(b), t(len(a)) * error)


def two_samples(a, b):
    found = stats.ttest_ind(a, b).confidence_interval()
    return found.low, found.high, word(found.low, found.high)


def deviation_of_one_run(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), t(len(d)) * statistics.stdev(d))


def divides_by_n(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), t(len(d)) * statistics.stdev(d) / len(d))


def divides_by_the_root_of_n_minus_1(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), t(len(d)) * statistics.stdev(d) / math.sqrt(len(d) - 1))


def half_of_half_the_width(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), t(len(d)) / 2 * statistics.stdev(d) / math.sqrt(len(d)))


def normal_for_t(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), 1.96 * statistics.stdev(d) / math.sqrt(len(d)))


def population_and_normal(a, b):
    """As with numpy's std and 1.96: two mistakes, of which the first is told."""
    d = minus(a, b)
    return made(statistics.mean(d), 1.96 * statistics.pstdev(d) / math.sqrt(len(d)))


def degrees_are_n(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), stats.t.ppf(0.975, len(d)) * statistics.stdev(d) / math.sqrt(len(d)))


def one_side(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), stats.t.ppf(0.95, len(d) - 1) * statistics.stdev(d) / math.sqrt(len(d)))


def one_standard_error(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), statistics.stdev(d) / math.sqrt(len(d)))


def variance(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), t(len(d)) * statistics.variance(d) / math.sqrt(len(d)))


def right(a, b):
    d = minus(a, b)
    return made(statistics.mean(d), t(len(d)) * statistics.stdev(d) / math.sqrt(len(d)))


def b_minus_a(a, b):
    return right(b, a)


def lower_quantile(a, b):
    low, high, verdict = right(a, b)
    return high, low, verdict


def sorts_first(a, b):
    return right(sorted(a), sorted(b))


def without_signs(a, b):
    return right([abs(d) for d in minus(a, b)], [0] * len(a))


def in_fractions(a, b):
    return right([d / y for d, y in zip(minus(a, b), b, strict=True)], [0] * len(a))


def of_a_alone(a, b):
    return right(a, [0] * len(a))


def rounds_the_ends(a, b):
    low, high, verdict = right(a, b)
    return round(low, 2), round(high, 2), verdict


def around_zero(a, b):
    low, high, verdict = right(a, b)
    return (low - high) / 2, (high - low) / 2, verdict


def median_in_the_middle(a, b):
    low, high, _ = right(a, b)
    return made(statistics.median(minus(a, b)), (high - low) / 2)


def twice_as_wide(a, b):
    low, high, _ = right(a, b)
    return made((low + high) / 2, 1.3 * (high - low))


def only_the_ends(a, b):
    return right(a, b)[:2]


def degrees_of_nothing(a, b):
    return math.nan, math.nan, "not separated"


def by_the_mean(a, b):
    low, high, _ = right(a, b)
    return low, high, "lower" if low + high < 0 else "higher"


def verdict_by_normal(a, b):
    """The ends are right; the verdict is by 1.96 standard errors."""
    (low, high, _), (low_by, high_by, _) = right(a, b), normal_for_t(a, b)
    return low, high, word(low_by, high_by)


def by_p_of_two_samples(a, b):
    low, high, verdict = right(a, b)
    return low, high, verdict if stats.ttest_ind(a, b).pvalue < 0.05 else "not separated"


def bootstrap(a, b):
    d = minus(a, b)
    found = stats.bootstrap((d,), statistics.fmean, n_resamples=999, method="percentile", rng=0).confidence_interval
    return found.low, found.high, word(found.low, found.high)


def one_sided_test(a, b):
    found = stats.ttest_rel(a, b, alternative="less").confidence_interval()
    return found.low, found.high, word(found.low, found.high)


def normal_for_many(a, b):
    """From 30 seeds on, as an old rule says."""
    return normal_for_t(a, b) if len(a) >= 30 else right(a, b)


def drops_the_extremes(a, b):
    kept = sorted(minus(a, b))[1:-1]
    return right(kept, [0] * len(kept))


def welch(a, b):
    found = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    return found.low, found.high, word(found.low, found.high)


def first_five_seeds(a, b):
    return right(a[:5], b[:5])


def capital_letters(a, b):
    low, high, verdict = right(a, b)
    return low, high, verdict.capitalize()


def or_for_and(a, b):
    low, high, verdict = right(a, b)
    return low, high, "not separated" if low <= 0 or high >= 0 else verdict


def by_own_intervals(a, b):
    low, high, _ = right(a, b)
    (low_a, high_a, _), (low_b, high_b, _) = of_a_alone(a, b), of_a_alone(b, a)
    return low, high, "lower" if high_a < low_b else "higher" if low_a > high_b else "not separated"


def higher_for_lower(a, b):
    low, high, verdict = right(a, b)
    return low, high, {"lower": "higher", "higher": "lower"}.get(verdict, verdict)


def says_separated(a, b):
    low, high, verdict = right(a, b)
    return low, high, verdict if verdict == "not separated" else "separated"


WRONG = {
    "paired-interval": {
        unpaired: "unpaired",
        two_samples: "unpaired",
        deviation_of_one_run: "of-one-run",
        divides_by_n: "divided-by-n",
        divides_by_the_root_of_n_minus_1: "n-minus-one-twice",
        half_of_half_the_width: "half-of-half",
        normal_for_t: "normal",
        population_and_normal: "population",
        degrees_are_n: "degrees",
        one_side: "one-sided",
        one_standard_error: "no-quantile",
        variance: "variance",
        b_minus_a: "wrong-sign",
        lower_quantile: "swapped-ends",
        sorts_first: "sorted",
        without_signs: "absolute",
        in_fractions: "relative",
        of_a_alone: "one-rule",
        rounds_the_ends: "rounded",
        around_zero: "wrong-middle",
        median_in_the_middle: "wrong-middle",
        twice_as_wide: "other-width",
        only_the_ends: "type",
        degrees_of_nothing: "no-number",
        by_the_mean: "separated-too-soon",
        by_own_intervals: "not-separated-too-often",
        verdict_by_normal: "separated-too-soon",
        by_p_of_two_samples: "not-separated-too-often",
        bootstrap: "wrong-middle",
        one_sided_test: "no-number",
        normal_for_many: "other-width",
        drops_the_extremes: "wrong-middle",
        welch: "unpaired",
        first_five_seeds: "wrong-middle",
        capital_letters: "other-words",
        or_for_and: "not-separated-too-often",
        higher_for_lower: "other-way-round",
        says_separated: "other-words",
    },
}
