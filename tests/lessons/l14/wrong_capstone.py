"""Plausible wrong answers to lesson 14, and the mistake that the check must recognise in each."""

from dtlib.lessons.l14.judge_capstone import SECONDS, seconds_of

# fix: held(parameters, data, tensor, pipe, zero)


def over_all_ranks(parameters, data, tensor, pipe, zero):
    """The planted bug: ZeRO shares out over ranks that have other parameters."""
    ranks = data * tensor * pipe
    own = parameters / (tensor * pipe)
    states = 8 * own / (ranks if zero >= 1 else 1)
    gradients = 4 * own / (ranks if zero >= 2 else 1)
    return 4 * own / (ranks if zero >= 3 else 1) + gradients + states


def of_the_whole_model(parameters, data, tensor, pipe, zero):
    return _zero(parameters, data, zero)


def of_the_whole_model_on_all_ranks(parameters, data, tensor, pipe, zero):
    return _zero(parameters, data * tensor * pipe, zero)


def a_stage_late(parameters, data, tensor, pipe, zero):
    return _zero(parameters / (tensor * pipe), data, zero - 1)


def cut_twice(parameters, data, tensor, pipe, zero):
    own = parameters / (tensor * pipe)
    return _zero(own / (tensor * pipe), data, zero)


def without_zero(parameters, data, tensor, pipe, zero):
    return 16 * parameters / (tensor * pipe)


def a_stage_early(parameters, data, tensor, pipe, zero):
    return _zero(parameters / (tensor * pipe), data, zero + 1)


def tensor_alone_cuts(parameters, data, tensor, pipe, zero):
    return _zero(parameters / tensor, data, zero)


def gradients_from_stage_1(parameters, data, tensor, pipe, zero):
    own = parameters / (tensor * pipe)
    return _zero(own, data, zero, (4, 0, 12))


def half_the_states(parameters, data, tensor, pipe, zero):
    return _zero(parameters / (tensor * pipe), data, zero, (4, 4, 4))


def in_mixed_precision(parameters, data, tensor, pipe, zero):
    return _zero(parameters / (tensor * pipe), data, zero, (2, 2, 12))


def in_elements(parameters, data, tensor, pipe, zero):
    return _zero(parameters / (tensor * pipe), data, zero) / 4


def says_it_in_words(parameters, data, tensor, pipe, zero):
    return f"{parameters} parameters"


def _zero(own, data, zero, parts=(4, 4, 8)):
    return sum(size * own / (data if zero >= stage else 1) for size, stage in zip(parts, (3, 2, 1), strict=True))


# build: choose(plans, limit, sample, latency, bandwidth)


def fitting_of(plans, limit):
    return [name for name, plan in plans.items() if plan["held"] <= limit]


def with_a_mistake(mistake):
    def choose(plans, limit, sample, latency, bandwidth):
        key = lambda name: seconds_of(plans[name], sample, latency, bandwidth, mistake)  # noqa: E731
        return min(fitting_of(plans, limit), key=key, default=None)

    return choose


def fastest_of_all(plans, limit, sample, latency, bandwidth):
    return min(plans, key=lambda name: seconds_of(plans[name], sample, latency, bandwidth))


def fastest_or_the_first(plans, limit, sample, latency, bandwidth):
    key = lambda name: seconds_of(plans[name], sample, latency, bandwidth)  # noqa: E731
    return min(fitting_of(plans, limit) or plans, key=key)


def strictly_below(plans, limit, sample, latency, bandwidth):
    fitting = [name for name, plan in plans.items() if plan["held"] < limit]
    return min(fitting, key=lambda name: seconds_of(plans[name], sample, latency, bandwidth), default=None)


def slowest(plans, limit, sample, latency, bandwidth):
    key = lambda name: seconds_of(plans[name], sample, latency, bandwidth)  # noqa: E731
    return max(fitting_of(plans, limit), key=key, default=None)


def starts_at_a_number(plans, limit, sample, latency, bandwidth):
    """No step of a class takes as long."""
    best, shortest = None, 100.0
    for name in fitting_of(plans, limit):
        took = seconds_of(plans[name], sample, latency, bandwidth)
        if took < shortest:
            best, shortest = name, took
    return best


