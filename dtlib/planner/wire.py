"""Bytes that a rank sends, by axis, and over which link.

n tokens of a micro-batch on a rank, t, c, e, d ranks on an axis, S = 2 n h bytes, p forward passes' worth of messages
(3 for forward and backward, 4 with full recomputation). A layer sends, for one micro-batch:

    tensor     2 (p - 1) all-reduces of S, or with sequence parallelism as many reduce-scatters and all-gathers
    context    ring: keys and values go round, p (c - 1) 4 n k/t
               ulysses: queries, keys, values, outputs, p 4 n (h + k) (c - 1)/c /t
    expert     out and back a pass, 2 p S active (e - 1)/e, and /t with sequence parallelism
    pipe       a boundary: S forward and S backward, /t with sequence parallelism, for each stage of the rank
    data       once a step, by ZeRO's stage as in theory.zero, in the types that travel
"""

from dtlib.planner.memory import parameters_of_stage, tokens_of_rank
from dtlib.planner.mesh import Plan
from dtlib.planner.model import Device, Model
from dtlib.theory.zero import SCHEMES


def passes(plan: Plan) -> int:
    return 4 if plan.recompute == "full" else 3


def layer_bytes(model: Model, plan: Plan) -> dict[str, float]:
    """Of one layer and micro-batch."""
    n, h, t, c, e = tokens_of_rank(model, plan), model.hidden, plan.tensor, plan.context, plan.expert
    p, whole, cut = passes(plan), 2 * n * h, t if plan.sequence_parallel else 1
    if plan.context_algorithm == "ring":
        context = p * (c - 1) * 2 * n * model.kv_width * 2 / t
    else:
        context = p * 2 * n * (2 * model.width + 2 * model.kv_width) * (c - 1) / c / t
    return {
        "tensor": 2 * (p - 1) * 2 * (t - 1) / t * whole,
        "context": context,
        "expert": 2 * p * whole * model.active * (e - 1) / e / cut,
    }


def boundary_bytes(model: Model, plan: Plan) -> float:
    """Of one micro-batch, both ways."""
    each = 2 * tokens_of_rank(model, plan) * model.hidden / (plan.tensor if plan.sequence_parallel else 1)
    return 2 * each * plan.chunks if plan.pipe > 1 else 0


def data_bytes(model: Model, plan: Plan) -> float:
    """Of a step, by a rank of the first stage."""
    own = sum(parameters_of_stage(model, plan, 0))
    scheme, m, part = SCHEMES[plan.scheme], plan.micro_batches, (plan.shards - 1) / plan.shards
    gradients, parameters = min(4, scheme.gradients) * own, 2 * own  # a sum and a pass's gradients: the sum travels
    if plan.zero == 3 and plan.pipe > 1:
        m = 1  # parameters are whole during the step, and gradients are reduced at its end
    sent = {
        0: 2 * gradients,
        1: gradients + parameters,
        2: m * gradients + parameters,
        3: m * (gradients + 2 * parameters),
    }[plan.zero]
    return part * sent


def step_bytes(model: Model, plan: Plan) -> dict[str, float]:
    """Bytes that a rank of the first stage sends in a step, by axis; embedding and head are left out."""
    times = plan.micro_batches * model.layers / plan.pipe
    layers = {name: times * sent for name, sent in layer_bytes(model, plan).items()}
    return {**layers, "pipe": plan.micro_batches * boundary_bytes(model, plan) / 2, "data": data_bytes(model, plan)}


def placed(device: Device, gpus: int, ranks: int, stride: int, sent: float) -> tuple[float, float]:
    """The same bytes as those over links within a node, or over the network of a node that all its rings share.

    Args:
        stride: by how much ranks next to each other on the axis differ.
        sent: by a rank.
    """
    if gpus <= device.per_node or stride * ranks <= device.per_node:
        return sent, 0
    within = min(ranks, max(1, device.per_node // stride))
    return 0, sent * max(1, device.per_node // within)
