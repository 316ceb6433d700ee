"""A plan: how many GPUs on each axis, and how a step is done; what cannot be is refused with its numbers.

GPUs        = tensor x context x data x pipe         neighbours in a node: tensor first, pipe last
batch       = micro_batch x micro_batches x data     samples
expert      is a part of the data axis: ranks that share out the experts of a layer (as in DeepSpeed and Megatron-LM)
"""

from dataclasses import dataclass

from dtlib.planner.model import Model, PlanError, whole
from dtlib.theory.zero import SCHEMES, STAGES

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1")
RECOMPUTE = ("none", "selective", "operators", "full")


@dataclass(frozen=True)
class Plan:
    """One way to cut a model.

    Args:
        batch: samples of a step, on all GPUs.
        recompute: ``none``; ``selective``: the core of attention (with ``flash`` nothing of it is kept anyway);
            ``operators``: every second matrix product and attention are kept, as torchtitan does;
            ``full``: a layer keeps its input alone.
        scheme: bytes a parameter, a name in ``theory.zero.SCHEMES``. Stages of ZeRO share out as there.
        chunks: stages a rank, of the interleaved schedule.
        flash: attention that keeps no scores.
        context_algorithm: ``ring`` passes keys and values on; ``ulysses`` exchanges heads for tokens.
    """

    data: int = 1
    tensor: int = 1
    pipe: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    batch: int = 1
    micro_batch: int = 1
    schedule: str = "one_f_one_b"
    chunks: int = 1
    recompute: str = "none"
    sequence_parallel: bool = True
    flash: bool = True
    context_algorithm: str = "ring"
    scheme: str = "mixed_adam_float32_gradients"

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipe * self.context

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.data * self.micro_batch)

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shares out: those with the same parameters."""
        return self.data * self.context

    def __str__(self) -> str:
        axes = ("data", "context", "tensor", "pipe", "expert")
        cut = " x ".join(f"{name} {getattr(self, name)}" for name in axes if getattr(self, name) > 1) or "one GPU"
        zero = f", ZeRO-{self.zero}" if self.zero else ""
        again = f", recompute {self.recompute}" if self.recompute != "none" else ""
        return f"{cut}{zero}, micro-batch {self.micro_batch}{again}"


def check(model: Model, plan: Plan, gpus: int | None = None) -> Plan:
    """The same plan, or a ``PlanError`` that says which numbers do not go together."""
    for name in ("data", "tensor", "pipe", "context", "expert", "batch", "micro_batch", "chunks"):
        whole(name, getattr(plan, name))
    for name, known in (
        ("zero", STAGES), ("schedule", SCHEDULES), ("recompute", RECOMPUTE), ("scheme", tuple(SCHEMES)),
        ("context_algorithm", ("ring", "ulysses")),
    ):  # fmt: skip
        if getattr(plan, name) not in known:
            raise PlanError(f"{name} is {getattr(plan, name)!r}: choose one of {', '.join(map(str, known))}.")
    if gpus is not None and plan.gpus != gpus:
        axes = f"data {plan.data} x tensor {plan.tensor} x pipe {plan.pipe} x context {plan.context}"
        raise PlanError(f"{axes} = {plan.gpus} GPUs, and there are {gpus}: the axes multiply to the GPUs.")
    _divides("tensor", plan.tensor, "heads", model.heads)
    _divides("tensor", plan.tensor, "hidden", model.hidden)
    if plan.tensor > 1:
        _divides("tensor", plan.tensor, "the MLP's width", model.mlp)
    if plan.context_algorithm == "ulysses":
        _divides("tensor x context", plan.tensor * plan.context, "heads", model.heads)
    _divides("context", plan.context, "the sequence's tokens", model.seq)
    stages = plan.pipe * plan.chunks
    if stages > model.layers:
        raise PlanError(f"{stages} stages are more than the {model.layers} layers: use at most as many pipe x chunks.")
    if plan.chunks > 1 and (plan.schedule != "interleaved" or plan.pipe == 1):
        raise PlanError(
            f"chunks is {plan.chunks}: only the interleaved schedule of a pipeline has several stages per rank."
        )
    if plan.expert > 1:
        _divides("expert", plan.expert, "the model's experts", model.experts)
        _divides("expert", plan.expert, "the data axis", plan.data)
    if plan.batch % (plan.data * plan.micro_batch):
        raise PlanError(
            f"A batch of {plan.batch} does not divide by data {plan.data} x micro_batch {plan.micro_batch}: "
            f"give a multiple of {plan.data * plan.micro_batch}."
        )
    if plan.schedule == "interleaved" and plan.pipe > 1 and plan.micro_batches % plan.pipe:
        raise PlanError(
            f"{plan.micro_batches} micro-batches are no multiple of pipe {plan.pipe}: interleaving needs one."
        )
    return plan


def _divides(name: str, ways: int, what: str, amount: int) -> None:
    if amount % ways or not amount:
        give = f"a number that divides {amount}" if amount else "1"
        raise PlanError(f"{name} is {ways}, and {what} are {amount}: give {give}.")


def layers_of_stage(model: Model, plan: Plan, stage: int) -> int:
    """Layers of a rank along the pipe axis: as even as can be, the first ranks have one more."""
    return model.layers // plan.pipe + (stage < model.layers % plan.pipe)
