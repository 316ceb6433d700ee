"""Lesson 11: checks of scaling efficiencies, and of a model of a step, by values in many cases."""

import math

from dtlib.lab.checks.equality import number, rounded
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.theory import collectives, scaling

# Tables of times need not begin at one rank, and 16 ranks may be more than twice as fast as 8.
TIMES = {
    "weak": ({1: 10.0, 4: 11.0, 64: 12.5}, {8: 20.0, 32: 25.0, 512: 32.0}, {2: 12.5, 4: 12.0, 8: 13.0}),
    "strong": ({1: 64.0, 2: 34.0, 4: 20.0, 16: 8.0}, {8: 100.0, 16: 48.0, 64: 20.0}, {3: 9.0, 2: 12.0},
        {4: 20.0, 8: 25.0}),
}
# (ranks, compute in s, count in bytes, latency in s, bandwidth in bytes/s); the fastest algorithm differs.
STEPS = (
    (1, 0.2, 1e8, 1e-5, 1e9), (4, 0.1, 1e8, 1e-5, 1e9), (1024, 0.05, 4e6, 5e-6, 25e9), (64, 1e-4, 1000.0, 5e-6, 25e9),
    (2, 0.0, 4e6, 1e-3, 1e8), (512, 0.3, 1e9, 2e-6, 12.5e9), (4, 0.0, 6.0, 1.0, 0.5),
)
NAMES = ("ranks", "compute", "count", "latency", "bandwidth")
MODELS = ("ring", "recursive_doubling", "rabenseifner")


def own_seconds(seconds: dict[int, float], rank: int, ranks: int) -> dict[int, float]:
    """Return the seconds of one rank; for each ``n`` another rank is the slowest."""
    behind = {n: (rank - n.bit_length()) % ranks * (0.05 + 0.01 * (n % 7)) for n in seconds}
    return {n: took * (1 - behind[n]) for n, took in seconds.items()}


def observe_efficiency(efficiency, comm):
    """Return for each table the efficiency for each number of ranks."""
    seen = []
    for kind, tables in TIMES.items():
        for seconds in tables:
            got = efficiency(comm, own_seconds(seconds, comm.rank, comm.size), kind)
            try:
                seen.append((kind, seconds, {n: float(got[n]) for n in seconds}))
            except (KeyError, TypeError, ValueError, IndexError):
                seen.append((kind, seconds, f"{got!r:.60}"))
    return seen


def judge_efficiency(observations) -> None:
    """Check efficiencies relative to the smallest number of ranks in the table.

    Both kinds are checked: the same work (strong scaling), and the same work per rank (weak scaling).
    """
    for rank, seen in enumerate(observations):
        for kind, seconds, got in seen:
            if isinstance(got, str):
                raise Wrong("type", rank, "a dictionary: the efficiency for each number of ranks", got,
                            "Return {ranks: efficiency, ...}, with the keys of `seconds`.",
                            "return {n: ... for n, took in seconds.items()}")
            strong, weak = (_efficiencies(seconds, of) for of in ("strong", "weak"))
            wanted = strong if kind == "strong" else weak
            _judge_seconds(rank, len(observations), kind, seconds, got, wanted)
            if wrong := [n for n in seconds if not _same(got[n], wanted[n])]:
                digits = all(rounded(got[n], wanted[n]) for n in wrong)
                n = wrong[0]
                _explain_efficiency(rank, kind, seconds, n, wanted[n], got[n], strong[n], weak[n], digits)


def _efficiencies(seconds: dict, kind: str) -> dict[int, float]:
    first = min(seconds)
    return {n: seconds[first] / took * (first / n if kind == "strong" else 1) for n, took in seconds.items()}


def _judge_seconds(rank: int, ranks: int, kind: str, seconds: dict, got: dict, wanted: dict) -> None:
    """Recognise answers that use other seconds than those of the slowest rank.

    The formula may still contain the planted mistake.
    """
    everyones = [own_seconds(seconds, each, ranks) for each in range(ranks)]
    of = {
        "own-seconds": (everyones[rank], "this rank's seconds",
                        "Which rank decides how long a run takes?"),
        "fastest-rank": (_combined(min, everyones), "the fastest rank's seconds",
                         "Does a run end with its first rank?"),
        "sum-of-ranks": (_combined(sum, everyones), "the sum or the mean over all ranks",
                         "all_reduce adds by default. Ranks run at the same time, so which op do you need?"),
    }
    expected = f"efficiencies from the slowest rank's seconds, {kind} scaling"
    for mistake, (other, told, hint) in of.items():
        planted = {n: other[min(other)] / (n * took) for n, took in other.items()}
        for values in (_efficiencies(other, kind), planted):
            differs = any(not _same(values[n], wanted[n]) for n in seconds) and other != seconds
            if differs and all(_same(got[n], values[n]) for n in seconds):
                raise Wrong(mistake, rank, expected, f"from {told} seconds", hint,
                            "dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=comm.group)")


