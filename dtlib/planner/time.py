"""Seconds of a step: what is to be computed and sent, in operations, bytes and messages, and how fast that goes.

    layer    = soft maximum of (matrices + attention + memory traffic + messages of its axes) and what the host needs to
               launch it: small layers wait for the host, whatever they compute (p-norm with p = 3)
    stage    = layers x layer + messages at its boundary
    step     = micro-batches x (stage + head) + bubble x stage + messages of the data axis that are not hidden
               + optimizer + a constant, all times 1 + straggle x log2(nodes)

Every term is an amount by closed formulas (``Work``) times a coefficient with a unit (``Speeds``), which a calibration
has. Groups along an axis fill a node before they leave it: tensor first, then context, data, pipe.
"""

from dataclasses import dataclass
from math import log2

from dtlib.planner.memory import parameters_of_stage, tokens_of_rank
from dtlib.planner.mesh import Plan, check
from dtlib.planner.model import Device, Model
from dtlib.planner.wire import boundary_bytes, data_bytes, layer_bytes, passes, placed
from dtlib.schedule import formulas
from dtlib.theory.zero import SCHEMES

SHARPNESS = 3


@dataclass(frozen=True)
class Speeds:
    """Coefficients. Efficiencies are shares of what the data sheet says."""

    matrix: float = 0.7  # of the operations a second, in products of matrices
    attention: float = 0.35  # the same in attention
    bandwidth: float = 0.75  # of the memory's bytes a second
    launch: float = 9e-4  # seconds of the host a layer and forward pass; a backward pass is two
    call: float = 1e-4  # seconds of the host a collective, for each doubling of its ranks
    hop: float = 8e-6  # seconds that a message takes at least (alpha), within a node
    hop_outside: float = 3e-5  # and from node to node
    inside: float = 1.5e11  # bytes a second of a GPU within its node
    outside: float = 8e10  # bytes a second of a node to others
    boundary: float = 2e-4  # seconds a micro-batch at a boundary of stages
    hidden: float = 0.0  # share of the data axis' messages that travel while the last backward pass computes
    step: float = 0.01  # seconds a step, whatever it does
    straggle: float = 0.01  # share of the step, for each doubling of nodes


@dataclass(frozen=True)
class Calibration:
    """Speeds fitted on published rows: of which device, how many, from where, between which factors of a prediction
    nine of ten rows lie that were not fitted on, their mean error, and the lowest and highest of what was seen."""

    device: str
    rows: int
    source: str
    error: float
    band: tuple[float, float]
    speeds: Speeds
    seen: dict


@dataclass(frozen=True)
class Work:
    """What the slowest rank does in a step. Ideal seconds are those at the data sheet's operations and bytes a
    second."""

    matrices: float  # ideal seconds a layer and micro-batch
    attention: float
    traffic: float
    head: float  # ideal seconds a micro-batch
    head_traffic: float
    passes: float  # forward passes that a layer's launches are worth
    calls: float  # collectives a layer, times log2 of their ranks
    inside: float  # bytes a layer, over links in the node, or over the node's network
    outside: float
    hops: float  # messages one after the other, a layer
    hops_outside: float
    layers: float
    micro_batches: float
    bubble: float  # micro-batches that would fit into the idle time
    boundaries: float
    boundary_inside: float  # bytes a micro-batch
    boundary_outside: float
    data_inside: float  # bytes a step
    data_outside: float
    data_hops: float
    data_hops_outside: float
    optimizer: float  # ideal seconds a step
    doublings: float  # of nodes


