"""Lesson 14: checks of a memory formula, and of the choice of a mesh, by values in many cases."""

import random

from dtlib.lab.checks.equality import number
from dtlib.lab.checks.exercise import Exercise, Wrong, rows

# (parameters, data, tensor, pipe, zero)
CASES = tuple(
    (parameters, *axes, zero)
    for parameters, axes in ((1_048_576, (4, 1, 1)), (1_048_576, (2, 2, 1)), (4096, (4, 1, 2)), (65_536, (2, 4, 8)))
    for zero in range(4)
)


def right_held(
    parameters, data, tensor, pipe, zero, own=lambda n, t, p: n / (t * p), ranks=lambda d, t, p: d, parts=(4, 4, 8),
    shared_from=(3, 2, 1),
) -> float:
    """Return bytes of parameters, gradients and states; the last four arguments can plant mistakes."""
    each, among = own(parameters, tensor, pipe), ranks(data, tensor, pipe)
    return sum(size * each / (among if zero >= stage else 1) for size, stage in zip(parts, shared_from, strict=True))


def observe_held(held, comm):
    """Return the result for each case."""
    return [number(held(*case)) for case in CASES]


def judge_held(observations) -> None:
    """Check the bytes in each case."""
    seen = observations[0]
    at = next((at for at, case in enumerate(CASES) if not _close(seen[at], right_held(*case))), None)
    if at is None:
        return
    parameters, data, tensor, pipe, zero = CASES[at]
    mesh = f"{parameters:,} parameters, data {data}, tensor {tensor}, pipe {pipe}, ZeRO-{zero}"
    what, got = f"{right_held(*CASES[at]):,.0f} bytes: {mesh}", seen[at]
    wrong = rows(None, what)
    wrong("type", isinstance(got, str), got, "Return a number of bytes.")
    for mistake, (mistaken, *hints) in OTHERS.items():
        for one in mistaken:
            wrong(mistake, all(_close(each, right_held(*case, **one)) for each, case in zip(seen, CASES, strict=True)),
                  f"{got:,.0f}", *hints)
    own = parameters / (tensor * pipe)
    raise Wrong("other-bytes", None,
                f"{what}; {right_held(*CASES[at]) / own:.4g} for each of this rank's {own:,.0f} parameters",
                f"{got:,.0f}; {got / own:.4g} for each",
                "Which parts are sharded here, and among how many ranks?" if zero else
                "ZeRO-0 shards nothing. How many bytes of gradients and states does each parameter need?",
                "4 bytes of parameters, 4 of gradients, 8 of states. Divide each by data, from its stage on.")


def _close(got, wanted: float) -> bool:
    return not isinstance(got, str) and abs(got - wanted) <= 1e-6 * wanted


_STAGES = "From stage 1 on shard states, from 2 on gradients, from 3 on parameters."
_OWN = "own = parameters / (tensor * pipe)"
# Mistake -> (variants of wrong arguments, hints).
OTHERS = {
    "over-all-ranks": ([{"ranks": ranks} for ranks in (
            lambda d, t, p: d * t * p, lambda d, t, p: d * t, lambda d, t, p: d * p, lambda d, t, p: t * p)],
        "Which ranks have the same parameters, so that ZeRO can shard them?",
        "ZeRO shards only over the data axis: divide by data."),
    "whole-model": ([{"own": lambda n, t, p: n}, {"own": lambda n, t, p: n, "ranks": lambda d, t, p: d * t * p}],
        "Which part of the model does a rank have, before ZeRO?", _OWN),
    "one-axis-cuts": ([{"own": lambda n, t, p: n / t}, {"own": lambda n, t, p: n / p}],
        "Tensor ranks cut each layer, stages divide the layers. What remains on a rank with both axes?", _OWN),
    "twice-cut": ([{"own": lambda n, t, p: n / (t * p) ** 2}],
                  "The parameters are divided twice. Which line divides again?", "own is already this rank's part."),
    "not-shared": ([{"ranks": lambda d, t, p: 1}], "Which stage shards which states?", _STAGES),
    "one-stage-off": ([{"shared_from": (2, 1, 0)}, {"shared_from": (4, 3, 2)}],
        "Which stage shards the optimizer states: 0, 1 or 2?", _STAGES),
    "other-stages": ([{"shared_from": (a, b, c)} for a in (1, 2, 3) for b in (1, 2, 3) for c in (1, 2, 3)],
        "Each stage shards one more thing. Which part does this stage not shard?", _STAGES),
    "mixed-precision": ([{"parts": (2, 2, 12)}], "These are the bytes of mixed precision. What does float32 need?",
        "In float32: 4, 4, and 8 for Adam's two states."),
    "one-state": ([{"parts": (4, 4, 4)}], "12 bytes for each parameter: how many states does Adam have?", "8 * own"),
}


