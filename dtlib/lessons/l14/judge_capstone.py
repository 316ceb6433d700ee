"""Lesson 14: memory of a mesh, the choice of one, and a plan that is run: judged by values, and by what ranks count."""

from dtlib.lab.checks.exercise import Exercise, Score, Wrong
from dtlib.lessons.l14 import brief
from dtlib.planner import Plan, PlanError

# parameters, data, tensor, pipe, zero
CASES = tuple(
    (parameters, *axes, zero)
    for parameters, axes in ((1_048_576, (4, 1, 1)), (1_048_576, (2, 2, 1)), (4096, (4, 1, 2)), (65_536, (2, 4, 8)))
    for zero in range(4)
)
SAMPLE = 0.02  # seconds a sample, of the race


def right_held(parameters, data, tensor, pipe, zero) -> float:
    own = parameters / (tensor * pipe)
    parts = 4 * own / (data if zero >= 3 else 1), 4 * own / (data if zero >= 2 else 1), 8 * own / (data if zero else 1)
    return sum(parts)


def observe_held(held, comm):
    return [_number(held(*case)) for case in CASES]


def _number(came):
    try:
        return float(came)
    except (TypeError, ValueError):
        return f"{came!r:.60}"


def judge_held(observations) -> None:
    seen = observations[0]
    at = next((at for at, case in enumerate(CASES) if not _close(seen[at], right_held(*case))), None)
    if at is None:
        return
    parameters, data, tensor, pipe, zero = CASES[at]
    mesh = f"{parameters:,} parameters, data {data}, tensor {tensor}, pipe {pipe}, ZeRO-{zero}"
    what, came = f"{right_held(*CASES[at]):,.0f} bytes: {mesh}", seen[at]
    if isinstance(came, str):
        raise Wrong("type", 0, what, came, "Return a number of bytes.")
    for mistake, (held, *hints) in OTHERS.items():
        if all(_close(each, held(*case)) for each, case in zip(seen, CASES, strict=True)):
            raise Wrong(mistake, 0, what, f"{came:,.0f}", *hints)
    hint = "From stage 1 on states are shared out, from 2 on gradients, from 3 on parameters."
    hint = hint if zero else "4 bytes of parameters, 4 of gradients, 8 of states."
    raise Wrong("other-bytes", 0, what, f"{came:,.0f}", hint)


def _close(came, wanted: float) -> bool:
    return not isinstance(came, str) and abs(came - wanted) <= 1e-6 * wanted


def _shared(own, ranks, zero, parts=(4, 4, 8)) -> float:
    kept = (3, 2, 1)
    return sum(size * own / (ranks if zero >= stage else 1) for size, stage in zip(parts, kept, strict=True))


OTHERS = {
    "over-all-ranks": (
        lambda n, d, t, p, zero: _shared(n / (t * p), d * t * p, zero),
        "Which ranks have the same parameters to share out?",
        "ZeRO shares out over the data axis alone: divide by data.",
    ),
    "whole-model": (
        lambda n, d, t, p, zero: _shared(n, d, zero), "What of the model does a rank have, before ZeRO?",
        "own = parameters / (tensor * pipe)",
    ),
    "twice-cut": (
        lambda n, d, t, p, zero: _shared(n / (t * p) ** 2, d, zero), "The parameters are divided twice.",
        "own is already this rank's part.",
    ),
    "not-shared": (
        lambda n, d, t, p, zero: 16 * n / (t * p), "Which stage shares out what?",
        "From stage 1 on states, from 2 on gradients, from 3 on parameters.",
    ),
    "one-stage-off": (
        lambda n, d, t, p, zero: _shared(n / (t * p), d, zero + 1), "Which stage shares out states: 0 or 1?",
        "From stage 1 on states, from 2 on gradients, from 3 on parameters.",
    ),
    "mixed-precision": (
        lambda n, d, t, p, zero: _shared(n / (t * p), d, zero, (2, 2, 12)), "These are the bytes of mixed precision.",
        "In float32: 4, 4, and 8 for Adam's two states.",
    ),
}  # fmt: skip


# Choosing


def _plan(held, samples, micro_batches, stages, tensor, messages, sent) -> dict:
    return {
        "held": held, "samples": samples, "micro_batches": micro_batches, "stages": stages, "tensor": tensor,
        "messages": messages, "sent": sent,
    }  # fmt: skip


