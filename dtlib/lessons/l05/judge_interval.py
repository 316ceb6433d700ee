"""Lesson 05: check of an interval of paired differences, on errors of two made-up rules."""

import math
import random
import statistics
from itertools import product

from dtlib.lab.checks.exercise import Exercise, rows
from dtlib.lessons.l05 import intervals

VERDICTS = ("lower", "higher", "not separated")
# (seeds, mean of a - b, its standard deviation). Seeds differ more than rules, so in the first two pairs the intervals
# of the rules overlap. The third and fourth pair are not separated; with normal quantiles the fourth pair would be.
PAIRS = ((6, -1.0, 0.4), (5, 0.9, 0.3), (8, -0.35, 0.7), (4, 1.4, 1.1), (32, 0.5, 0.8), (10, -2.0, 1.5))


def _pairs():
    chance = random.Random(58)
    for seeds, apart, spread in PAIRS:
        b = [6 + abs(chance.gauss(0, 3)) for _ in range(seeds)]
        off = [chance.gauss(0, 1) for _ in b]
        middle, scale = statistics.fmean(off), spread / statistics.stdev(off)
        yield [error + apart + scale * (each - middle) for error, each in zip(b, off, strict=True)], b


ERRORS = list(_pairs())  # (errors of a, errors of b) in %, one per seed


def observe(paired_interval, comm):
    """Return for each pair of series the two ends and the verdict, or a text that describes another result."""
    return [_read(paired_interval(list(a), list(b))) for a, b in ERRORS]


def _read(returned):
    try:
        low, high, verdict = returned
        return float(low), float(high), " ".join(str(verdict).split())
    except (TypeError, ValueError, RuntimeError):
        return f"{returned!r:.60}"


def judge(observations) -> None:
    """Check the ends against the interval of the mean paired difference, and the verdict against the ends."""
    seen = observations[0]
    for got in seen:
        rows(None)("type", isinstance(got, str), "three things: low, high, verdict", f"{got}",
                   "Return the two ends of the interval and the verdict.", "return low, high, verdict")
    for (low, high, _), (a, b) in zip(seen, ERRORS, strict=True):
        ends = intervals.difference(a, b)[1:]
        if not _same((low, high), ends):
            few = [", ".join(f"{error:.1f}" for error in errors[:3]) for errors in (a, b)]
            _judge_ends([one[:2] for one in seen], f"{ends[0]:.3f} to {ends[1]:.3f} for {len(a)} seeds "
                        f"(a = [{few[0]}, ...], b = [{few[1]}, ...])", f"{low:.3f} to {high:.3f}")
    for low, high, verdict in seen:
        right = "lower" if high < 0 else "higher" if low > 0 else "not separated"
        wrong = rows(None, f'"{right}" for an interval from {low:.2f} to {high:.2f}', f'"{verdict:.40}"')
        wrong("other-words", verdict not in VERDICTS, "Which three texts may the verdict be?",
              '"lower", "higher" or "not separated", in small letters.')
        wrong("separated-too-soon", right == "not separated" and verdict != right,
              "0 is in this interval. Can the true difference be 0, or have the other sign?",
              'Use the ends, not the mean: with low <= 0 <= high the verdict is "not separated".')
        wrong("not-separated-too-often", verdict == "not separated" != right,
              "Only the interval of the difference decides. Is 0 in it?",
              "Do not compare the interval of each rule: with high < 0 or low > 0 the rules are separated.")
        wrong("other-way-round", verdict != right,
              "The verdict describes a, and the difference is a - b. What does a negative one mean?",
              "If the interval is below 0, a is lower than b.")


def _same(got, wanted) -> bool:
    """Return whether both ends are right within a small part of the interval's width."""
    return all(abs(x - y) <= 2e-4 * abs(wanted[1] - wanted[0]) for x, y in zip(got, wanted, strict=True))


def _all(seen, sample) -> bool:
    """Return whether all ends are intervals of another sample that is computed from a and b."""
    return all(_same(ends, intervals.mean(sample(a, b))[1:]) for ends, (a, b) in zip(seen, ERRORS, strict=True))


