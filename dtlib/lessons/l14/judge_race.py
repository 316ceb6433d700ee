"""Lesson 14's race: check of a plan by its measured memory and its predicted time."""

from importlib.util import find_spec, module_from_spec

from dtlib.lab.checks.exercise import Exercise, Score, Wrong, rows
from dtlib.planner import Plan, PlanError

SAMPLE = 0.02  # seconds per sample
_found = find_spec("dtlib.lessons.l14.brief")
brief = module_from_spec(_found)  # a separate copy, because learners change the latency in theirs
_found.loader.exec_module(brief)


def observe_race(my_plan, comm):
    """Run a learner's plan; return its memory, bytes sent and predicted time, or an error."""
    got = my_plan()
    got = vars(got) if isinstance(got, Plan) else got
    if not isinstance(got, dict):
        return {"type": f"{got!r:.60}"}
    fields = Plan.__dataclass_fields__
    if unknown := [name for name in got if name not in fields]:
        return {"refused": f"{unknown[0]!r} is not a field of a plan. The fields are {', '.join(list(fields)[:9])}."}
    if texts := [name for name, value in got.items() if type(fields[name].default) is int and type(value) is not int]:
        return {"refused": f"{texts[0]} is {got[texts[0]]!r}: write a whole number, without quotes."}
    try:
        plan = Plan(**{"batch": brief.BATCH, **got})
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
    }


def judge_race(observations) -> Score:
    """Check that the plan fits this task and its limit; return the predicted time as score."""
    for rank, seen in enumerate(observations):
        wrong = rows(rank)
        wrong("type", "type" in seen, "a dictionary of fields of Plan", seen.get("type"),
              'return {"data": 4, "zero": 3}')
        wrong("cannot-be", "refused" in seen, f"a plan for {brief.RANKS} ranks and {brief.BATCH} samples",
              seen.get("refused"),
              "Change the field that the message names.", "data x micro_batch divides 16; heads are 4, layers 4.")
        if "ranks" in seen:
            wrong("other-task", True, f"axes that multiply to {seen['there']}, and a batch of {brief.BATCH}",
                  f"{seen['ranks']} ranks, a batch of {seen['batch']}: {seen['plan']}",
                  "The batch must stay 16: omit it." if seen["ranks"] == seen["there"] else
                  "data x tensor x pipe is the number of ranks. The task needs four: lab.engines(4).")
    most = max(seen["held"] for seen in observations)
    if most > brief.LIMIT:
        rank = next(rank for rank, seen in enumerate(observations) if seen["held"] == most)
        raise Wrong("over-the-limit", rank, f"at most {brief.LIMIT:,} bytes of model states", f"{most:,} bytes",
                    "A higher stage of ZeRO, more pipeline stages or more tensor ranks need less memory.",
                    "ZeRO-3 on data 4, or ZeRO-1 on data 2 with pipe 2.")
    took = observations[0]["ms"]
    par = 1000 * brief.predicted(brief.MESHES["pipe 4"], SAMPLE)
    words = f"{took:.0f} ms a step, par {par:.0f}: {observations[0]['plan']}"
    score = Score(round(took, 1), round(par, 1), "ms", words)
    if took > 1.001 * par:
        raise Wrong("over-par", 0, f"at most {par:.0f} ms a step", f"{took:.0f} ms",
                    "Which part takes most time: turns, messages or bytes? The cell above shows it.",
                    "On a slow link activations are cheaper than parameters: use a pipeline, and short turns.",
                    score=score)
    return score


EXERCISES = {"capstone-race": Exercise("my_plan", observe_race, judge_race)}