_PLANS = {
    "data": _plan(16e6, 4, 1, 1, 1, 6, 1e6),
    "sharded": _plan(4e6, 4, 1, 1, 1, 54, 8e6),
    "stages": _plan(4e6, 4, 4, 4, 1, 14, 2e6),
    "cut": _plan(4e6, 16, 1, 1, 4, 80, 18e6),
}
# limit, seconds a sample, latency, bandwidth; each tells one mistake from the others
TASKS = {
    "plans differ by their memory": (_PLANS, 6e6, 0.02, 0.002, 20e6),
    "a plan holds exactly the limit": (_PLANS, 4e6, 0.02, 0.002, 20e6),
    "no plan fits": (_PLANS, 3e6, 0.02, 0.002, 20e6),
    "all plans fit": (_PLANS, 1e9, 0.02, 0.002, 20e6),
    "plans differ by their bubble": (
        {"sharded": _plan(1, 4, 1, 1, 1, 6, 0), "stages": _plan(1, 4, 4, 4, 1, 0, 0)}, 2, 0.02, 0.002, 20e6,
    ),
    "plans differ by their latency": (
        {"many": _plan(1, 4, 1, 1, 1, 90, 1e6), "few": _plan(1, 4, 1, 1, 1, 2, 2e6)}, 2, 0.02, 0.005, 20e6,
    ),
    "plans differ by their bandwidth": (
        {"few, large": _plan(1, 4, 1, 1, 1, 2, 9e6), "many, small": _plan(1, 4, 1, 1, 1, 90, 1e6)}, 2, 0.02, 1e-5, 20e6,
    ),
    "plans differ by their compute": (
        {"one rank": _plan(1, 16, 1, 1, 1, 0, 0), "cut": _plan(1, 16, 1, 1, 4, 10, 1e6)}, 2, 0.05, 0.002, 20e6,
    ),
}  # fmt: skip


def seconds_of(plan, sample, latency, bandwidth, mistake: str = "") -> float:
    """Of a step; ``mistake`` as planted."""
    turns = plan["micro_batches"] + (plan["stages"] - 1 if mistake != "no-bubble" else 0)
    ranks = plan["stages"] * plan["tensor"] if mistake != "whole-model-each" else 1
    compute = turns * plan["samples"] * sample / ranks
    link = plan["messages"] * (latency if mistake != "no-latency" else 0)
    link += plan["sent"] / bandwidth if mistake != "no-bandwidth" else 0
    return {"messages-alone": link, "compute-alone": compute}.get(mistake, compute + link)


def right_choice(plans, limit, sample, latency, bandwidth, mistake: str = ""):
    def fits(held):
        return {"ignores-the-limit": True, "below-the-limit": held < limit}.get(mistake, held <= limit)

    fitting = [name for name, plan in plans.items() if fits(plan["held"])]
    pick = max if mistake == "slowest" else min
    return pick(fitting, key=lambda name: seconds_of(plans[name], sample, latency, bandwidth, mistake), default=None)


def observe_choice(choose, comm):
    found = []
    for plans, *others in TASKS.values():
        came = choose({name: dict(plan) for name, plan in plans.items()}, *others)
        found.append(came if came is None or isinstance(came, str) else [f"{came!r:.60}"])
    return found


HINTS = {
    "ignores-the-limit": ("Which of the plans fit at all?", "Leave out those with plan['held'] > limit."),
    "below-the-limit": ("A plan that holds exactly the limit: does it fit?", "held <= limit"),
    "no-bubble": ("A pipeline of p stages: how many turns does it need?", "micro_batches + stages - 1"),
    "whole-model-each": ("How much of a layer, and of how many, does a rank compute?", "/ (stages * tensor)"),
    "no-latency": ("Many small messages, or one large one?", "messages * latency belongs to a step."),
    "no-bandwidth": ("How long do the bytes take?", "sent / bandwidth belongs to a step."),
    "messages-alone": ("Who computes?", "A turn takes samples * sample / (stages * tensor)."),
    "compute-alone": ("What does the link cost?", "messages * latency + sent / bandwidth"),
    "slowest": ("Which one is wanted, the longest or the shortest step?", "min(...)"),
}
FIRST = {  # where an answer with several mistakes is wrong first: by which of them
    "plans differ by their memory": "ignores-the-limit", "a plan holds exactly the limit": "below-the-limit",
    "plans differ by their bubble": "no-bubble", "plans differ by their latency": "no-latency",
    "plans differ by their bandwidth": "no-bandwidth", "plans differ by their compute": "whole-model-each",
}  # fmt: skip