def _combined(how, everyones: list[dict]) -> dict[int, float]:
    return {n: how(each[n] for each in everyones) for n in everyones[0]}


def _explain_efficiency(rank, kind, seconds, n, wanted, got, strong, weak, digits) -> None:
    first = min(seconds)
    expected = f"{wanted:.4g} on {n} ranks, {kind} scaling, with {seconds}"
    other, last = next(iter(seconds)), max(seconds)
    before = max((fewer for fewer in seconds if fewer < n), default=first)

    def from_base(base):
        return seconds[base] / seconds[n] * (base / n if kind == "strong" else 1)

    mistakes = [
        (wanted * 100, "percent", "This is in percent: return fractions."),
        (strong, "strong-for-weak", "In weak scaling the work grows with the ranks. What is the ideal time?"),
        (weak, "weak-for-strong", "In strong scaling the work is constant. What is the ideal time on N ranks?"),
        (strong / first, "one-rank-base",
         f"The table starts at {first} ranks: the ideal on {n} ranks is {n / first:g} times as fast."),
        (from_base(other), "first-key",
         f"{other} ranks come first in this table, but are not the smallest number: use min(seconds)."),
        (from_base(last), "last-key", f"The base is the smallest number of ranks, {first}, not the largest."),
        (seconds[first] / seconds[n] * (n / first if kind == "weak" else 1), "speed-up",
         "This is the speed-up. What is the ratio of this speed-up to the ideal one?"),
        (max(seconds.values()) / seconds[n] * (first / n if kind == "strong" else 1), "longest-time",
         "The base need not have the longest time: more ranks may be slower. Which time is the base?"),
        (min(seconds.values()) / seconds[n] * (first / n if kind == "strong" else 1), "shortest-time",
         "The base need not have the shortest time: in weak scaling more ranks may be faster. Which time is the base?"),
        (from_base(before), "from-the-one-before", f"The base is {first} ranks for the whole table, not {before}."),
        (wanted / first**2, "base-divides", f"Do you divide the base's time by {first}? Its work is n0 * t0."),
        (1 / wanted, "upside-down", "Your value grows when ranks are slower. What do you divide by what?"),
    ]
    if kind == "strong" and n % first:  # a mix-up of weak and strong fails at an earlier table
        hint = f"{n} ranks are {n / first:g} times {first}, which is not a whole number: // cuts it off."
        mistakes.insert(0, (seconds[first] / seconds[n] / (n // first), "whole-multiples", hint))
    if wanted > 1:
        rows(rank, expected)("cut-to-one", _same(got, 1), f"{got:.4g}", "Which line limits your result to 1?",
                             "An efficiency above 1 is possible, for example because of caches: do not limit it.")
    # The first mistake that gives this value is reported, so special cases were put in front.
    wrong = rows(rank, expected)
    for value, mistake, hint in mistakes:
        wrong(mistake, _same(got, value), f"{got:.4g}", hint, _EFFICIENCY)
    if digits:
        raise Wrong("rounded", rank, f"{wanted!r} on {n} ranks, {kind} scaling", f"{got!r}",
                    "The formula is right, but digits are missing. Do you use round(), // or int()?",
                    "Return the exact value. Round only what you print.")
    wrong("other-value", True, f"{got:.4g}", f"What is the ideal time on {n} ranks, if {first} are 100 %?",
          _EFFICIENCY)


_EFFICIENCY = "strong: n0 t0 / (n t); weak: t0 / t; n0 is the smallest number of ranks, t0 its time."


def observe_step(step_seconds, comm):
    """Return the result for each case, a number or text."""
    return [number(step_seconds(**dict(zip(NAMES, case, strict=True)))) for case in STEPS]


def judge_step(observations) -> None:
    """Check that a step takes the compute time plus the fastest of three all-reduce algorithms."""
    for rank, seen in enumerate(observations):
        right = [case[1] + scaling.fastest_all_reduce(case[0], *case[2:])[0] for case in STEPS]
        for case, got, wanted in zip(STEPS, seen, right, strict=True):
            if isinstance(got, str) or not _same(got, wanted):
                words = ", ".join(f"{name}={value:g}" for name, value in zip(NAMES, case, strict=True))
                digits = 6 if isinstance(got, str) or f"{got:.6g}" != f"{wanted:.6g}" else 14
                _explain_step(rank, seen, case, f"{wanted:.{digits}g} s with {words}", got, digits)


def _explain_step(rank, seen, case, expected, got, digits: int) -> None:
    """Find the first mistake that explains the results in all cases with more than one rank."""
    wrong = rows(rank, expected)
    wrong("type", isinstance(got, str), got,
          "Return the seconds of a step: one number.", "Does every branch end with a return?")
    said, several = f"{got:.{digits}g} s", [pair for pair in zip(STEPS, seen, strict=True) if pair[0][0] > 1]
    numbers = all(isinstance(value, float) for value in seen)
    wrong("one-rank",
          case[0] == 1 and all(_same(value, other[1] + _best(other[0], *other[2:])) for other, value in several), said,
          "One rank sends nothing, but it computes. What is its time?", "if ranks == 1: return compute")
    for mistake, (model, *hints) in _MISTAKES.items():
        wrong(mistake, numbers and all(_same(value, model(*other)) for other, value in several), said, *hints)
    for n in range(2, 9):
        on_n = [other[1] + min(_three(n, *other[2:])) for other in STEPS]
        wrong("other-ranks", numbers and all(map(_same, seen, on_n)), f"{said}, as on {n} ranks in every case",
              "Do you use the argument `ranks`, or a variable of this notebook?", "ranks, not world.size")
    wrong("one-rank", case[0] == 1, said, "One rank sends no message. What is its time?", "if ranks == 1: ...")
    wrong("other-value", not numbers, said, "The value is right in some cases, and not a number in others.", _ALL)
    right = [other[1] + _best(other[0], *other[2:]) for other in STEPS]
    same_digits = [all(value == round(wanted, d) for value, wanted in zip(seen, right, strict=True)) for d in range(12)]
    wrong("rounded", any(same_digits) or all(_same(*pair) or rounded(*pair) for pair in zip(seen, right, strict=True)),
          f"{got!r}", "The model is right, but digits are missing. Do you use round()?",
          "Return the exact value: a step of 0.1 ms on 1,024 ranks needs all digits.")
    wrong("other-value", True, said, "Compute by hand the cost of this case with each of the three algorithms.", _ALL)


def _cost(name, n, count, latency, bandwidth):
    return collectives.cost("all_reduce", name, n, count, latency, bandwidth)


def _best(*network):
    return scaling.fastest_all_reduce(*network)[0]


def _three(n, count, a, b, log=math.log2, rounds=None, doubling=None, halving=None):
    """Return the times of the three algorithms; the arguments replace parts of the formulas by mistakes."""
    ring = (2 * (n - 1) if rounds is None else rounds(n)) * (a + count / n / b)
    raben = 2 * log(n) * a + 2 * count * (n - 1) / n / b if halving is None else halving(n, count, a, b)
    return ring, log(n) * (a + count / b) if doubling is None else doubling(n, count, a, b), raben


def _least(**turned):
    return lambda n, t, *network: t + min(_three(n, *network, **turned))


_ALL = "The minimum of: ring 2(N-1)(a + n/(N B)), doubling log2 N (a + n/B), halving 2 log2 N a + 2(N-1)/N n/B."
_HALVING = "2 * log2(ranks) * latency + 2 * count * (ranks - 1) / ranks / bandwidth"
_ADD = "compute + seconds of the all-reduce"
_LOG = "Doubling: 2, 4, 8 ... ranks. Which logarithm counts the rounds?", "log2(ranks), in both formulas"
# Mistake -> (the result that it leads to, hints).
_MISTAKES = {
    "no-compute": (lambda n, t, *network: _best(n, *network), "Where is the time of the computation?", _ADD),
    "overlapped": (lambda n, t, *network: max(t, _best(n, *network)),
        "There is no overlap here: how do the two times combine?", _ADD),
    "compute-shared-out": (lambda n, t, *network: t / n + _best(n, *network),
        "In weak scaling every rank computes for `compute` seconds, with any number of ranks.", _ADD),
    "no-latency": (lambda n, t, count, a, b: t + _best(n, count, 0.0, b),
        "Every round costs the latency, also a short one.", "rounds * latency + bytes / bandwidth"),
    "bandwidth-multiplied": (lambda n, t, count, a, b: t + _best(n, count, a, 1 / b),
                             "bandwidth is in bytes per second: divide by it.",
                             "rounds * latency + bytes / bandwidth"),
    "bits": (lambda n, t, count, a, b: t + _best(n, 8 * count, a, b),
             "count is in bytes, bandwidth in bytes per second. Which factor is wrong?", _ALL),
    **{f"always-{name.replace('_', '-')}": (lambda n, t, *network, name=name: t + _cost(name, n, *network),
        f"Your minimum is always {name}. Are the other two missing, or too expensive? Count their rounds.", _ALL)
        for name in MODELS},
    "among-them": (lambda n, t, *network: min(t, *_three(n, *network)),
        "Computing is not a fourth algorithm: it happens before all three.", _ADD),
    "compute-added-up": (lambda n, t, *network: t * n + _best(n, *network), "All ranks compute at the same time.",
        _ADD),
    "milliseconds": (lambda n, t, *network: 1000 * (t + _best(n, *network)), "These are milliseconds.", "Seconds."),
    "mean-of-three": (lambda n, t, *network: t + sum(_three(n, *network)) / 3, "Only the cheapest runs.",
                      "min(...)"),
    "slowest": (lambda n, t, *network: t + max(_three(n, *network)), "The exercise asks for the cheapest of the three.",
        "min(...)"),
    "all-three": (lambda n, t, *network: t + sum(_three(n, *network)), "Only one algorithm runs, not all three.",
        "min(...)"),
    "without-halving": (lambda n, t, *network: t + min(_cost(m, n, *network) for m in ("ring", "recursive_doubling")),
        "With many ranks and a medium size the third algorithm is cheapest. What does it cost?",
        "Rabenseifner: 2 log2 N rounds, with the bytes of the ring."),
    "without-doubling": (lambda n, t, *network: t + min(_cost(name, n, *network) for name in ("ring", "rabenseifner")),
        "You have two algorithms. For a short message the third is cheapest: it has the fewest rounds.",
        "Recursive doubling: log2 N rounds, each with all the bytes."),
    "whole-array": (lambda n, t, count, a, b: t + 2 * (n - 1) * (a + count / b),
                    "In each step, a ring sends one N-th of the array.", "count / ranks"),
    "whole-bytes": (_least(halving=lambda n, count, a, b: 2 * math.log2(n) * a + 2 * (n - 1) * (count // n) / b),
        "One N-th of the bytes may be a fraction here. Do you use //?", "count / ranks"),
    "half-a-ring": (_least(rounds=lambda n: n - 1),
                    "After N - 1 rounds each rank has one sum of the ring. How do others get it?",
                    "2 * (ranks - 1) rounds"),
    "natural-log": (_least(log=math.log), *_LOG),
    "decimal-log": (_least(log=math.log10), *_LOG),
    "logarithm-of-one": (_least(doubling=lambda n, count, a, b: math.log(n) * (a + count / b)), *_LOG),
    "doubling-latency-once": (_least(doubling=lambda n, count, a, b: a + math.log2(n) * count / b),
        "Each of the log2 N rounds of doubling is a message with its own latency.", "log2(ranks) * (latency + ...)"),
    "doubling-half": (_least(doubling=lambda n, count, a, b: math.log2(n) * (a + count / b / 2)),
        "In recursive doubling partners send each other the whole array.",
        "log2(ranks) * (latency + count / bandwidth)"),
    "halving-own-part": (_least(halving=lambda n, count, a, b: 2 * math.log2(n) * a + 2 * count / b),
        "A rank does not send its own part. Which share of the bytes does it send, and how often?", _HALVING),
    "halving-sends-all": (_least(halving=lambda n, count, a, b: 2 * math.log2(n) * (a + count / b)),
        "Rabenseifner's rounds become smaller: together they send the bytes of the ring.", _HALVING),
    "halving-once": (_least(halving=lambda n, count, a, b: math.log2(n) * a + 2 * count * (n - 1) / n / b),
        "Rabenseifner's algorithm has two phases of log2 N rounds each. How many latencies are these?", _HALVING),
    "halving-half": (_least(halving=lambda n, count, a, b: 2 * math.log2(n) * a + count * (n - 1) / n / b),
        "Rabenseifner's algorithm sends as many bytes as the 2 (N - 1) rounds of the ring.", _HALVING),
    "halving-latency-once": (_least(halving=lambda n, count, a, b: a + 2 * count * (n - 1) / n / b),
        "Each round is a message with its own latency: 2 (N - 1) in the ring, 2 log2 N in Rabenseifner's.", _HALVING),
    "tree": (lambda n, t, *network: t + _cost("tree", n, *network), "A tree sends the whole array in every round.",
        _ALL),
}


def _same(a, b) -> bool:
    return math.isclose(a, b, rel_tol=1e-12)


EXERCISES = {
    "efficiency-fix": Exercise("efficiency", observe_efficiency, judge_efficiency),
    "step-model-build": Exercise("step_seconds", observe_step, judge_step),
}
