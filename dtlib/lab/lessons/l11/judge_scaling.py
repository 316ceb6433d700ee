"""Lesson 11: efficiencies of scaling, and a model of a step, judged by their values in many cases."""

import math

from dtlib.lab.checks.exercise import Exercise, Wrong
from dtlib.theory import collectives, scaling

# Times as tables give them: the first does not always begin at one rank.
TIMES = {
    "weak": ({1: 10.0, 4: 11.0, 64: 12.5}, {8: 20.0, 32: 25.0, 512: 32.0}),
    "strong": ({1: 64.0, 2: 34.0, 4: 20.0, 16: 8.0}, {8: 100.0, 16: 60.0, 64: 20.0}, {3: 9.0, 2: 12.0}),
}
# ranks, compute (s), count (bytes), latency (s), bandwidth (bytes a second); what is cheapest differs
STEPS = (
    (1, 0.2, 1e8, 1e-5, 1e9), (4, 0.1, 1e8, 1e-5, 1e9), (1024, 0.05, 4e6, 5e-6, 25e9), (64, 1e-4, 1000.0, 5e-6, 25e9),
    (2, 0.0, 4e6, 1e-3, 1e8), (512, 0.3, 1e9, 2e-6, 12.5e9),
)  # fmt: skip
NAMES = ("ranks", "compute", "count", "latency", "bandwidth")
MODELS = ("ring", "recursive_doubling", "rabenseifner")


def observe_efficiency(efficiency, comm):
    """For each table: what came for each number of ranks."""
    seen = []
    for kind, tables in TIMES.items():
        for seconds in tables:
            came = efficiency(dict(seconds), kind)
            try:
                seen.append((kind, seconds, {n: float(came[n]) for n in seconds}))
            except (KeyError, TypeError, ValueError, IndexError):
                seen.append((kind, seconds, f"{came!r:.60}"))
    return seen


def judge_efficiency(observations) -> None:
    """Of the smallest number of ranks there is; of the same work, or of as much work a rank."""
    for rank, seen in enumerate(observations):
        for kind, seconds, came in seen:
            if isinstance(came, str):
                raise Wrong(
                    "type", rank, "a dictionary: for each number of ranks its efficiency", came,
                    "Return {ranks: efficiency, ...}, with the keys of `seconds`.",
                )  # fmt: skip
            first = min(seconds)
            for n, took in seconds.items():
                strong = first * seconds[first] / (n * took)
                weak = seconds[first] / took
                wanted = strong if kind == "strong" else weak
                if not _same(came[n], wanted):
                    _explain_efficiency(rank, kind, seconds, n, wanted, came[n], strong, weak)


def _explain_efficiency(rank, kind, seconds, n, wanted, came, strong, weak) -> None:
    first = min(seconds)
    expected = f"{wanted:.4g} on {n} ranks, {kind} scaling, with {seconds}"
    mistakes = [
        (wanted * 100, "percent", "This is in %: return fractions."),
        (strong, "strong-for-weak", "In weak scaling the work grows with the ranks: the ideal is the same time."),
        (weak, "weak-for-strong", "In strong scaling the ideal is a time N times as short."),
        (strong / first, "one-rank-base",
         f"The table begins at {first} ranks: the ideal on {n} is {n / first:g} times as fast as there."),
        (seconds[first] / seconds[n] * (n / first if kind == "weak" else 1), "speed-up",
         "This is the speed-up: efficiency is what it is of the ideal."),
        (1 / wanted, "upside-down", "Efficiency falls as ranks are added."),
    ]  # fmt: skip
    for value, mistake, hint in mistakes:
        if _same(came, value):
            raise Wrong(mistake, rank, expected, f"{came:.4g}", hint, "strong: n0 t0 / (n t); weak: t0 / t.")
    if _same(came * seconds[next(iter(seconds))], wanted * seconds[first]) or next(iter(seconds)) != first:
        raise Wrong(
            "first-key", rank, expected, f"{came:.4g}", 
            "Tables need not be in order: which number of ranks is smallest?", "min(seconds)",
        )  # fmt: skip
    raise Wrong(
        "other-value", rank, expected, f"{came:.4g}", "strong: n0 t0 / (n t); weak: t0 / t; n0 is the smallest number."
    )


