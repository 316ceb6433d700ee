"""Lesson 05: learning rates, judged by their values in many steps and for many sizes."""

import math

from dtlib.lab.checks.exercise import Exercise, Wrong, rows

RATE, MOMENTUM = 0.02, 0.9  # of the fix
OURS = ("lr", "momentum")
NO_NUMBER = ("Return the rate itself.", "Every way through the function must end in a return with a number.")
WARMUPS = ((4, 8), (10, 16), (1, 2), (7, 3))  # warmup_steps, k: sevenths show what is rounded

# rate, ranks, batch (of a rank), base_batch, warmup_steps
# The first and the fourth case tell the mistakes apart: no two give the same rate. In the last one k is less than 1.
SCALES = (
    (0.02, 4, 60, 16, 8), (0.1, 32, 8, 256, 10), (0.1, 256, 64, 256, 5), (0.3, 5, 10, 20, 6), (0.2, 2, 16, 16, 0),
    (0.013, 3, 7, 32, 6),
)


def steps_of(warmup_steps: int) -> tuple[int, ...]:
    return (*range(warmup_steps + 3), 10 * warmup_steps + 10)


def observe_settings(warmup_settings, comm):
    """For each warm-up: (step, rate, momentum, what else was set), step by step."""
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
    """Settings beside the two that change how SGD trains: those that say 0 or False do not."""
    try:
        return ", ".join(f"{name}={value!r:.20}" for name, value in settings.items() if value and name not in OURS)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ""