def judge_choice(observations) -> None:
    seen, right = observations[0], [right_choice(*task) for task in TASKS.values()]
    if seen == right:
        return
    at = next(number for number, (came, wanted) in enumerate(zip(seen, right, strict=True)) if came != wanted)
    name, came = list(TASKS)[at], seen[at]
    expected = f"{right[at]!r}, where {name}"
    if isinstance(came, list):
        raise Wrong("type", 0, expected, came[0], "Return a name of plans, or None.")
    if right[at] is None:
        raise Wrong("always-chooses", 0, expected, repr(came), "What if no plan fits?", "min(..., default=None)")
    if all(each is None for each in seen):
        raise Wrong("never-chooses", 0, expected, "None", "Return a name.", "min(fitting, key=seconds)")
    for mistake, hints in HINTS.items():
        if seen == [right_choice(*task, mistake=mistake) for task in TASKS.values()]:
            raise Wrong(mistake, 0, expected, repr(came), *hints)
    general = ("Seconds of a step: turns, messages x latency, bytes / bandwidth.",)
    raise Wrong("other-choice", 0, expected, repr(came), *HINTS.get(FIRST.get(name), general))


# The race


def observe_race(my_plan, comm):
    came = my_plan()
    came = vars(came) if isinstance(came, Plan) else came
    if not isinstance(came, dict):
        return {"type": f"{came!r:.60}"}
    fields = Plan.__dataclass_fields__
    if unknown := [name for name in came if name not in fields]:
        return {"refused": f"{unknown[0]!r} is nothing of a plan: it has {', '.join(list(fields)[:9])}."}
    try:
        plan = Plan(**{"batch": brief.BATCH, **came})
        brief.config(plan)
        brief.held(plan)
    except (TypeError, PlanError) as problem:
        return {"refused": f"{problem}"}
    if plan.gpus != comm.size or plan.batch != brief.BATCH:
        return {"ranks": plan.gpus, "there": comm.size, "batch": plan.batch, "plan": str(plan)}
    found = brief.measured(plan, steps=3, limit=False, link=False, comm=comm)
    return {
        "plan": str(plan), "held": max(found["held"]), "sent": found["sent"],
        "ms": 1000 * brief.predicted(plan, SAMPLE),
    }  # fmt: skip


def judge_race(observations) -> Score:
    for rank, seen in enumerate(observations):
        if "type" in seen:
            raise Wrong("type", rank, "a dictionary of fields of Plan", seen["type"], 'return {"data": 4, "zero": 3}')
        if "refused" in seen:
            raise Wrong(
                "cannot-be", rank, f"a plan for {brief.RANKS} ranks and {brief.BATCH} samples", seen["refused"],
                "What does the sentence name?", "data x micro_batch divides 16; heads are 4, layers 4.",
            )  # fmt: skip
        if "ranks" in seen:
            raise Wrong(
                "other-task", rank, f"axes that multiply to {seen['there']}, and a batch of {brief.BATCH}",
                f"{seen['ranks']} ranks, a batch of {seen['batch']}: {seen['plan']}",
                "data x tensor x pipe is the number of ranks. The task is made for four: lab.engines(4).",
            )  # fmt: skip
    most = max(seen["held"] for seen in observations)
    if most > brief.LIMIT:
        rank = next(rank for rank, seen in enumerate(observations) if seen["held"] == most)
        raise Wrong(
            "over-the-limit", rank, f"at most {brief.LIMIT:,} bytes of model states", f"{most:,} bytes",
            "A higher stage of ZeRO, or more stages or tensor ranks, hold less.",
            "ZeRO-3 on data 4, or ZeRO-1 on data 2 with pipe 2.",
        )  # fmt: skip
    took = observations[0]["ms"]
    par = 1000 * brief.predicted(brief.MESHES["pipe 4"], SAMPLE)
    words = f"{took:.0f} ms a step, par {par:.0f}: {observations[0]['plan']}"
    score = Score(round(took, 1), round(par, 1), "ms", words)
    if took > 1.001 * par:
        raise Wrong(
            "over-par", 0, f"at most {par:.0f} ms a step", f"{took:.0f} ms",
            "Where do the seconds go: turns, messages, bytes? The cell above says so of any plan.",
            "On a slow link activations are cheaper than parameters: a pipeline, and short turns.", score=score,
        )  # fmt: skip
    return score


EXERCISES = {
    "held-fix": Exercise("held", observe_held, judge_held, needs_ranks=False),
    "choose-build": Exercise("choose", observe_choice, judge_choice, needs_ranks=False),
    "capstone-race": Exercise("my_plan", observe_race, judge_race),
}