def observe_step(step_seconds, comm):
    """For each case: what came, a number or text."""
    seen = []
    for case in STEPS:
        came = step_seconds(**dict(zip(NAMES, case, strict=True)))
        try:
            seen.append(float(came))
        except (TypeError, ValueError):
            seen.append(f"{came!r:.60}")
    return seen


def judge_step(observations) -> None:
    """Compute, and the cheapest of the three algorithms."""
    for rank, seen in enumerate(observations):
        right = [case[1] + scaling.fastest_all_reduce(case[0], *case[2:])[0] for case in STEPS]
        for case, came, wanted in zip(STEPS, seen, right, strict=True):
            if isinstance(came, str) or not _same(came, wanted):
                words = ", ".join(f"{name}={value:g}" for name, value in zip(NAMES, case, strict=True))
                _explain_step(rank, seen, case, f"{wanted:.6g} s with {words}", came)


def _explain_step(rank, seen, case, expected, came) -> None:
    """The first mistake that explains what came in every case with more than one rank."""
    if isinstance(came, str):
        raise Wrong("type", rank, expected, came, "Return the seconds of a step: one number.")
    said, several = f"{came:.6g} s", [pair for pair in zip(STEPS, seen, strict=True) if pair[0][0] > 1]
    numbers = all(isinstance(value, float) for value in seen)
    for mistake, (model, *hints) in _MISTAKES.items():
        if numbers and all(_same(value, model(*other)) for other, value in several):
            raise Wrong(mistake, rank, expected, said, *hints)
    if case[0] == 1:
        raise Wrong("one-rank", rank, expected, said, "One rank has nobody to send to.", "if ranks == 1: ...")
    raise Wrong("other-value", rank, expected, said, "Work out by hand what this costs with each of the three.", _ALL)


def _cost(name, n, count, latency, bandwidth):
    return collectives.cost("all_reduce", name, n, count, latency, bandwidth)


def _best(*network):
    return scaling.fastest_all_reduce(*network)[0]


_ALL = "The least of: ring 2(N-1)(a + n/(N B)), doubling log2 N (a + n/B), halving 2 log2 N a + 2(N-1)/N n/B."
# What somebody computed who made this mistake, and hints.
_MISTAKES = {
    "no-compute": (
        lambda n, t, *network: _best(n, *network), "Where is the computing?", "compute + seconds of the all-reduce",
    ),
    "overlapped": (
        lambda n, t, *network: max(t, _best(n, *network)), "Nothing is hidden here: the two follow one another.",
        "compute + seconds of the all-reduce",
    ),
    "no-latency": (
        lambda n, t, count, a, b: t + _best(n, count, 0.0, b), "Every round costs the latency, however short it is.",
        "rounds * latency + bytes / bandwidth",
    ),
    **{
        f"always-{name.replace('_', '-')}": (
            lambda n, t, *network, name=name: t + _cost(name, n, *network),
            f"{name} is not always the cheapest: which one is it here?", _ALL,
        )
        for name in MODELS
    },
    "without-halving": (
        lambda n, t, *network: t + min(_cost(name, n, *network) for name in ("ring", "recursive_doubling")),
        "Two are there; with many ranks and a middling size the third one wins.",
        "Rabenseifner: 2 log2 N rounds, the ring's bytes.",
    ),
    "whole-array": (
        lambda n, t, count, a, b: t + 2 * (n - 1) * (a + count / b), "A step of the ring sends an N-th of the array.",
        "count / ranks",
    ),
    "tree": (
        lambda n, t, *network: t + _cost("tree", n, *network), "A tree moves the whole array in every round.", _ALL,
    ),
}  # fmt: skip


def _same(a, b) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


EXERCISES = {
    "efficiency-mend": Exercise("efficiency", observe_efficiency, judge_efficiency),
    "step-model-build": Exercise("step_seconds", observe_step, judge_step),
}
