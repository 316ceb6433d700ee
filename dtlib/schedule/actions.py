"""What a rank can do with a micro-batch, and what it needs for it.

A model is cut into stages, and a batch into micro-batches. With p ranks, stage s lives on rank s % p.

    F    forward                        needs F of the stage before
    B    backward, all of it            needs F of its own stage, and B (or I) of the stage behind
    I    the gradient of the input      needs the same as B; its result is all that the stage before waits for
    W    the gradients of the weights   needs I of its own stage; nobody waits for it

The letters, and the way in which actions are written, are those of ``torch.distributed.pipelining``.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from dtlib.errors import DtlibError

KINDS = ("F", "B", "I", "W")


class ScheduleError(DtlibError):
    """A schedule that cannot be made, or that ranks cannot carry out."""


class Action(NamedTuple):
    """One piece of work, which prints as ``0F1``: stage 0, forward, micro-batch 1."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)


def parse(text: str) -> Action:
    """The action that prints as ``text``."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip(), re.ASCII)
    if not match:
        raise ScheduleError(f"{text!r} is no action; one is a stage, a kind of F, B, I, W, and a micro-batch: 0F1.")
    return Action(int(match[1]), match[2], int(match[3]))


def needs(schedule: Iterable[Iterable[Action]]) -> dict[Action, list[Action]]:
    """For each action of the schedule, the actions whose results it needs: those of other ranks come as messages.

    It is one message at most, because two neighbours of a stage send it different things: activations come from the
    stage before, gradients from the one behind.
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