def _minus(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


SUBTRACT = "Use a[i] - b[i] for each seed, in the order of the lists."
SAMPLES = (
    ("wrong-sign", lambda a, b: _minus(b, a), "This is the interval of b - a.",
     "a - b is below 0 if a has the lower error."),
    ("one-rule", lambda a, b: a, "This is the interval of a alone.", SUBTRACT),
    ("one-rule", lambda a, b: b, "This is the interval of b alone.", SUBTRACT),
    ("sorted", lambda a, b: _minus(sorted(a), sorted(b)), "You sorted the errors, so a pair has two seeds.", SUBTRACT),
    ("absolute", lambda a, b: [abs(d) for d in _minus(a, b)], "The differences have lost their signs.", SUBTRACT),
    ("relative", lambda a, b: [(x - y) / y for x, y in zip(a, b, strict=True)],
     "These are fractions of b, and the exercise asks for points. Where do you divide?", SUBTRACT),
)  # fmt: skip


def _judge_ends(seen, expected: str, got: str) -> None:
    """Recognise which wrong sample, or which wrong half-width, gives these ends."""
    from scipy import stats

    truths = [intervals.difference(a, b) for a, b in ERRORS]
    wrong = rows(None, expected, got)
    wrong("no-number", any(math.isinf(end) for ends in seen for end in ends),
          "An end is infinite. Is your interval one-sided?", HINTS["one-sided"][1])
    wrong("no-number", not all(math.isfinite(end) for ends in seen for end in ends),
          "Is an argument of stats.t.ppf out of its range?",
          "stats.t.ppf(0.975, n - 1): not 97.5, and n is len(a).")
    wrong("swapped-ends", all(_same(ends[::-1], truth[1:]) for ends, truth in zip(seen, truths, strict=True)),
          "Which of the two ends is the lower one?",
          "The quantile at 0.975 is positive: return middle - half, middle + half.")
    for mistake, sample, *hints in SAMPLES:
        wrong(mistake, _all(seen, sample), *hints)
    close = all(abs(x - y) < 0.06 for ends, truth in zip(seen, truths, strict=True)
                for x, y in zip(ends, truth[1:], strict=True))
    wrong("rounded", close and all(round(end, 3) == end for ends in seen for end in ends),
          "These are rounded: return all digits.", "Round only what you print, not what you return.")
    middles = all(abs(sum(ends) / 2 - truth[0]) < 1e-4 for ends, truth in zip(seen, truths, strict=True))
    wrong("wrong-middle", not middles,
          "The middle of the interval is not the mean of all differences. Do you use each seed once?",
          "The middle is the mean of a[i] - b[i]; the ends are middle - half and middle + half.")
    wrong("unpaired", all(_same(ends, stats.ttest_ind(a, b, equal_var=False).confidence_interval())
                          for ends, (a, b) in zip(seen, ERRORS, strict=True)), *HINTS["unpaired"])
    for mistakes, halves in sorted(_halves(), key=lambda made: len(made[0])):
        if all(_same(((low - high) / 2, (high - low) / 2), (-half, half))
               for (low, high), half in zip(seen, halves, strict=True)):
            wrong(mistakes[0], True, *HINTS[mistakes[0]])
    wrong("other-width", True, "The middle is right, the width is wrong. Which factors has half of the width?",
          "half = stats.t.ppf(0.975, n - 1) * (standard deviation of the differences) / sqrt(n).")


HINTS = {
    "unpaired": ("This interval is as wide as for unpaired runs. Do you subtract for each seed?",
                 "First subtract, for each seed. Then compute the standard deviation of the differences."),
    "variance": ("A variance has the unit squared points.", "Use its square root, the standard deviation."),
    "of-one-run": ("This is the spread of single differences. How much more certain is the mean of n differences?",
                   "Divide the standard deviation by the square root of the number of seeds."),
    "divided-by-n": ("With four times the seeds an interval has half of the width, not a quarter.",
                     "Divide the standard deviation by sqrt(n), not by n."),
    "n-minus-one-twice": ("The standard deviation already contains n - 1.", "Divide it by sqrt(n)."),
    "half-of-half": ("What you add and subtract is half of the width already.", "Do not divide the quantile by 2."),
    "population": ("The interval is too narrow. By what does your standard deviation divide?",
                   "Divide the sum of squares by n - 1: statistics.stdev, or ddof=1 in numpy."),
    "normal": ("With few seeds the standard deviation is uncertain too. Which distribution includes this?",
               "Use Student's t: stats.t.ppf(0.975, n - 1)."),
    "one-sided": ("This excludes 5 % at each end. How many percent does a 95 % interval exclude at each end?",
                  "95 % in the middle exclude 2.5 % at each end: stats.t.ppf(0.975, n - 1)."),
    "degrees": ("The mean of the n differences is computed from them. How many degrees of freedom remain?",
                "n - 1 degrees: stats.t.ppf(0.975, n - 1)."),
    "no-quantile": ("One standard error on each side contains the true value in 68 of 100 experiments.",
                    "Multiply by stats.t.ppf(0.975, n - 1)."),
}  # fmt: skip


def _halves() -> list[tuple[list[str], list[float]]]:
    """Return each product of a spread, a divisor and a quantile, with the mistakes in it, for all pairs."""
    from scipy import stats

    # Half the width is spread / divisor * quantile. An empty name marks the right choice of each factor.
    stdev, pstdev, variance = statistics.stdev, statistics.pstdev, statistics.variance
    spreads = (
        ("", lambda a, b: stdev(_minus(a, b))), ("population", lambda a, b: pstdev(_minus(a, b))),
        ("variance", lambda a, b: variance(_minus(a, b))), ("unpaired", lambda a, b: math.hypot(stdev(a), stdev(b))),
        ("unpaired", lambda a, b: math.hypot(pstdev(a), pstdev(b))), ("unpaired", lambda a, b: stdev(a) + stdev(b)),
    )  # fmt: skip
    divisors = (("", math.sqrt), ("of-one-run", lambda n: 1), ("divided-by-n", lambda n: n),
        ("n-minus-one-twice", lambda n: math.sqrt(n - 1)))
    quantiles = [("", lambda n: stats.t.ppf(0.975, n - 1)), ("one-sided", lambda n: stats.t.ppf(0.95, n - 1))]
    quantiles += [("degrees", lambda n, of=of: stats.t.ppf(0.975, of(n))) for of in (
        lambda n: n, lambda n: n - 2, lambda n: n + 1, lambda n: 2 * n - 2, lambda n: 2 * n - 1)]
    quantiles += [("normal", lambda n, z=z: z) for z in (1.96, stats.norm.ppf(0.975), 2)]
    quantiles += [("one-sided", lambda n: 1.645), ("no-quantile", lambda n: 1)]
    quantiles.append(("half-of-half", lambda n: stats.t.ppf(0.975, n - 1) / 2))
    return [
        ([mistake for mistake, _ in made if mistake],
         [spread(a, b) / divisor(len(a)) * quantile(len(a)) for a, b in ERRORS])
        for made in product(spreads, divisors, quantiles)
        for (_, spread), (_, divisor), (_, quantile) in [made] if any(mistake for mistake, _ in made)
    ]  # fmt: skip


EXERCISES = {"paired-interval": Exercise("paired_interval", observe, judge, needs_ranks=False)}
