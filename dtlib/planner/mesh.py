"""A plan: the number of GPUs on each axis, and how a step is computed. Impossible plans raise an error.

GPUs        = tensor x context x data x pipe         neighbours in a node: tensor first, pipe last
batch       = micro_batch x micro_batches x data     samples
expert      is a part of the data axis: the experts of a layer are divided among its ranks (as in DeepSpeed and
            Megatron-LM)
"""

from dataclasses import dataclass

from dtlib.planner.model import Model, PlanError, whole
from dtlib.theory.zero import SCHEMES, STAGES

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1")
RECOMPUTE = ("none", "selective", "operators", "full")


@dataclass(frozen=True)
class Plan:
    """One way to divide a model and its batch among GPUs.

    Args:
        data: ranks on the data axis; likewise ``tensor``, ``pipe``, ``context`` and ``expert``.
        zero: the ZeRO stage, as in ``theory.zero``.
        batch: samples per step, on all GPUs.
        micro_batch: samples per micro-batch.
        schedule: of the pipeline, one of ``SCHEDULES``.
        chunks: stages per rank in the interleaved schedule.
        recompute: what the backward pass recomputes. ``none``; ``selective``: the core of attention (``flash`` does so
            anyway); ``operators``: all but every second matrix product and attention, as in torchtitan; ``full``: the
            whole layer, of which only the input is stored.
        sequence_parallel: whether tensor ranks also divide the tokens outside attention and MLP.
        flash: whether attention stores no scores.
        context_algorithm: ``ring`` passes keys and values around; ``ulysses`` exchanges heads for tokens.
        scheme: a key of ``theory.zero.SCHEMES``, the bytes per parameter.
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
        """The number of GPUs; the expert axis is a part of the data axis."""
        return self.data * self.tensor * self.pipe * self.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def shards(self) -> int:
        """The number of ranks with the same parameters, over which ZeRO shards the states."""
        return self.data * self.context

    def __str__(self) -> str:
        axes = ("data", "context", "tensor", "pipe", "expert")
        cut = " x ".join(f"{name} {getattr(self, name)}" for name in axes if getattr(self, name) > 1) or "one GPU"
        zero = f", ZeRO-{self.zero}" if self.zero else ""
        again = f", recompute {self.recompute}" if self.recompute != "none" else ""
        return f"{cut}{zero}, micro-batch {self.micro_batch}{again}"


def check(model: Model, plan: Plan, gpus: int | None = None) -> Plan:
    """Return ``plan`` if it is possible for ``model``, and for ``gpus`` if given.

    Raises:
        PlanError: if numbers do not fit together; the message names them.
    """
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
        raise PlanError(f"{axes} = {plan.gpus} GPUs, but there are {gpus}: the product of the axes must be {gpus}.")
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
            f"A batch of {plan.batch} is not a multiple of data {plan.data} x micro_batch {plan.micro_batch}: use a "
            f"multiple of {plan.data * plan.micro_batch}."
        )
    if plan.schedule == "interleaved" and plan.pipe > 1 and plan.micro_batches % plan.pipe:
        raise PlanError(
            f"{plan.micro_batches} micro-batches are not a multiple of pipe {plan.pipe}, which interleaving needs."
        )
    return plan


def _divides(name: str, ways: int, what: str, amount: int) -> None:
    if amount % ways or not amount:
        give = f"a number that divides {amount}" if amount else "1"
        raise PlanError(f"{name} is {ways}, and {what} are {amount}: give {give}.")


def layers_of_stage(model: Model, plan: Plan, stage: int) -> int:
    """Return the number of layers of a stage; if they do not divide evenly, the first stages have one more."""
    return model.layers // plan.pipe + (stage < model.layers % plan.pipe)
