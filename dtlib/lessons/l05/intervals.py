"""Intervals of about 95 % for a mean over seeds, a difference on paired seeds, and a failure rate, with sentences.

If a run is repeated many times with other seeds, about 95 of 100 intervals contain the true value. Each interval is
meant for one comparison: among twenty comparisons, one may be wrong.
"""

import math
from collections.abc import Sequence

CONFIDENCE = 0.95


def mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, and the lower and upper end of its interval."""
    from scipy import stats

    values = [float(value) for value in values]
    count = len(values)
    middle = math.fsum(values) / count
    variance = math.fsum((value - middle) ** 2 for value in values) / (count - 1)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * math.sqrt(variance / count)
    return middle, float(middle - half), float(middle + half)


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of a - b on paired seeds, with its interval; ``a[i]`` and ``b[i]`` have the same seed."""
    return mean([float(x) - float(y) for x, y in zip(a, b, strict=True)])


def rate(failures: int, runs: int) -> tuple[float, float, float]:
    """Return a failure rate with Wilson's interval (JASA 22, 1927), which is valid for 0 of 30, too."""
    from scipy import stats

    interval = stats.binomtest(failures, runs).proportion_ci(CONFIDENCE, method="wilson")
    return failures / runs, float(interval.low), float(interval.high)


def compared(first: str, a: Sequence[float], second: str, b: Sequence[float], unit: str = "points") -> str:
    """Return a sentence that compares two means on paired seeds.

    ``first`` is called lower or higher than ``second`` only if the interval of the paired differences excludes 0.
    """
    middle, low, high = (round(end, 3) + 0.0 for end in difference(a, b))
    if low <= 0 <= high:
        digits = 1 if min(-low, high) >= 0.05 else 2  # enough digits to show both signs
        return f"{first} and {second}: not separated (difference {low:.{digits}f} to {high:.{digits}f} {unit})"
    word, few, many = ("higher", low, high) if middle > 0 else ("lower", -high, -low)
    return f"{first} is {word} than {second} by {few:.1f} to {many:.1f} {unit}"


def rates_compared(first: str, a: tuple[int, int], second: str, b: tuple[int, int]) -> str:
    """Return a sentence that compares two failure rates, given as (failures, runs).

    Rates are called different only if the intervals do not overlap. This rule is strict: it rarely claims a difference
    that does not exist, but may miss some.
    """
    (_, low_a, high_a), (_, low_b, high_b) = rate(*a), rate(*b)
    if high_a < low_b:
        return f"{first} fails less often than {second}"
    if high_b < low_a:
        return f"{first} fails more often than {second}"
    return f"{first} and {second}: not separated"
