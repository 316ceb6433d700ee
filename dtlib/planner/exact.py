"""What dtlib's own strategies hold and send, to the byte, from the sizes of a model's parameters.

    ranks          stage = rank % pipe, place on the data axis = rank // pipe
    states         theory.zero: one flat buffer at stage 1, one for each bucket at stage 2 and for each unit at stage 3
    data           theory.zero: rings; at stage 0 buckets, with a flag a parameter and one more behind the gradients
    pipe           a stage sends its outputs forward and the gradients of its inputs backward, for each micro-batch
    tensor         of a decoder (workloads/decoder.py): two all-reduces a layer and pass, one of the embedding and one
                   of the head's inputs, and three numbers a token for the loss

Headers, losses and other scalars are not in it: a trace has them as messages of their own.
"""

from itertools import pairwise

from dtlib.planner.mesh import Plan, check
from dtlib.planner.model import Model, PlanError
from dtlib.theory.collectives import elements_sent
from dtlib.theory.zero import zero_bytes, zero_wire_elements

FIRST_BUCKET, LEAST_BUCKET, LARGEST_BUCKET = 2**20, 4 * 2**20, 25 * 2**20  # bytes: those of gradients/buckets.py
ELEMENT = 4  # bytes: dtlib trains in float32 unless the config says bf16 or fp16


def of_rank(stages: list, boundaries: list, plan: Plan, rank: int, scheme: str = "adam") -> dict[str, dict[str, int]]:
    """Of one rank, ``{"held": {kind: bytes}, "sent": {axis: bytes a step}}``.

    Args:
        stages: of each stage its units (modules with parameters of their own), of each the sizes of its parameters.
        boundaries: elements of a sample between one stage and the next.
        scheme: of ``theory.zero.SCHEMES``.
    """
    if plan.tensor * plan.context * plan.expert > 1:
        raise PlanError(f"{plan}: dtlib's engine has a data and a pipe axis; the others are layers of the model.")
    return _of_place(stages, boundaries, plan, rank % plan.pipe, rank // plan.pipe, scheme)


def _of_place(stages, boundaries, plan, stage, place, scheme="adam", bucket=0):
    if len(stages) != plan.pipe or len(boundaries) != plan.pipe - 1:
        raise PlanError(
            f"{len(stages)} stages with {len(boundaries)} boundaries for pipe {plan.pipe}: give all of them."
        )
    units = [sum(unit) for unit in stages[stage]]
    buckets = _buckets([size for unit in stages[stage] for size in unit], plan.zero, bucket)
    flat = {2: [sum(bucket) for bucket in buckets], 3: units}.get(plan.zero, [sum(units)])
    travels = [sum(bucket) + len(bucket) + 2 for bucket in buckets] if plan.zero == 0 else flat
    data = zero_wire_elements(travels, plan.data, plan.zero, plan.micro_batches, rank=place) if plan.data > 1 else 0
    samples = plan.micro_batch * plan.micro_batches
    forward = boundaries[stage] if stage < plan.pipe - 1 else 0
    backward = boundaries[stage - 1] if stage else 0
    return {
        "held": zero_bytes(flat, plan.data, plan.zero, scheme, place),
        "sent": {"data": ELEMENT * data, "pipe": ELEMENT * samples * (forward + backward)},
    }


def of_decoder(model: Model, plan: Plan, rank: int, bucket: int = 0) -> dict[str, dict[str, int]]:
    """Of one rank of `dtlib train decoder`, as ``of_rank``, with ``sent["tensor"]``; ranks of a tensor axis are next to
    each other, and those of a pipe axis come next. ``bucket``: the config's ``reduce_bucket_size``, if it has one."""
    check(model, plan)
    if model.layers % plan.pipe or plan.context * plan.expert > 1:
        raise PlanError(
            f"{plan}: give a pipe axis that divides the {model.layers} layers, and no context or expert axis."
        )
    h, t, tokens = model.hidden, plan.tensor, plan.micro_batch * model.seq
    block = [h, h, h, h, 3 * h * h // t, 3 * h // t, h * h // t, h, 4 * h * h // t, 4 * h // t, 4 * h * h // t, h]
    units = [[model.vocab * h // t, model.seq * h], *[block] * model.layers, [model.vocab * h // t]]
    each = model.layers // plan.pipe
    cuts = [0, *(1 + each * stage for stage in range(1, plan.pipe)), len(units)]
    stages = [units[begin:end] for begin, end in pairwise(cuts)]
    stage, place, line = rank // t % plan.pipe, rank // t // plan.pipe, rank % t
    found = _of_place(stages, [model.seq * h] * (plan.pipe - 1), plan, stage, place, bucket=bucket)
    first, last = stage == 0, stage == plan.pipe - 1
    passes = 4 * each + (2 * each if plan.recompute == "full" else 0)
    sizes = [tokens * h] * (passes + first + last) + [tokens + t, 2 * tokens] * last
    sent = sum(_all_reduced(t, line, size) for size in sizes) if t > 1 else 0
    found["sent"]["tensor"] = ELEMENT * plan.micro_batches * sent
    return found


def _buckets(sizes: list[int], zero: int, bucket: int) -> list[list[int]]:
    """Sizes in the buckets in which their gradients travel, the last layers' first, as gradients/buckets.py has them:
    at most of ``bucket`` elements, or as large as the largest size, at stage 0 at least 4 MiB, and the first at most
    one. At stage 2 a size of half the limit has a bucket of its own."""
    most = ELEMENT * bucket or min(LARGEST_BUCKET, max(0 if zero else LEAST_BUCKET, ELEMENT * max(sizes)))
    alone = [[size] for size in sizes if zero == 2 and 2 * ELEMENT * size >= most]
    buckets: list[list[int]] = [[]]
    for size in reversed(sizes):
        limit = FIRST_BUCKET if zero == 0 and len(buckets) == 1 else most
        if zero == 2 and 2 * ELEMENT * size >= most:
            continue
        if buckets[-1] and ELEMENT * (sum(buckets[-1]) + size) > limit:
            buckets.append([])
        buckets[-1].append(size)
    return [*filter(None, buckets), *alone]


def _all_reduced(ranks: int, rank: int, count: int) -> int:
    """Elements that a rank sends, by the algorithm that comm.selection takes on two and on four ranks."""
    short = ELEMENT * count <= (2**18 if ranks <= 2 else 2**19)
    return elements_sent("all_reduce", "recursive_doubling" if short else "ring", ranks, rank, count)