def _number(value):
    """A float, or text where it is none."""
    try:
        if not isinstance(value, (str, bool)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    return f"{value!r:.60}"


def judge_settings(observations) -> None:
    """From ``RATE`` to k times as much in a straight line, then constant; the momentum stays as it is."""
    for rank, seen in enumerate(observations):
        for (warmup_steps, k), series in zip(WARMUPS, seen, strict=True):
            for step, rate, momentum, others in series:
                wrong = rows(rank)
                if isinstance(rate, str) or isinstance(momentum, str):
                    got = rate if isinstance(rate, str) else momentum
                    wrong("type", True, "a dictionary with the numbers lr and momentum", got,
                          'Return {"lr": ..., "momentum": ...}.', "Both are numbers in every step, also in step 0.")
                wrong("other-settings", others, "lr and momentum alone", f"{others} beside them, in step {step}",
                      "Warm-up is of the rate: every other setting stays as SGD has it.",
                      'Return {"lr": ..., "momentum": 0.9}, and nothing else.')
                wrong("momentum-scaled", not math.isclose(momentum, MOMENTUM),
                      f"momentum {MOMENTUM} in step {step}, for k = {k}", f"{momentum:g}",
                      "The rules scale one of the two settings.", "Leave the momentum alone: warm-up is of the rate.")
            _judge_line(rank, warmup_steps, RATE, k * RATE, [(step, rate) for step, rate, *_ in series], f"k = {k}")


def observe_scaled(scaled_rate, comm):
    """For each case: (step, rate)."""
    seen = []
    for rate, ranks, batch, base_batch, warmup_steps in SCALES:
        arguments = {"ranks": ranks, "batch": batch, "base_batch": base_batch, "warmup_steps": warmup_steps}
        try:
            seen.append([(s, _number(scaled_rate(rate=rate, step=s, **arguments))) for s in steps_of(warmup_steps)])
        except Exception as error:
            error.add_note(f"with {_in_words(rate, ranks, batch, base_batch, warmup_steps)}")
            raise
    return seen


def judge_scaled(observations) -> None:
    """The linear rule for the batch of all ranks, reached by gradual warm-up."""
    for rank, seen in enumerate(observations):
        for case, series in zip(SCALES, seen, strict=True):
            for step, got in series:
                if isinstance(got, str):
                    raise Wrong("type", rank, f"a rate for step {step}: a number", got, *NO_NUMBER)
            _judge_top(rank, case, series)
        for case, series in zip(SCALES, seen, strict=True):
            rate, ranks, batch, base_batch, warmup_steps = case
            top = rate * ranks * batch / base_batch
            _judge_line(rank, warmup_steps, rate, top, series, _in_words(*case))


def _in_words(rate, ranks, batch, base_batch, warmup_steps) -> str:
    return f"rate={rate}, ranks={ranks}, batch={batch}, base_batch={base_batch}, warmup_steps={warmup_steps}"


def _judge_top(rank, case, series) -> None:
    """The rate long after the warm-up tells which rule it is."""
    rate, ranks, batch, base_batch, warmup_steps = case
    k = ranks * batch / base_batch
    step, got = series[-1]
    expected = f"{rate * k:g} in step {step}, long after the warm-up, with {_in_words(*case)}"
    if _same(got, rate * k):
        return
    wrong = rows(rank, expected)
    wrong("never-smaller", k < 1 and _same(got, rate), f"{got:g}, the rate as it was",
          f"The batch is smaller than base_batch here: k = {k:g}. The rule goes both ways.",
          "No max, no if: the top is k * rate for any k.")
    wrong("no-top-without-warmup", not warmup_steps and _same(got, rate), f"{got:g}, the rate as it was",
          "warmup_steps=0 means that the rate is at its top from step 0 on.", "if step >= warmup_steps: return top")
    mistakes = [
        (rate * math.sqrt(k), "square-root", "This is the square-root rule; the linear one is asked for.",
         "k times the batch, k times the rate."),
        (rate, "no-scaling", "The rate is as it was.",
         "The batch of all ranks is ranks * batch: how many times base_batch?"),
        (rate * ranks, "ranks-alone",
         "This is as many times the rate as there are ranks: is batch the same as base_batch?",
         "k = ranks * batch / base_batch."),
        (rate * batch / base_batch, "one-rank", "The batch of one rank alone is counted.",
         "The gradient is a mean over all ranks: the batch is ranks * batch."),
        (rate / k, "upside-down", "A larger batch gets a larger rate.", "k = ranks * batch / base_batch."),
        (rate * int(k), "rounded", "k need not be a whole number.", "Divide with /, not with //."),
        (rate * math.ceil(k), "rounded", "k need not be a whole number.", "Divide, and round nothing."),
        (rate * ranks * batch // base_batch, "rounded", "// rounds down, here the rate itself.", "Divide with /."),
    ]
    for value, mistake, *hints in mistakes:
        wrong(mistake, _same(got, value), f"{got:g}", *hints)
    _judge_digits(rank, series, _line(rate, rate * k, warmup_steps), expected)
    previous = series[-2][1]
    wrong("keeps-growing", got > previous, f"{got:g}, and {previous:g} in step {series[-2][0]}",
          "After the warm-up the rate is constant.", "fraction = min(1, step / warmup_steps)")
    wrong("other-rate", True, f"{got:g}", "k = ranks * batch / base_batch; the top is k * rate.",
          "Call it in a cell of its own with these values, and look at a late step.")


def _judge_line(rank, warmup_steps, first, top, series, case) -> None:
    """A straight line from ``first`` in step 0 to ``top`` in step ``warmup_steps``, then constant."""
    line = _line(first, top, warmup_steps)
    for step, got in series:
        wanted = line(step)
        if _same(got, wanted):
            continue
        expected = f"{wanted:g} in step {step} of a warm-up of {warmup_steps}, with {case}"
        last = series[-1][1]
        _judge_digits(rank, series, line, expected)
        wrong = rows(rank, expected)
        wrong("warmup-of-0-steps", not warmup_steps, f"{got:g}",
              "Without warm-up step 0 has the top already.", "if step >= warmup_steps: return top")
        if step == 0:
            hint = (
                "It begins at 0, and a step with rate 0 does nothing."
                if got == 0
                else ("It begins at the top: where is the warm-up?" if _same(got, top) else "Look at step 0.")
            )
            name = "no-warmup" if _same(got, top) else "wrong-start"
            wrong(name, True, f"{got:g}", hint,
                  "Warm-up begins at the small batch's rate: rate + (top - rate) * fraction; fraction is 0 in step 0.")
        wrong("keeps-growing", step >= warmup_steps and last > got and not _same(last, top),
              f"{got:g}, and {last:g} in step {series[-1][0]}",
              "After the warm-up the rate is constant.", "fraction = min(1, step / warmup_steps)")
        wrong("never-at-the-top", step >= warmup_steps and not _same(last, top),
              f"{got:g}, and {last:g} in step {series[-1][0]}",
              "Which is the largest fraction that comes out, in any step?",
              "In step warmup_steps the fraction is 1: min(1, step / warmup_steps).")
        wrong("no-straight-line", True, f"{got:g}",
              "Both ends may be right; in between the rate grows by the same amount in each step.",
              "rate + (top - rate) * step / warmup_steps, until step is warmup_steps.")


def _line(first: float, top: float, warmup_steps: int):
    """The rate of a step."""
    return lambda step: first + (top - first) * (min(1.0, step / warmup_steps) if warmup_steps else 1.0)


def _judge_digits(rank: int, series, line, expected: str) -> None:
    """Is the whole series right but for its digits?"""
    both = [(got, line(step)) for step, got in series]
    rounded = any(all(_same(got, round(wanted, digits)) for got, wanted in both) for digits in range(2, 9))
    if rounded or all(math.isclose(got, wanted, rel_tol=5e-3) for got, wanted in both):
        got, wanted = next((got, wanted) for got, wanted in both if not _same(got, wanted))
        raise Wrong(
            "rounded-rate", rank, expected, f"{got:.9g}, not {wanted:.9g}", "This is rounded: return all digits.",
            "No round() in what is returned, and no type with few digits, such as float16; round where you print.")


def _same(a, b) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


EXERCISES = {
    "warmup-fix": Exercise("warmup_settings", observe_settings, judge_settings),
    "scale-the-rate": Exercise("scaled_rate", observe_scaled, judge_scaled),
}