def work(model: Model, plan: Plan, device: Device) -> Work:
    """The amounts. Raises ``PlanError`` for a plan that cannot be."""
    check(model, plan)
    n, h, t, p = tokens_of_rank(model, plan), model.hidden, plan.tensor, passes(plan)
    own = sum(parameters_of_stage(model, plan, 0))
    layers, m = model.layers / plan.pipe, plan.micro_batches
    matrices = 2 * n * (model.attention_parameters + model.active * model.expert_parameters) / t
    core = 4 * n * model.seq * h / t
    once_more = core if plan.recompute == "selective" and not plan.flash else 0
    # Traffic of what is no product of matrices, bytes a forward pass: norms, residuals, activation functions, scores.
    outside_of_products = (16 if model.gated else 22) * n * h / (t if plan.sequence_parallel else 1)
    scores = 0 if plan.flash else 12 * n * model.seq * model.heads / t
    traffic = outside_of_products + 8 * n * model.mlp * model.active / t + scores + 2 * own / layers
    inside, outside, hops, hops_outside, calls = _layer_messages(model, plan, device)
    data = placed(device, plan.gpus, plan.shards, t, data_bytes(model, plan))
    data_hops = 2 * (plan.shards - 1) * (m if plan.zero >= 2 and plan.pipe == 1 else 1)
    boundary = boundary_bytes(model, plan)
    leaves = plan.gpus > device.per_node  # then the GPUs of a node send to the next stage at once
    return Work(
        matrices=p * matrices / device.operations,
        attention=(p * core + once_more) / device.operations,
        traffic=p * traffic / device.bandwidth,
        head=6 * n * model.embedding / t / device.operations,
        head_traffic=(16 * n * model.vocab + 6 * model.embedding) / t / device.bandwidth,
        passes=p, calls=calls, inside=inside, outside=outside, hops=hops, hops_outside=hops_outside,
        layers=layers, micro_batches=m,
        bubble=formulas.idle_over_ideal(plan.schedule, plan.pipe, m, plan.chunks) * m,
        boundaries=plan.chunks if plan.pipe > 1 else 0,
        boundary_inside=0 if leaves else boundary,
        boundary_outside=boundary * device.per_node if leaves else 0,
        data_inside=data[0], data_outside=data[1],
        data_hops=0 if data[1] else data_hops, data_hops_outside=data_hops if data[1] else 0,
        optimizer=2 * SCHEMES[plan.scheme].total * own / (plan.shards if plan.zero else 1) / device.bandwidth,
        doublings=log2(max(1, plan.gpus / device.per_node)),
    )  # fmt: skip


def _layer_messages(model, plan, device):
    """Bytes inside and outside, hops inside and outside, and collectives, of one layer and micro-batch."""
    p, total = passes(plan), [0.0] * 5
    axes = {  # ranks, stride, messages one after the other
        "tensor": (plan.tensor, 1, 2 * (p - 1) * 2 * (plan.tensor - 1)),
        "context": (plan.context, plan.tensor, p * (plan.context - 1)),
        "expert": (plan.expert, plan.tensor * plan.context, 2 * p * (plan.expert - 1)),
    }
    for name, sent in layer_bytes(model, plan).items():
        ranks, stride, hops = axes[name]
        over = placed(device, plan.gpus, ranks, stride, sent)
        total[0] += over[0]
        total[1] += over[1]
        total[3 if over[1] else 2] += hops
        total[4] += 2 * (p - 1) * log2(ranks)
    return total


def parts(done: Work, s: Speeds) -> dict[str, float]:
    """Seconds of a step, by what they are for. Plain arithmetic, so that amounts may also be arrays."""
    gpu = done.matrices / s.matrix + done.attention / s.attention + done.traffic / s.bandwidth
    axes = done.inside / s.inside + done.outside / s.outside + done.hops * s.hop + done.hops_outside * s.hop_outside
    host = done.passes * s.launch + done.calls * s.call
    layer = ((gpu + axes) ** SHARPNESS + host**SHARPNESS) ** (1 / SHARPNESS)
    boundary = done.boundaries * s.boundary + done.boundary_inside / s.inside + done.boundary_outside / s.outside
    head = done.head / s.matrix + done.head_traffic / s.bandwidth
    alone = gpu / (gpu + axes)  # share of the layer that is no message
    data = done.data_inside / s.inside + done.data_outside / s.outside
    data += done.data_hops * s.hop + done.data_hops_outside * s.hop_outside
    slow = 1 + s.straggle * done.doublings
    return {
        "compute": slow * done.micro_batches * (done.layers * layer * alone + head),
        "messages of layers": slow * done.micro_batches * done.layers * layer * (1 - alone),
        "messages of stages": slow * done.micro_batches * boundary,
        "bubble": slow * done.bubble * (done.layers * layer + boundary),
        "messages of data": slow * data * (1 - s.hidden),
        "optimizer and host": slow * (done.optimizer / s.bandwidth + s.step),
    }
