"""Simulation of a schedule: when each action runs, idle time, and number of stored activations.

An action starts as soon as its rank has finished the previous action and its inputs have arrived. The model assumes
asynchronous sends and a network without congestion. Any number of messages are in flight while ranks compute, and a
send costs the sender no time. The model leaves out the optimizer, the all-reduce of gradients, and ranks that share
cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtlib.schedule.actions import Action, ScheduleError, needs
from dtlib.schedule.checking import possible_order, validate

Time = float | dict[int, float] | Callable[[int], float]


@dataclass(frozen=True, repr=False)
class Simulation:
    """Result of ``simulate``; times are in the unit of its arguments, and the step begins at 0.

    The literature calls two figures bubble. Only the first is never above 1. Always say which one you mean:

        bubble            idle time / makespan     the fraction of the step that is lost: GPipe (p-1)/(m+p-1)
        idle_over_ideal   idle time / busy time    how much longer than ideal:         GPipe (p-1)/m
    """

    schedule: Sequence[Sequence[Action]]
    start: dict[Action, float]
    end: dict[Action, float]

    @property
    def makespan(self) -> float:
        """The end of the last action of all ranks."""
        return max(self.end.values())

    @property
    def busy(self) -> list[float]:
        """Time that each rank computes."""
        return [sum(self.end[action] - self.start[action] for action in actions) for actions in self.schedule]

    @property
    def bubble_of_ranks(self) -> list[float]:
        """(makespan - busy) / makespan of each rank."""
        return [1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The mean of ``bubble_of_ranks``."""
        return sum(self.bubble_of_ranks) / len(self.schedule)

    @property
    def idle_over_ideal(self) -> float:
        """Idle time of all ranks over their busy time. Without idle time the step would take the mean busy time."""
        busy = sum(self.busy)
        return len(self.schedule) * self.makespan / busy - 1 if busy else 0.0

    @property
    def peak_activations(self) -> list[int]:
        """Peak number of stored activations on each rank; see the function ``peak_activations``."""
        return peak_activations(self.schedule)

    def __repr__(self) -> str:
        peaks = ", ".join(map(str, self.peak_activations))
        return f"<Simulation: makespan {self.makespan:g}, bubble {self.bubble:.1%}, peak activations {peaks}>"


def simulate(
    schedule: Sequence[Sequence[Action]], forward: Time = 1.0, backward: Time = 2.0, input_gradient: Time | None = None,
    weight_gradient: Time | None = None, message: float = 0.0,
) -> Simulation:  # fmt: skip
    """Simulate a schedule in which every rank starts each action as early as possible.

    Args:
        forward, backward, input_gradient, weight_gradient: times of F, B, I and W: a number, a dictionary by stage, or
            a function of the stage. By default I and W each take half of B.
        message: time from the end of an action until its result has arrived on another rank.

    Raises:
        ScheduleError: if the schedule is not valid, a stage has no time, or a time is negative.
    """
    validate(schedule, lookahead=None)
    if message < 0:
        raise ScheduleError(f"A message takes {message!r}; a time cannot be negative.")

    def half_of_backward(stage):
        return _at(backward, stage) / 2

    times = {
        "F": forward,
        "B": backward,
        "I": half_of_backward if input_gradient is None else input_gradient,
        "W": half_of_backward if weight_gradient is None else weight_gradient,
    }
    needed, ranks = needs(schedule), len(schedule)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    free = [0.0] * ranks  # the end of each rank's previous action
    # One pass is enough, because in this order the inputs of an action are always computed before it.
    for action in possible_order(schedule):
        rank = action.stage % ranks
        arrivals = [end[need] + (message if need.stage % ranks != rank else 0.0) for need in needed[action]]
        start[action] = max([free[rank], *arrivals])
        end[action] = free[rank] = start[action] + _at(times[action.kind], action.stage)
    return Simulation(schedule, start, end)


def peak_activations(schedule: Sequence[Sequence[Action]]) -> list[int]:
    """Return for each rank the peak number of stored activations, from the start of F to the end of B or W.

    The unit is the activations of one stage for one micro-batch, so with v stages per rank a unit has 1/v of the size.
    A real rank can free some activations between I and W; here all count until W. The result depends on the order of
    actions only, not on their times.
    """
    peaks = []
    for actions in schedule:
        held = peak = 0
        for action in actions:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def _at(time: Time, stage: int) -> float:
    if isinstance(time, dict) and stage not in time:
        raise ScheduleError(f"Stage {stage} has no time: give one besides {', '.join(map(str, time)) or 'none'}.")
    value = time[stage] if isinstance(time, dict) else time(stage) if callable(time) else time
    if value < 0:
        raise ScheduleError(f"An action of stage {stage} takes {value!r}; a time cannot be negative.")
    return value
