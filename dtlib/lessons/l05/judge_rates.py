"""Lesson 05: check of learning rates in many steps, for several lengths of the warm-up."""

import math

from dtlib.lab.checks.exercise import Exercise, Wrong, rows

RATE, MOMENTUM = 0.02, 0.9  # as in the exercise
OURS = ("lr", "momentum")
WARMUPS = ((4, 8), (10, 16), (1, 2), (7, 3))  # (warmup_steps, k); sevenths reveal rounding


def steps_of(warmup_steps: int) -> tuple[int, ...]:
    """Return the steps to test: all of the warm-up, some after it, and a late one."""
    return (*range(warmup_steps + 3), 10 * warmup_steps + 10)


def observe_settings(warmup_settings, comm):
    """Return for each warm-up, step by step, (step, rate, momentum, other settings)."""
    seen = []
    for warmup_steps, k in WARMUPS:
        got = [(step, warmup_settings(step, warmup_steps, k)) for step in steps_of(warmup_steps)]
        seen.append([(step, _number(_get(s, "lr")), _number(_get(s, "momentum")), _others(s)) for step, s in got])
    return seen


def _get(settings, name):
    try:
        return settings[name]
    except (KeyError, TypeError, IndexError):
        return f"{settings!r:.60}"


def _others(settings) -> str:
    """Return the other settings that change how SGD trains, as text; 0 and False are defaults."""
    try:
        return ", ".join(f"{name}={value!r:.20}" for name, value in settings.items() if value and name not in OURS)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ""


def _number(value):
    """Return a float, or text if ``value`` is no number."""
    try:
        if not isinstance(value, (str, bool)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    return f"{value!r:.60}"


def judge_settings(observations) -> None:
    """Check a linear warm-up from ``RATE`` to k times ``RATE``, then a constant rate, and a constant momentum."""
    for rank, seen in enumerate(observations):
        for (warmup_steps, k), series in zip(WARMUPS, seen, strict=True):
            for step, rate, momentum, others in series:
                wrong = rows(rank)
                if isinstance(rate, str) or isinstance(momentum, str):
                    got = rate if isinstance(rate, str) else momentum
                    wrong("type", True, "a dictionary with the numbers lr and momentum", got,
                          'Return {"lr": ..., "momentum": ...}.',
                          "Both values are numbers in every step, also in step 0.")
                wrong("other-settings", others, "only lr and momentum", f"also {others}, in step {step}",
                      "Warm-up changes only the learning rate. Which other setting do you return?",
                      'Return {"lr": ..., "momentum": 0.9}, and nothing else.')
                wrong("momentum-scaled", not math.isclose(momentum, MOMENTUM),
                      f"momentum {MOMENTUM} in step {step}, for k = {k}", f"{momentum:g}",
                      "The rules scale only one of the two settings. Which one?", "Warm-up changes only the rate.")
            _judge_line(rank, warmup_steps, RATE, k * RATE, [(step, rate) for step, rate, *_ in series], f"k = {k}")


def _judge_line(rank, warmup_steps, first, top, series, case) -> None:
    """Check a line from ``first`` in step 0 to ``top`` in step ``warmup_steps``, and a constant rate after it."""
    line = _line(first, top, warmup_steps)
    for step, got in series:
        wanted = line(step)
        if _same(got, wanted):
            continue
        expected = f"{wanted:g} in step {step} of a warm-up of {warmup_steps}, with {case}"
        last = series[-1][1]
        _judge_digits(rank, series, line, expected)
        wrong = rows(rank, expected)
        if step == 0:
            hint = (
                "The rate is 0 in step 0, so this step has no effect. With which rate should it start?"
                if got == 0
                else ("The first rate is the largest. Where is the warm-up?" if _same(got, top) else "Look at step 0.")
            )
            name = "no-warmup" if _same(got, top) else "wrong-start"
            wrong(name, True, f"{got:g}", hint,
                  "Warm-up starts at the small batch's rate: rate + (top - rate) * fraction; fraction is 0 in step 0.")
        wrong("keeps-growing", step >= warmup_steps and last > got and not _same(last, top),
              f"{got:g}, and {last:g} in step {series[-1][0]}",
              "After the warm-up the rate must be constant.", "fraction = min(1, step / warmup_steps)")
        wrong("never-at-the-top", step >= warmup_steps and not _same(last, top),
              f"{got:g}, and {last:g} in step {series[-1][0]}",
              "What is the largest fraction in your schedule, in any step?",
              "In step warmup_steps the fraction is 1: min(1, step / warmup_steps).")
        wrong("no-straight-line", True, f"{got:g}",
              "Both ends may be right. By how much should the rate grow in each step between them?",
              "rate + (top - rate) * step / warmup_steps, until step is warmup_steps.")


def _line(first: float, top: float, warmup_steps: int):
    """Return the function from step to rate."""
    return lambda step: first + (top - first) * min(1.0, step / warmup_steps)


def _judge_digits(rank: int, series, line, expected: str) -> None:
    """Recognise a series that is right, but rounded."""
    both = [(got, line(step)) for step, got in series]
    rounded = any(all(_same(got, round(wanted, digits)) for got, wanted in both) for digits in range(2, 9))
    if rounded or all(math.isclose(got, wanted, rel_tol=5e-3) for got, wanted in both):
        got, wanted = next((got, wanted) for got, wanted in both if not _same(got, wanted))
        raise Wrong(
            "rounded-rate", rank, expected, f"{got:.9g}, not {wanted:.9g}", "This is rounded: return all digits.",
            "Do not round the return value or use a small type such as float16; round only what you print.")


def _same(a, b) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


EXERCISES = {"warmup-fix": Exercise("warmup_settings", observe_settings, judge_settings)}
