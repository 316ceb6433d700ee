"""Plausible wrong answers to lesson 05, and the mistake that the check must recognise in each."""

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


def no_warmup(step, warmup_steps, k):
    return {"lr": 0.02 * k, "momentum": 0.9}


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
        no_warmup: "no-warmup",
    },
}
