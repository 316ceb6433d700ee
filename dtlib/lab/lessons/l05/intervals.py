"""Intervals, and the sentences that follow from them: a mean over seeds, a difference on paired seeds, a failure rate.

All are for about 95 %: where a run is repeated many times with other seeds, the interval holds the true value in
about 95 of 100 cases. Each is meant alone; of twenty comparisons one may be wrong.
"""

import math
from collections.abc import Sequence

Z = 1.959964  # the normal distribution has 2.5 % above this


def student_t(degrees: int) -> float:
    """What Student's t distribution has 2.5 % above, by Fisher's expansion: 1 % off or less from 4 degrees on."""
    z, n = Z, degrees
    return (
        z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )  # fmt: skip


def mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and its interval's lower and upper end."""
    values = [float(value) for value in values]
    count = len(values)
    middle = math.fsum(values) / count
    variance = math.fsum((value - middle) ** 2 for value in values) / (count - 1)
    half = student_t(count - 1) * math.sqrt(variance / count)
    return middle, middle - half, middle + half


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """The mean of a - b on paired seeds, with its interval: ``a[i]`` and ``b[i]`` belong to the same seed."""
    return mean([float(x) - float(y) for x, y in zip(a, b, strict=True)])


def rate(failures: int, runs: int) -> tuple[float, float, float]:
    """A failure rate with its interval after Wilson (JASA 22, 1927), which is of use for 0 of 30 as well."""
    share, z2 = failures / runs, Z * Z
    middle = (share + z2 / (2 * runs)) / (1 + z2 / runs)
    half = Z * math.sqrt(share * (1 - share) / runs + z2 / (4 * runs**2)) / (1 + z2 / runs)
    return share, max(0.0, middle - half), min(1.0, middle + half)


def compared(first: str, a: Sequence[float], second: str, b: Sequence[float], unit: str = "points") -> str:
    """``first`` is lower or higher than ``second`` if the interval of the paired differences leaves out 0."""
    middle, low, high = (round(end, 3) + 0.0 for end in difference(a, b))
    if low <= 0 <= high:
        return f"{first} and {second}: not separated (difference {round(low, 1) + 0.0:.1f} to {high:.1f} {unit})"
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
