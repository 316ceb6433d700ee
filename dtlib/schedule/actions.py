"""The actions of a rank in a pipeline schedule, and their dependencies.

A model is split into stages, and a batch into micro-batches. With p ranks, stage s is on rank s % p.

    F    forward                        needs F of the previous stage
    B    full backward                  needs F of its own stage, and B (or I) of the next stage
    I    gradient of the input          needs the same as B; the previous stage waits for I, not for W
    W    gradients of the weights       needs I of its own stage; no other action needs it

The letters and the notation are from ``torch.distributed.pipelining``.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from dtlib.errors import DtlibError

KINDS = ("F", "B", "I", "W")


class ScheduleError(DtlibError):
    """Error for a schedule that cannot be made, or that ranks cannot run."""


class Action(NamedTuple):
    """One action of one rank; it prints as ``0F1`` for stage 0, forward, micro-batch 1."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)


def parse(text: str) -> Action:
    """Return the action that prints as ``text``; raises ``ScheduleError`` for any other text."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip(), re.ASCII)
    if not match:
        raise ScheduleError(f"{text!r} is not an action, such as 0F1: stage, kind (F, B, I or W), micro-batch.")
    return Action(int(match[1]), match[2], int(match[3]))


def needs(schedule: Iterable[Iterable[Action]]) -> dict[Action, list[Action]]:
    """Return for each action of the schedule the actions whose results it needs.

    Results from other ranks arrive as messages. An action needs at most one message: F needs activations from the
    previous stage, and B and I need gradients from the next stage.
    """
    present = {action for actions in schedule for action in actions}
    last = max((action.stage for action in present), default=0)

    def backward_of(stage, microbatch):
        halved = Action(stage, "I", microbatch)
        return halved if halved in present else Action(stage, "B", microbatch)

    def of(action):
        stage, kind, microbatch = action
        if kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
        if kind == "W":
            return [Action(stage, "I", microbatch)]
        gradient = [backward_of(stage + 1, microbatch)] if stage < last else []
        return [Action(stage, "F", microbatch), *gradient]

    return {action: of(action) for actions in schedule for action in actions}
