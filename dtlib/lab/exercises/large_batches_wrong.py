"""Plausible wrong answers to lesson 05, and the mistake that the check must recognise in each."""

import math

# mend: warmup_settings(step, warmup_steps, k)


def as_it_was(step, warmup_steps, k):
    """The planted bug: the last step of the line is cut off, for ever."""
    share = min(step, warmup_steps - 1) / warmup_steps
    return {"lr": 0.02 + 0.02 * (k - 1) * share, "momentum": 0.9}


def begins_at_zero(step, warmup_steps, k):
    return {"lr": 0.02 * k * min(1, step / warmup_steps), "momentum": 0.9}


def goes_on_growing(step, warmup_steps, k):
    return {"lr": 0.02 + 0.02 * (k - 1) * step / warmup_steps, "momentum": 0.9}


def scales_the_momentum(step, warmup_steps, k):
    share = min(1, step / warmup_steps)
    return {"lr": 0.02 + 0.02 * (k - 1) * share, "momentum": 0.9 * share}


def jumps(step, warmup_steps, k):
    """Constant warm-up, which is worse than none."""
    return {"lr": 0.02 if step < warmup_steps else 0.02 * k, "momentum": 0.9}


def one_step_late(step, warmup_steps, k):
    share = max(0, min(step - 1, warmup_steps)) / warmup_steps
    return {"lr": 0.02 + 0.02 * (k - 1) * share, "momentum": 0.9}


# build: scaled_rate(rate, ranks, batch, base_batch, step, warmup_steps)


def warm(rate, top, step, warmup_steps):
    return rate + (top - rate) * (min(1, step / warmup_steps) if warmup_steps else 1)


def by_square_root(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * math.sqrt(ranks * batch / base_batch), step, warmup_steps)


def does_not_scale(rate, ranks, batch, base_batch, step, warmup_steps):
    return rate


def counts_ranks_alone(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * ranks, step, warmup_steps)


def forgets_the_ranks(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * batch / base_batch, step, warmup_steps)


def divides(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * base_batch / (ranks * batch), step, warmup_steps)


def whole_numbers_only(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * (ranks * batch // base_batch), step, warmup_steps)


def without_warmup(rate, ranks, batch, base_batch, step, warmup_steps):
    return rate * ranks * batch / base_batch


def warms_up_from_zero(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(0.0, rate * ranks * batch / base_batch, step, warmup_steps)


def never_stops(rate, ranks, batch, base_batch, step, warmup_steps):
    top = rate * ranks * batch / base_batch
    return rate + (top - rate) * step / max(1, warmup_steps)


def cannot_do_without_warmup(rate, ranks, batch, base_batch, step, warmup_steps):
    return rate + (rate * ranks * batch / base_batch - rate) * min(1, step / warmup_steps)


def constant_warmup(rate, ranks, batch, base_batch, step, warmup_steps):
    return rate if step < warmup_steps else rate * ranks * batch / base_batch


WRONG = {
    "warmup-mend": {
        as_it_was: "never-at-the-top",
        begins_at_zero: "wrong-start",
        goes_on_growing: "keeps-growing",
        scales_the_momentum: "momentum-scaled",
        jumps: "no-straight-line",
        one_step_late: "no-straight-line",
    },
    "scale-the-rate": {
        by_square_root: "square-root",
        does_not_scale: "no-scaling",
        counts_ranks_alone: "ranks-alone",
        forgets_the_ranks: "one-rank",
        divides: "upside-down",
        whole_numbers_only: "rounded",
        without_warmup: "no-warmup",
        warms_up_from_zero: "wrong-start",
        never_stops: "keeps-growing",
        cannot_do_without_warmup: "raised",
        constant_warmup: "no-straight-line",
    },
}