# Choosing


def _plan(*values) -> dict:
    names = "held", "samples", "micro_batches", "stages", "tensor", "messages", "sent"
    return dict(zip(names, values, strict=True))


_PLANS = {
    "data": _plan(16e6, 4, 1, 1, 1, 6, 1e6),
    "sharded": _plan(4e6, 4, 1, 1, 1, 54, 8e6),
    "stages": _plan(4e6, 4, 4, 4, 1, 14, 2e6),
    "cut": _plan(4e6, 16, 1, 1, 4, 80, 18e6),
}


def _drawn(seed: int) -> tuple:
    """Return plans whose parts take similar times, so that a mistake in one part changes the choice."""
    draw = random.Random(seed)
    plans = {
        name: _plan(
            1e6 * draw.randint(1, 8), draw.choice((2, 4, 8)), draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4)),
            draw.choice((1, 2, 4)), draw.randint(2, 90), 1e5 * draw.randint(1, 90),
        )
        for name in ("first", "second", "third", "fourth", "fifth")
    }
    return plans, 6e6, draw.uniform(0.005, 0.04), draw.uniform(0.0005, 0.005), draw.uniform(5e6, 50e6)


# (plans, limit, seconds per sample, latency, bandwidth)
TASKS = {
    "memory": (_PLANS, 6e6, 0.02, 0.002, 20e6),
    "at the limit": (_PLANS, 4e6, 0.02, 0.002, 20e6),
    "no room": (_PLANS, 3e6, 0.02, 0.002, 20e6),
    "slow": (_PLANS, 6e6, 0.02e12, 0.002e12, 20e6),
    **{f"drawn {seed}": _drawn(seed) for seed in range(120)},
}
_TURNS = "How many turns does a step with p stages have?", "micro_batches + stages - 1 turns"
_SHARE = "Which part of the model does a rank compute?", "A turn takes samples * sample / (stages * tensor)."
_OF_A_STEP = ("Are messages and bytes numbers for a turn, a micro-batch, or a step?",
              "messages and sent are for a whole step: add them once, not for each turn.")
# Mistake -> factors of computation, latency and bytes, for m micro-batches, p stages and t tensor ranks.
SECONDS = {
    "": (lambda m, p, t: (m + p - 1, 1, 1),),
    "no-bubble": (lambda m, p, t: (m, 1, 1), *_TURNS),
    "a-turn-too-many": (lambda m, p, t: (m + p, 1, 1), *_TURNS),
    "one-turn": (lambda m, p, t: (1, 1, 1), *_TURNS),
    "whole-model-each": (lambda m, p, t: ((m + p - 1) * p * t, 1, 1), *_SHARE),
    "stages-compute-all": (lambda m, p, t: ((m + p - 1) * p, 1, 1), *_SHARE),
    "tensor-ranks-compute-all": (lambda m, p, t: ((m + p - 1) * t, 1, 1), *_SHARE),
    "no-latency": (lambda m, p, t: (m + p - 1, 0, 1), "Does the plan send many small messages, or one large message?",
        "messages * latency is the latency of a whole step."),
    "no-bandwidth": (lambda m, p, t: (m + p - 1, 1, 0), "How long do the bytes take on the link?",
        "sent / bandwidth is the time of a whole step."),
    "messages-alone": (lambda m, p, t: (0, 1, 1),
        "The computation has no effect here. Do you add it, and do all parts have the unit seconds?", _SHARE[1]),
    "bytes-alone": (lambda m, p, t: (1e-13, 1e-13, 1),  # small factors break ties of bytes
        "The bytes are the whole time here. How many seconds do they take?", "sent / bandwidth"),
    "compute-alone": (lambda m, p, t: (m + p - 1, 0, 0), "What is the time of the link?",
        "messages * latency + sent / bandwidth"),
    "messages-of-a-turn": (lambda m, p, t: [m + p - 1] * 3, *_OF_A_STEP),
    "latency-of-a-turn": (lambda m, p, t: (m + p - 1, m + p - 1, 1), *_OF_A_STEP),
    "messages-of-a-micro-batch": (lambda m, p, t: (m + p - 1, m, m), *_OF_A_STEP),
    "latency-of-a-micro-batch": (lambda m, p, t: (m + p - 1, m, 1), *_OF_A_STEP),
    "bytes-of-a-micro-batch": (lambda m, p, t: (m + p - 1, 1, m), *_OF_A_STEP),
    "bits": (lambda m, p, t: (m + p - 1, 1, 8),
             "sent is in bytes, bandwidth in bytes per second. Which factor is wrong?", "sent / bandwidth"),
}


