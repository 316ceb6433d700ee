"""Plausible wrong answers to lesson 05, and the mistake that the check must recognise in each."""

import math

# fix: warmup_settings(step, warmup_steps, k)


def as_it_was(step, warmup_steps, k):
    """The planted bug: the last step of the line is cut off, for ever."""
    fraction = min(step, warmup_steps - 1) / warmup_steps
    return {"lr": 0.02 + 0.02 * (k - 1) * fraction, "momentum": 0.9}


def begins_at_zero(step, warmup_steps, k):
    return {"lr": 0.02 * k * min(1, step / warmup_steps), "momentum": 0.9}


def goes_on_growing(step, warmup_steps, k):
    return {"lr": 0.02 + 0.02 * (k - 1) * step / warmup_steps, "momentum": 0.9}


def scales_the_momentum(step, warmup_steps, k):
    fraction = min(1, step / warmup_steps)
    return {"lr": 0.02 + 0.02 * (k - 1) * fraction, "momentum": 0.9 * fraction}


def jumps(step, warmup_steps, k):
    """Constant warm-up, which is worse than none."""
    return {"lr": 0.02 if step < warmup_steps else 0.02 * k, "momentum": 0.9}


def one_step_late(step, warmup_steps, k):
    fraction = max(0, min(step - 1, warmup_steps)) / warmup_steps
    return {"lr": 0.02 + 0.02 * (k - 1) * fraction, "momentum": 0.9}


def adds_nesterov(step, warmup_steps, k):
    return {"lr": 0.02 + 0.02 * (k - 1) * min(1, step / warmup_steps), "momentum": 0.9, "nesterov": True}


def rounds_the_settings(step, warmup_steps, k):
    return {"lr": round(0.02 + 0.02 * (k - 1) * min(1, step / warmup_steps), 4), "momentum": 0.9}


def rounds_to_six_digits(step, warmup_steps, k):
    return {"lr": float(f"{0.02 + 0.02 * (k - 1) * min(1, step / warmup_steps):.6f}"), "momentum": 0.9}


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


def never_below_the_rate(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * max(1, ranks * batch / base_batch), step, warmup_steps)


def warms_up_upwards_only(rate, ranks, batch, base_batch, step, warmup_steps):
    """Right at both ends; a rate that has to fall falls all at once."""
    top = rate * ranks * batch / base_batch
    return top if step >= warmup_steps else rate + max(0, top - rate) * step / warmup_steps


def no_warmup_downwards(rate, ranks, batch, base_batch, step, warmup_steps):
    top = rate * ranks * batch / base_batch
    return top if top < rate else warm(rate, top, step, warmup_steps)


def at_most_thirty_times(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * min(32, ranks * batch / base_batch), step, warmup_steps)


def rounds_the_rate(rate, ranks, batch, base_batch, step, warmup_steps):
    return round(warm(rate, rate * ranks * batch / base_batch, step, warmup_steps), 4)


def rounds_to_six_places(rate, ranks, batch, base_batch, step, warmup_steps):
    return round(warm(rate, rate * ranks * batch / base_batch, step, warmup_steps), 6)


def rounds_up(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * math.ceil(ranks * batch / base_batch), step, warmup_steps)


def does_not_scale_without_warmup(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * ranks * batch / base_batch, step, warmup_steps) if warmup_steps else rate


def warms_up_for_a_step_at_least(rate, ranks, batch, base_batch, step, warmup_steps):
    return warm(rate, rate * ranks * batch / base_batch, step, max(1, warmup_steps))


WRONG = {
    "warmup-fix": {
        as_it_was: "never-at-the-top",
        begins_at_zero: "wrong-start",
        goes_on_growing: "keeps-growing",
        scales_the_momentum: "momentum-scaled",
        jumps: "no-straight-line",
        one_step_late: "no-straight-line",
        adds_nesterov: "other-settings",
        rounds_the_settings: "rounded-rate",
        rounds_to_six_digits: "rounded-rate",
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
        never_below_the_rate: "never-smaller",
        warms_up_upwards_only: "no-straight-line",
        no_warmup_downwards: "no-warmup",
        at_most_thirty_times: "other-rate",
        rounds_the_rate: "rounded-rate",
        rounds_to_six_places: "rounded-rate",
        rounds_up: "rounded",
        does_not_scale_without_warmup: "no-top-without-warmup",
        warms_up_for_a_step_at_least: "warmup-of-0-steps",
    },
}
