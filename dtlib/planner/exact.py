"""The exact number of bytes that dtlib's strategies store and send, from the sizes of a model's parameters.

    ranks          stage = rank % pipe, index on the data axis = rank // pipe
    states         theory.zero: one flat buffer at stage 1, one per bucket at stage 2, one per unit at stage 3
    data           theory.zero: rings; at stage 0 buckets, which end with a flag per parameter and one more flag
    pipe           a stage sends its outputs forward and the gradients of its inputs backward, for each micro-batch
    tensor         of a decoder (workloads/decoder.py): two all-reduces per layer and pass, one for the embedding, one
                   for the head's inputs, and three numbers per token for the loss

Headers, losses and other scalars are not included: a trace shows them as separate messages.
"""

from itertools import pairwise

from dtlib.planner.mesh import Plan, check
from dtlib.planner.model import Model, PlanError
from dtlib.theory.collectives import chosen_all_reduce, elements_sent
from dtlib.theory.zero import zero_bytes, zero_wire_elements

FIRST_BUCKET, LEAST_BUCKET, LARGEST_BUCKET = 2**20, 4 * 2**20, 25 * 2**20  # bytes, as in gradients/buckets.py
ELEMENT = 4  # bytes: dtlib trains in float32 unless the config says bf16 or fp16


def of_rank(stages: list, boundaries: list, plan: Plan, rank: int, scheme: str = "adam") -> dict[str, dict[str, int]]:
    """Return the bytes of one rank: ``{"held": {kind: bytes}, "sent": {axis: bytes per step}}``.

    Args:
        stages: for each stage, the units (modules with parameters); for each unit, the sizes of its parameters.
        boundaries: elements per sample that one stage sends to the next.
        plan: with a data and a pipe axis only.
        rank: the rank.
        scheme: a key of ``theory.zero.SCHEMES``.

    Raises:
        PlanError: for a plan with other axes.
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
    sent_sizes = [sum(bucket) + len(bucket) + 1 for bucket in buckets] if plan.zero == 0 else flat
    data = zero_wire_elements(sent_sizes, plan.data, plan.zero, plan.micro_batches, rank=place) if plan.data > 1 else 0
    samples = plan.micro_batch * plan.micro_batches
    forward = boundaries[stage] if stage < plan.pipe - 1 else 0
    backward = boundaries[stage - 1] if stage else 0
    return {
        "held": zero_bytes(flat, plan.data, plan.zero, scheme, place),
        "sent": {"data": ELEMENT * data, "pipe": ELEMENT * samples * (forward + backward)},
    }


def of_decoder(model: Model, plan: Plan, rank: int, bucket: int = 0) -> dict[str, dict[str, int]]:
    """Return the bytes of one rank of `dtlib train decoder`, in the form of ``of_rank``, with ``sent["tensor"]``.

    Consecutive ranks are on the tensor axis, then on the pipe axis. ``bucket`` is ``reduce_bucket_size`` of the config,
    or 0.

    Raises:
        PlanError: for a plan with context or expert axes, or if the pipe axis does not divide the layers.
    """
    check(model, plan)
    if model.layers % plan.pipe or plan.context * plan.expert > 1:
        raise PlanError(
            f"{plan}: give a pipe axis that divides the {model.layers} layers, and no context or expert axis."
        )
    h, t, tokens = model.hidden, plan.tensor, plan.micro_batch * model.seq
    # The sizes of the parameters of a decoder layer, in the model's order, on one of t tensor ranks.
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
    """Return the sizes of the parameters in each bucket, from the last parameters to the first.

    The rules are the same as in gradients/buckets.py. A bucket has at most ``bucket`` elements. By default the limit is
    the size of the largest parameter. At stage 0 this default is at least 4 MiB, and the first bucket has at most 1
    MiB. At stage 2 a parameter of at least half the limit has a separate bucket.
    """
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
    """Return the elements that a rank sends in an all-reduce, with the algorithm that the communicator chooses."""
    return elements_sent("all_reduce", chosen_all_reduce(ranks, ELEMENT * count), ranks, rank, count)
