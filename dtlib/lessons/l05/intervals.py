"""Intervals, and the sentences that follow from them: a mean over seeds, a difference on paired seeds, a failure rate.

All are for about 95 %: where a run is repeated many times with other seeds, the interval holds the true value in
about 95 of 100 cases. Each is meant alone; of twenty comparisons one may be wrong.
"""

import math
from collections.abc import Sequence

CONFIDENCE = 0.95


def mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and its interval's lower and upper end."""
    from scipy import stats

    values = [float(value) for value in values]
    count = len(values)
    middle = math.fsum(values) / count
    variance = math.fsum((value - middle) ** 2 for value in values) / (count - 1)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * math.sqrt(variance / count)
    return middle, float(middle - half), float(middle + half)


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """The mean of a - b on paired seeds, with its interval: ``a[i]`` and ``b[i]`` belong to the same seed."""
    return mean([float(x) - float(y) for x, y in zip(a, b, strict=True)])


def rate(failures: int, runs: int) -> tuple[float, float, float]:
    """A failure rate with its interval after Wilson (JASA 22, 1927), which is of use for 0 of 30 as well."""
    from scipy import stats

    interval = stats.binomtest(failures, runs).proportion_ci(CONFIDENCE, method="wilson")
    return failures / runs, float(interval.low), float(interval.high)


def compared(first: str, a: Sequence[float], second: str, b: Sequence[float], unit: str = "points") -> str:
    """``first`` is lower or higher than ``second`` if the interval of the paired differences leaves out 0."""
    middle, low, high = (round(end, 3) + 0.0 for end in difference(a, b))
    if low <= 0 <= high:
        digits = 1 if min(-low, high) >= 0.05 else 2  # so that both signs are seen
        return f"{first} and {second}: not separated (difference {low:.{digits}f} to {high:.{digits}f} {unit})"
    word, few, many = ("higher", low, high) if middle > 0 else ("lower", -high, -low)
    return f"{first} is {word} than {second} by {few:.1f} to {many:.1f} {unit}"


def rates_compared(first: str, a: tuple[int, int], second: str, b: tuple[int, int]) -> str:
    """The same for failures, as (failures, runs): separated where one interval ends before the other begins.

    That is a strict rule: rates that just pass it differ for certain enough; of others it may miss some.
    """
    (_, low_a, high_a), (_, low_b, high_b) = rate(*a), rate(*b)
    if high_a < low_b:
        return f"{first} fails less often than {second}"
    if high_b < low_a:
        return f"{first} fails more often than {second}"
    return f"{first} and {second}: not separated"