def _parts(plan, sample, latency, bandwidth, mistake: str = "") -> list:
    """Return the seconds of a step's computation, latencies and bytes."""
    micro_batches, stages, tensor = plan["micro_batches"], plan["stages"], plan["tensor"]
    each = plan["samples"] * sample / (stages * tensor), plan["messages"] * latency, plan["sent"] / bandwidth
    often = SECONDS.get(mistake, SECONDS[""])[0](micro_batches, stages, tensor)
    return [times * part for times, part in zip(often, each, strict=True)]


def seconds_of(*plan_and_link) -> float:
    """Return the seconds of a step; the last argument can plant a mistake."""
    return sum(_parts(*plan_and_link))


def right_choice(plans, limit, sample, latency, bandwidth, mistake: str = ""):
    """Return the fastest plan that fits the limit; a ``mistake`` can be planted."""

    def fits(name):
        held = plans[name]["held"]
        return {"ignores-the-limit": True, "below-the-limit": held < limit}.get(mistake, held <= limit)

    def key(name):
        first, *sending = _parts(plans[name], sample, latency, bandwidth, mistake)
        others = {"slowest": -first - sum(sending), "the-first": 0, "smallest": plans[name]["held"]}
        return {**others, "overlapped": max(first, sum(sending))}.get(mistake, first + sum(sending))

    if mistake == "looks-afterwards":
        return next((name for name in [min(plans, key=key)] if fits(name)), None)
    return min(filter(fits, plans), key=key, default=None)


def observe_choice(choose, comm):
    """Return the choice in each task."""
    found = []
    for plans, *others in TASKS.values():
        got = choose({name: dict(plan) for name, plan in plans.items()}, *others)
        found.append(got if got is None or isinstance(got, str) else [f"{got!r:.60}"])
    return found


_FITTING = "min(fitting, key=seconds, default=None). fitting are the plans with plan['held'] <= limit"
HINTS = {
    "ignores-the-limit": ("Which plans fit?", "Omit plans with plan['held'] > limit."),
    "below-the-limit": ("A plan needs exactly the limit. Does it fit?", "held <= limit"),
    "looks-afterwards": ("The fastest of all plans may not fit. Which is the fastest that does?", _FITTING),
    "the-first": ("Several plans fit. Which of them should you select?", _FITTING),
    "smallest": ("Which plan should you select: the smallest memory, or the shortest step?", _FITTING),
    "overlapped": ("Is a step the sum of its parts, or the longest part?",
                   "No overlap: add all three."),
    "slowest": ("Which one should you select, the longest or the shortest step?", "min(...)"),
    **{mistake: hints for mistake, (_, *hints) in SECONDS.items() if hints},
}


def judge_choice(observations) -> None:
    """Check the choice in each task."""
    seen, right = observations[0], [right_choice(*task) for task in TASKS.values()]
    if seen == right:
        return
    at = next(number for number, (got, wanted) in enumerate(zip(seen, right, strict=True)) if got != wanted)
    plans, limit, *link = list(TASKS.values())[at]
    got, said = seen[at], repr(seen[at])
    expected = f"{right[at]!r}" if right[at] else f"None: no plan needs {limit:,.0f} bytes or less"
    wrong = rows(None, expected)
    if isinstance(got, list):
        wrong("type", True, got[0], "Return a name of plans, or None.", "min(fitting, key=seconds)")
    wrong("always-chooses", right[at] is None, repr(got),
          "No plan fits, but your code returns one. Which condition is wrong?",
          "plan['held'] <= limit, and min(..., default=None)")
    wrong("never-chooses", all(each is None for each in seen), "None", "Return a name.", "min(fitting, key=seconds)")
    expected += _of(plans[right[at]], limit, link)
    if got in plans:
        said += _of(plans[got], limit, link)
    wrong = rows(None, expected)
    for mistake, hints in HINTS.items():
        wrong(mistake, seen == [right_choice(*task, mistake=mistake) for task in TASKS.values()], said, *hints)
    wrong("starts-at-a-number", got is None and list(TASKS)[at] == "slow", said,
          "All steps may be long. From which number does the search start?",
          "float('inf'), or min(...)")
    wrong("other-choice", True, said, "Compute both plans by hand. Which of the three parts differs?",
          "(micro_batches + stages - 1) * samples * sample / (stages * tensor) + messages * latency + sent / bandwidth")


def _of(plan, limit, link) -> str:
    turns, latencies, of_bytes = (f"{1000 * part:.1f}" for part in _parts(plan, *link))
    held = f"{plan['held']:,.0f} bytes (limit {limit:,.0f})"
    return f", of {held}: {turns} ms of turns, {latencies} of latency, {of_bytes} of bytes"


EXERCISES = {
    "held-fix": Exercise("held", observe_held, judge_held, needs_ranks=False),
    "choose-build": Exercise("choose", observe_choice, judge_choice, needs_ranks=False),
}