def gives_the_plan(plans, limit, sample, latency, bandwidth):
    key = lambda name: seconds_of(plans[name], sample, latency, bandwidth)  # noqa: E731
    name = min(fitting_of(plans, limit), key=key, default=None)
    return plans.get(name)


def nothing_yet(plans, limit, sample, latency, bandwidth):
    return None


def two_mistakes(plans, limit, sample, latency, bandwidth):
    """No bubble, and strictly below the limit: first the plan at the limit is missing."""
    fitting = [name for name, plan in plans.items() if plan["held"] < limit]
    key = lambda name: seconds_of(plans[name], sample, latency, bandwidth, "no-bubble")  # noqa: E731
    return min(fitting, key=key, default=None)


def fastest_if_it_fits(plans, limit, sample, latency, bandwidth):
    name = fastest_of_all(plans, limit, sample, latency, bandwidth)
    return name if plans[name]["held"] <= limit else None


def first_that_fits(plans, limit, sample, latency, bandwidth):
    return next(iter(fitting_of(plans, limit)), None)


def hidden_behind_computing(plans, limit, sample, latency, bandwidth):
    def key(name):
        computing = seconds_of(plans[name], sample, latency, bandwidth, "compute-alone")
        return max(computing, seconds_of(plans[name], sample, latency, bandwidth) - computing)

    return min(fitting_of(plans, limit), key=key, default=None)


def smallest(plans, limit, sample, latency, bandwidth):
    return min(fitting_of(plans, limit), key=lambda name: plans[name]["held"], default=None)


# race: my_plan()


def the_stub():
    return {"data": 4, "zero": 3, "micro_batch": 4}


def zero_2():
    return {"data": 4, "zero": 2, "micro_batch": 4}


def tensor_first():
    return {"tensor": 4, "micro_batch": 16}


def for_eight():
    return {"data": 8, "zero": 3, "micro_batch": 2}


def another_batch():
    return {"data": 2, "pipe": 2, "zero": 1, "batch": 4, "micro_batch": 1}


def three_stages():
    return {"pipe": 3, "micro_batch": 4}


def zero_3_in_stages():
    return {"data": 2, "pipe": 2, "zero": 3, "micro_batch": 2}


def in_deepspeeds_words():
    return {"stages": 4, "micro_batch": 4}


def with_a_slip():
    return {"pipe": 4, "microbatch": 4}


def a_plan_in_words():
    return "pipe 4"


def zero_as_text():
    return {"data": 4, "zero": "1", "micro_batch": 4}


def smaller_batch():
    return {"pipe": 4, "batch": 8, "micro_batch": 2}


WRONG = {
    "held-fix": {
        over_all_ranks: "over-all-ranks",
        of_the_whole_model: "whole-model",
        of_the_whole_model_on_all_ranks: "whole-model",
        a_stage_late: "one-stage-off",
        cut_twice: "twice-cut",
        without_zero: "not-shared",
        a_stage_early: "one-stage-off",
        tensor_alone_cuts: "one-axis-cuts",
        gradients_from_stage_1: "other-stages",
        half_the_states: "one-state",
        in_mixed_precision: "mixed-precision",
        in_elements: "other-bytes",
        says_it_in_words: "type",
    },
    "choose-build": {
        fastest_of_all: "ignores-the-limit",
        fastest_or_the_first: "always-chooses",
        strictly_below: "below-the-limit",
        slowest: "slowest",
        starts_at_a_number: "starts-at-a-number",
        gives_the_plan: "type",
        nothing_yet: "never-chooses",
        smallest: "smallest",
        fastest_if_it_fits: "looks-afterwards",
        first_that_fits: "the-first",
        hidden_behind_computing: "overlapped",
        two_mistakes: "other-choice",
    },
    "capstone-race": {
        the_stub: ("over-par", 4),
        zero_2: ("over-the-limit", 4),
        tensor_first: ("over-par", 4),
        for_eight: "other-task",
        another_batch: ("other-task", 4),
        three_stages: "cannot-be",
        zero_3_in_stages: "cannot-be",
        in_deepspeeds_words: "cannot-be",
        with_a_slip: "cannot-be",
        a_plan_in_words: "type",
        zero_as_text: "cannot-be",
        smaller_batch: ("other-task", 4),
    },
}
NAMED = {"choose-build": {mistake: (with_a_mistake(mistake), mistake) for mistake in SECONDS if mistake}}
