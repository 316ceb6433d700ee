"""Bytes that a rank sends, by axis and by link.

Let n be the tokens of a micro-batch on a rank, t, c, e, d the ranks on the axes, and S = 2 n h bytes. Forward and
backward together send the messages of p = 3 forward passes; with full recomputation p = 4. Per micro-batch, a layer
sends:

    tensor     2 (p - 1) all-reduces of S; with sequence parallelism reduce-scatters and all-gathers of the same bytes
    context    ring: keys and values, p (c - 1) 4 n k/t
               ulysses: queries, keys, values, outputs, p 4 n (h + k) (c - 1)/c /t
    expert     to the experts and back in each pass, 2 p S active (e - 1)/e; /t with sequence parallelism
    pipe       per boundary: S forward and S backward, /t with sequence parallelism, for each stage of the rank
    data       once per step, by ZeRO stage as in theory.zero, in the dtypes of the messages
"""

from dtlib.planner.memory import parameters_of_stage, tokens_of_rank
from dtlib.planner.mesh import Plan
from dtlib.planner.model import Device, Model
from dtlib.theory.zero import SCHEMES


def passes(plan: Plan) -> int:
    """Return the work of a micro-batch in units of forward passes; a backward pass counts as two."""
    return 4 if plan.recompute == "full" else 3


def layer_bytes(model: Model, plan: Plan) -> dict[str, float]:
    """Return the bytes that a rank sends for one layer and one micro-batch, by axis."""
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
    """Return the bytes that cross a boundary of stages for one micro-batch, in both directions."""
    each = 2 * tokens_of_rank(model, plan) * model.hidden / (plan.tensor if plan.sequence_parallel else 1)
    return 2 * each * plan.chunks if plan.pipe > 1 else 0


def data_bytes(model: Model, plan: Plan) -> float:
    """Return the bytes that a rank of the first stage sends on the data axis per step."""
    own = sum(parameters_of_stage(model, plan, 0))
    scheme, m, part = SCHEMES[plan.scheme], plan.micro_batches, (plan.shards - 1) / plan.shards
    # If a scheme stores a 32-bit sum beside a pass's gradients, only the sum is sent: at most 4 bytes per parameter.
    gradients, parameters = min(4, scheme.gradients) * own, 2 * own
    # In a pipeline, parameters stay unsharded during the step, and gradients are reduced at its end.
    if plan.zero == 3 and plan.pipe > 1:
        m = 1
    sent = {
        0: 2 * gradients,
        1: gradients + parameters,
        2: m * gradients + parameters,
        3: m * (gradients + 2 * parameters),
    }[plan.zero]
    return part * sent


def step_bytes(model: Model, plan: Plan) -> dict[str, float]:
    """Return the bytes that a rank of the first stage sends per step, by axis, without embedding and head."""
    times = plan.micro_batches * model.layers / plan.pipe
    layers = {name: times * sent for name, sent in layer_bytes(model, plan).items()}
    return {**layers, "pipe": plan.micro_batches * boundary_bytes(model, plan) / 2, "data": data_bytes(model, plan)}


def placed(device: Device, gpus: int, ranks: int, stride: int, sent: float) -> tuple[float, float]:
    """Return the bytes sent within a node, and the bytes that a node sends to other nodes; one number is 0.

    If a ring leaves the node, all rings of the node share its network, so their bytes are added.

    Args:
        device: has the number of GPUs per node.
        gpus: all GPUs.
        ranks: ranks on the axis.
        stride: the difference between neighbouring ranks on the axis.
        sent: bytes that one rank sends.
    """
    if gpus <= device.per_node or stride * ranks <= device.per_node:
        return sent, 0
    within = min(ranks, max(1, device.per_node // stride))
    return 0, sent * max(1, device.per_node // within)
