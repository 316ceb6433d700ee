"""Lesson 14's task: a model, four ranks, a limit on memory and a slow link; predicted and measured cost of meshes.

seconds of a step = turns x micro-batch x (seconds of a sample / (pipe x tensor) + its messages) + data's messages
turns             = micro-batches + pipe - 1
a message         = latency + bytes / bandwidth
"""

import time
from itertools import pairwise
from math import log2
from statistics import median

from dtlib.planner import Model, Plan
from dtlib.planner.configs import for_dtlib
from dtlib.planner.exact import of_decoder

RANKS, BATCH = 4, 16
MODEL = Model(layers=4, hidden=128, heads=4, vocab=256, seq=64, tied=False)
LIMIT = 6_000_000  # bytes of model states and buffers per rank
BUCKET = 10**8  # elements: all gradients in one message, except the first MiB
LATENCY, BANDWIDTH = 0.002, 20e6  # EMULATED: seconds per message, bytes per second
BAND = 1.5  # the measured time is expected between prediction / BAND and prediction * BAND
MESHES = {
    "data 4": Plan(data=4, batch=BATCH, micro_batch=4),
    "data 4, ZeRO-1": Plan(data=4, zero=1, batch=BATCH, micro_batch=4),
    "data 4, ZeRO-2": Plan(data=4, zero=2, batch=BATCH, micro_batch=4),
    "data 4, ZeRO-3": Plan(data=4, zero=3, batch=BATCH, micro_batch=4),
    "data 4, ZeRO-3, 4 micro-batches": Plan(data=4, zero=3, batch=BATCH, micro_batch=1),
    "data 2, tensor 2, ZeRO-1": Plan(data=2, tensor=2, zero=1, batch=BATCH, micro_batch=8),
    "tensor 4": Plan(tensor=4, batch=BATCH, micro_batch=16),
    "data 2, pipe 2, ZeRO-1": Plan(data=2, pipe=2, zero=1, batch=BATCH, micro_batch=2),
    "pipe 4": Plan(pipe=4, batch=BATCH, micro_batch=4),
    "pipe 2, tensor 2": Plan(tensor=2, pipe=2, batch=BATCH, micro_batch=4),
}


def held(plan: Plan, model: Model = MODEL) -> int:
    """Return the exact bytes of model states on the rank that stores most."""
    return max(sum(of_decoder(model, plan, rank, BUCKET)["held"].values()) for rank in range(plan.gpus))


def sent(plan: Plan, model: Model = MODEL) -> dict[str, int]:
    """Return the exact payload bytes per step by axis, of the rank that sends most."""
    each = [of_decoder(model, plan, rank, BUCKET)["sent"] for rank in range(plan.gpus)]
    return max(each, key=lambda by_axis: sum(by_axis.values()))


def messages(plan: Plan, model: Model = MODEL) -> dict[str, int]:
    """Return the messages in sequence: per step on the data axis, per micro-batch on the other axes."""
    d, t, m = plan.data, plan.tensor, plan.micro_batches
    units = model.layers + 2
    rings = {0: 2, 1: 2, 2: m + 1, 3: 3 * m * units}[plan.zero]
    all_reduces = 4 * model.layers // plan.pipe + (4 if plan.pipe == 1 else 3)  # embedding 1, head and loss 3
    return {
        "data": rings * (d - 1),
        "tensor": all_reduces * int(log2(t)),
        "pipe": 2 if plan.pipe > 1 else 0,
    }


def predicted(plan: Plan, sample: float, bubble: bool = True) -> float:
    """Return predicted seconds per step; ``sample`` is seconds per sample through the whole model."""
    m, travels, count = plan.micro_batches, sent(plan), messages(plan)
    turns = m + (plan.pipe - 1 if bubble else 0)
    compute = plan.micro_batch * sample / (plan.pipe * plan.tensor)
    per_turn = sum(count[axis] * LATENCY + travels[axis] / m / BANDWIDTH for axis in ("tensor", "pipe"))
    return turns * (compute + per_turn) + count["data"] * LATENCY + travels["data"] / BANDWIDTH


def config(plan: Plan, steps: int = 4, limit: bool = True, link: bool = True, model: Model = MODEL, **run) -> dict:
    """Return the config for ``dtlib train decoder``, with this task's link and limit."""
    run = {"steps": steps, **run}
    if limit:
        run["memory_limit"] = LIMIT
    if link:
        run |= {"link_latency": LATENCY, "link_bandwidth": BANDWIDTH}
    made = {**for_dtlib(model, plan), "run": run}
    # With a smaller eps Adam amplifies rounding errors, and runs differ.
    made["optimizer"]["params"]["eps"] = 1e-4
    if plan.zero < 3:
        made["zero_optimization"]["reduce_bucket_size"] = BUCKET
    return made


def measured(plan: Plan, steps: int = 4, comm=None, **asked) -> dict:
    """Train on all ranks; return the measurements.

    ``held`` has the bytes on each rank. ``sent`` is the payload of this rank in the fifth step. ``seconds`` are per
    step, the median after the second step.
    """
    import dtlib
    from dtlib.training.run import train

    ends, tracing = [], dtlib.trace()

    def after_step(step, loss):
        nonlocal trace
        # In the first three steps ranks also compare values, which sends more bytes.
        if step == 3:
            trace = tracing.__enter__()
        elif step == 4:
            tracing.__exit__(None, None, None)
        ends.append(time.perf_counter())

    trace = None

    result = train("decoder", config(plan, max(5, steps), **asked), comm=comm, after_step=after_step)
    took = median(b - a for a, b in pairwise(ends[1:]))
    payload = sum(event.bytes for event in trace.events if event.kind == "operation" and event.bytes > HEADER)
    return {"held": result["bytes_per_rank"], "sent": payload, "seconds": took, "loss": result["loss"]}


HEADER = 600  # bytes: flags, losses and headers of micro-batches are smaller messages, which do not count
