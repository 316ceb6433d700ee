"""Bytes on a GPU: model states, activations, logits, and temporary buffers.

Let n be the tokens of a micro-batch on a rank, t the number of tensor ranks, and k the width of keys and values. With
sequence parallelism o = t, otherwise o = 1. Symbols h, f, a, s and V are those of model.py. A layer stores these bytes
for the backward pass (16-bit numbers):

    GPT      n h 10/o + n (2 (h + 2 k) + 2 h + 4 f)/t  =  n h (10/o + 24/t) with f = 4 h      and scores
    Llama    n h  8/o + n (2 (h + 2 k) + 2 h + 8 f)/t                                           and scores
    scores   5 a s n / t without flash attention, unless they are recomputed ("selective")
    operators  n (2 h/o + 2 (2 h + k + f)/t + 2 h/o): the input, and every second product
    full     n 2 h / o: the input

The GPT formulas are table 2 of V. Korthikanti et al., "Reducing activation recomputation in large transformer models",
arXiv:2205.05198. A rank of a pipeline stores this for each micro-batch in flight (schedule/formulas.py). Other memory:

    logits    n V/t elements on the last stage: in 16 bits, in 32 bits, their log-softmax and its gradient, each a new
              block of the allocator: 2 + 4 + 4 + 4 bytes. With tensor ranks also exponentials, 4 bytes, and the
              gathered input, 2 n h
    working   one layer without recomputation; with sequence parallelism also two gathered inputs, 4 n h
    gathered  ZeRO-3: the unsharded units: two layers, or the head and a layer. In a pipeline all units, their 32-bit
              gradients until the last micro-batch, as in torchtitan, and one layer's gradients in flight
    messages  of a pipeline: buffers for each micro-batch in both directions, and outputs in flight, 2 n h/o each
"""

from dataclasses import dataclass

from dtlib.planner.mesh import Plan, check, layers_of_stage
from dtlib.planner.model import GIB, Model
from dtlib.schedule import formulas
from dtlib.theory.zero import zero_bytes

LOGIT = 14  # bytes per logit without tensor ranks: 2 + 4 + 4 + 4


@dataclass(frozen=True)
class Memory:
    """The bytes on the rank of the pipe axis that needs the most memory; ``stage`` is this rank's stage."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    working: float
    logits: float
    messages: float

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All bytes."""
        return self.states + self.gathered + self.activations + self.working + self.logits + self.messages

    def parts(self) -> dict[str, float]:
        """Return the bytes by name, the largest first."""
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "stage"}
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {held / GIB:.1f}" for name, held in self.parts().items() if held >= GIB / 20)
        return f"{self.total / GIB:.1f} GiB ({parts})"


def tokens_of_rank(model: Model, plan: Plan) -> float:
    """Return the number of tokens of a micro-batch on a rank."""
    return plan.micro_batch * model.seq / plan.context


def layer_activations(model: Model, plan: Plan, recompute: str | None = None) -> float:
    """Return the bytes that one layer stores on a rank for the backward pass of one micro-batch."""
    recompute = recompute or plan.recompute
    n, h, t, k, w = tokens_of_rank(model, plan), model.hidden, plan.tensor, model.kv_width, model.width
    outside = t if plan.sequence_parallel else 1
    width = model.mlp * model.active
    if recompute == "full":
        return 2 * n * h / outside
    if recompute == "operators":
        return 4 * n * h / outside + 2 * n * (2 * w + k + width) / t
    scores = 0 if plan.flash or recompute == "selective" else 5 * model.heads * model.seq * n / t
    inside = 2 * (w + 2 * k) + 2 * w + (8 if model.gated else 4) * width
    return n * h * (8 if model.gated else 10) / outside + n * inside / t + scores


def parameters_of_stage(model: Model, plan: Plan, stage: int) -> tuple[int, int]:
    """Return the numbers of parameters on a rank before ZeRO shards them: shared parameters, and its experts'.

    All ranks of the data axis have the shared parameters. With ``expert=1`` these include the experts.
    """
    layers, t = layers_of_stage(model, plan, stage), plan.tensor
    first, last = stage == 0, stage == plan.pipe - 1
    norms = 2 * model.hidden
    dense = layers * (model.attention_parameters // t + norms + (model.vectors - norms) // t)
    mlps = layers * max(1, model.experts) * model.expert_parameters // t
    ends = first + (last and not (first and model.tied))
    positions = 0 if model.gated or not first else model.seq * model.hidden
    dense += ends * -(-model.vocab // t) * model.hidden + positions
    return (dense, mlps // plan.expert) if plan.expert > 1 else (dense + mlps, 0)


def states(model: Model, plan: Plan, stage: int = 0) -> dict[str, int]:
    """Return the bytes of model states on the first rank of a stage, by kind (``theory.zero``)."""
    dense, experts = parameters_of_stage(model, plan, stage)
    held = zero_bytes(dense, plan.shards, plan.zero, plan.scheme)
    if experts:
        own = zero_bytes(experts, max(1, plan.shards // plan.expert), plan.zero, plan.scheme)
        held = {name: held[name] + own[name] for name in held}
    return held


def memory(model: Model, plan: Plan) -> Memory:
    """Return the memory of the rank that needs the most.

    Raises:
        PlanError: if the plan is impossible.
    """
    check(model, plan)
    # The first stage has the most micro-batches in flight, and the last one has the logits. The stages between them
    # need less than the first.
    return max((_of_stage(model, plan, stage) for stage in {0, plan.pipe - 1}), key=lambda held: held.total)


def _of_stage(model, plan, stage) -> Memory:
    held, n = states(model, plan, stage), tokens_of_rank(model, plan)
    in_flight = (
        formulas.peak_activations(plan.schedule, plan.pipe, plan.micro_batches, plan.chunks, stage) / plan.chunks
    )
    cut = plan.tensor > 1
    gathers = cut and plan.sequence_parallel
    block = 2 * n * model.hidden / (plan.tensor if plan.sequence_parallel else 1)
    logit = (LOGIT + 4 * cut) * model.vocab / plan.tensor + 2 * gathers * model.hidden
    return Memory(
        stage=stage,
        parameters=held["parameters"] + held["padding"],
        gradients=held["gradients"],
        optimizer=held["master_weights"] + held["optimizer_states"],
        gathered=_gathered(model, plan, stage),
        activations=in_flight * layers_of_stage(model, plan, stage) * layer_activations(model, plan),
        working=layer_activations(model, plan, "none") + (4 * n * model.hidden if gathers else 0),
        logits=n * logit if stage == plan.pipe - 1 else 0,
        messages=(2 * plan.micro_batches + in_flight) * block if plan.pipe > 1 else 0,
    )  # fmt: skip


def _gathered(model, plan, stage) -> float:
    if plan.zero < 3:
        return 0
    layer = model.layer_parameters / plan.tensor
    if plan.pipe > 1:
        return 6 * (sum(parameters_of_stage(model, plan, stage)) + layer)
    return 2 * (layer + max(layer, model.embedding / plan.tensor))
