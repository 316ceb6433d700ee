"""Seconds per step, from the amount of work (operations, bytes, messages) and measured speeds.

    layer    = soft maximum of two times (p-norm with p = 3): GPU time, which is matrices + attention + memory traffic
               + messages of its axes; and the host's time to launch it. Small layers wait for the host
    stage    = layers x layer + messages at its boundary
    step     = micro-batches x (stage + head) + bubble x stage + messages of the data axis that are not hidden
               + optimizer + a constant, all times 1 + straggle x log2(nodes)

Every term is an amount from closed formulas (``Work``), and a coefficient with a unit (``Speeds``) from a calibration.
Axes fill a node in this order: tensor first, then context, data, pipe.
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
    """Coefficients. Efficiencies are fractions of the data sheet's numbers."""

    matrix: float = 0.7  # efficiency of matrix products (operations per second)
    attention: float = 0.35  # efficiency of attention (operations per second)
    bandwidth: float = 0.75  # efficiency of memory (bytes per second)
    launch: float = 9e-4  # seconds of the host per layer and forward pass; a backward pass takes twice as long
    call: float = 1e-4  # seconds of the host per collective, for each doubling of its ranks
    hop: float = 8e-6  # latency of a message in seconds (alpha), within a node
    hop_outside: float = 3e-5  # latency of a message in seconds, between nodes
    inside: float = 1.5e11  # bytes per second of a GPU within its node
    outside: float = 8e10  # bytes per second of a node to other nodes
    boundary: float = 2e-4  # seconds per micro-batch at a boundary of stages
    hidden: float = 0.0  # fraction of the data axis' messages that overlap with the last backward pass
    step: float = 0.01  # constant seconds per step
    straggle: float = 0.01  # fraction of the step that is added for each doubling of nodes


@dataclass(frozen=True)
class Calibration:
    """Speeds that were fitted on published measurements (rows).

    Args:
        device: the GPU, a key of ``DEVICES``.
        rows: the number of rows.
        source: the publication.
        error: the mean error on rows that were not used for the fit.
        band: nine of ten of those rows are between these factors of the prediction.
        speeds: the coefficients.
        seen: for each field of a plan, the lowest and the highest value in the rows.
    """

    device: str
    rows: int
    source: str
    error: float
    band: tuple[float, float]
    speeds: Speeds
    seen: dict


@dataclass(frozen=True)
class Work:
    """The work of the slowest rank in a step. "Ideal seconds" are at the data sheet's speed.

    ``..._outside`` amounts are sent between nodes, and ``..._inside`` within a node.
    """

    # Per layer and micro-batch.
    matrices: float  # ideal seconds
    attention: float  # ideal seconds
    traffic: float  # ideal seconds of memory traffic
    # Per micro-batch.
    head: float  # ideal seconds
    head_traffic: float  # ideal seconds of memory traffic
    # Per layer and micro-batch.
    passes: float  # kernel launches; a forward pass is 1
    calls: float  # the sum of log2(ranks) over collectives
    inside: float  # bytes
    outside: float  # bytes
    hops: float  # sequential messages
    hops_outside: float
    # Per step.
    layers: float
    micro_batches: float
    bubble: float  # idle time, in units of micro-batches
    boundaries: float
    boundary_inside: float  # bytes per micro-batch
    boundary_outside: float
    data_inside: float  # bytes
    data_outside: float
    data_hops: float
    data_hops_outside: float
    optimizer: float  # ideal seconds
    log2_nodes: float  # log2 of the number of nodes


def work(model: Model, plan: Plan, device: Device) -> Work:
    """Return the amounts of work of a plan.

    Raises:
        PlanError: if the plan is impossible.
    """
    check(model, plan)
    n, h, t, p = tokens_of_rank(model, plan), model.hidden, plan.tensor, passes(plan)
    own = sum(parameters_of_stage(model, plan, 0))
    layers, m = model.layers / plan.pipe, plan.micro_batches
    matrices = 2 * n * (model.attention_parameters + model.active * model.expert_parameters) / t
    core = 4 * n * model.seq * model.width / t
    once_more = core if plan.recompute == "selective" and not plan.flash else 0
    # Memory traffic outside matrix products, in bytes per forward pass: norms, residuals, activation functions, scores.
    outside_of_products = (16 if model.gated else 22) * n * h / (t if plan.sequence_parallel else 1)
    scores = 0 if plan.flash else 12 * n * model.seq * model.heads / t
    traffic = outside_of_products + 8 * n * model.mlp * model.active / t + scores + 2 * own / layers
    inside, outside, hops, hops_outside, calls = _layer_messages(model, plan, device)
    data = placed(device, plan.gpus, plan.shards, t, data_bytes(model, plan))
    data_hops = 2 * (plan.shards - 1) * (m if plan.zero >= 2 and plan.pipe == 1 else 1)
    boundary = boundary_bytes(model, plan)
    # The pipe axis is the last to fill a node. If there are several nodes, all GPUs of a node send to the next node at
    # the same time.
    leaves = plan.gpus > device.per_node
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
        log2_nodes=log2(max(1, plan.gpus / device.per_node)),
    )  # fmt: skip


def _layer_messages(model, plan, device):
    """Return bytes inside and outside, hops inside and outside, and calls, for one layer and micro-batch."""
    p, total = passes(plan), [0.0] * 5
    axes = {  # number of ranks, stride, sequential messages
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
    """Return the seconds of a step by purpose. Only plain arithmetic is used, so the amounts may be arrays."""
    gpu = done.matrices / s.matrix + done.attention / s.attention + done.traffic / s.bandwidth
    axes = done.inside / s.inside + done.outside / s.outside + done.hops * s.hop + done.hops_outside * s.hop_outside
    host = done.passes * s.launch + done.calls * s.call
    layer = ((gpu + axes) ** SHARPNESS + host**SHARPNESS) ** (1 / SHARPNESS)
    boundary = done.boundaries * s.boundary + done.boundary_inside / s.inside + done.boundary_outside / s.outside
    head = done.head / s.matrix + done.head_traffic / s.bandwidth
    alone = gpu / (gpu + axes)  # the fraction of a layer's time without messages
    data = done.data_inside / s.inside + done.data_outside / s.outside
    data += done.data_hops * s.hop + done.data_hops_outside * s.hop_outside
    slow = 1 + s.straggle * done.log2_nodes
    return {
        "compute": slow * done.micro_batches * (done.layers * layer * alone + head),
        "messages of layers": slow * done.micro_batches * done.layers * layer * (1 - alone),
        "messages of stages": slow * done.micro_batches * boundary,
        "bubble": slow * done.bubble * (done.layers * layer + boundary),
        "messages of data": slow * data * (1 - s.hidden),
        "optimizer and host": slow * (done.optimizer / s.bandwidth + s.step),
    }
