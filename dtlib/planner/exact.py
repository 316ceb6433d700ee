"""What dtlib's own strategies hold and send, to the byte, from the sizes of a model's parameters.

    ranks          stage = rank % pipe, place on the data axis = rank // pipe
    states         theory.zero: one flat buffer up to stage 2, one a unit at stage 3
    data           theory.zero: rings; at stage 0 a flag a parameter and one more travel behind the gradients
    pipe           a stage sends its outputs forward and the gradients of its inputs backward, for each micro-batch

Headers, losses and other scalars are not in it: a trace has them as messages of their own.
"""

from dtlib.planner.mesh import Plan
from dtlib.planner.model import PlanError
from dtlib.theory.zero import zero_bytes, zero_wire_elements

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
    if len(stages) != plan.pipe or len(boundaries) != plan.pipe - 1:
        raise PlanError(
            f"{len(stages)} stages with {len(boundaries)} boundaries for pipe {plan.pipe}: give all of them."
        )
    stage, place = rank % plan.pipe, rank // plan.pipe
    units = [sum(unit) for unit in stages[stage]]
    flat = units if plan.zero == 3 else [sum(units)]
    tensors = sum(map(len, stages[stage]))
    travels = [sum(units) + tensors + 1] if plan.zero == 0 else flat
    data = zero_wire_elements(travels, plan.data, plan.zero, plan.micro_batches, rank=place) if plan.data > 1 else 0
    samples = plan.micro_batch * plan.micro_batches
    forward = boundaries[stage] if stage < plan.pipe - 1 else 0
    backward = boundaries[stage - 1] if stage else 0
    return {
        "held": zero_bytes(flat, plan.data, plan.zero, scheme, place),
        "sent": {"data": ELEMENT * data, "pipe": ELEMENT * samples * (forward + backward)},
    }
