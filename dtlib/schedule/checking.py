"""Checks that a schedule is complete, in order and free of deadlock, without running it.

A rank runs its list in order. Before an action it waits for the message that the action needs, if that message is from
another rank. After the action it sends the result. Whether a schedule deadlocks depends on the sends:

    lookahead=None    A send never blocks. dtlib runs schedules in this way: its sends are asynchronous.
    lookahead=n       Sends are synchronous: a rank blocks until the receiver has posted the receive. A rank posts the
                      receives of its current action and of the n next actions.

With synchronous sends every message is written into a posted receive. So a schedule that passes this check needs no
buffers of the MPI library. The smallest lookahead with which the schedules of this package pass, for p > 1 and m > 1
(tested up to 6 ranks and 10 micro-batches; with one rank or one micro-batch it is 0):

    gpipe             0
    one_f_one_b       1    0 is the famous deadlock: a rank sends activations down while the next sends gradients up
    zero_bubble_h1    1
    interleaved       1 with m = p; 2 with more, because the first and the last rank exchange messages, too

The result does not depend on the speed of ranks, because an action that can run stays runnable until it runs. So the
check advances one rank at a time until no rank can advance. The remaining actions can never run, and the ranks that
wait form a cycle.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from dtlib.schedule.actions import KINDS, Action, ScheduleError, needs

LOOKAHEAD = 2  # enough for every schedule of orders.py


def validate(
    schedule: Sequence[Sequence[Action]], stages: int | None = None, microbatches: int | None = None,
    lookahead: int | None = LOOKAHEAD,
) -> None:  # fmt: skip
    """Raise ``ScheduleError``, which names the actions, unless ranks can run the schedule.

    Args:
        schedule: one list of actions per rank.
        stages: number of stages of the model; by default taken from the schedule, and at least one per rank.
        microbatches: number of micro-batches of a batch; by default taken from the schedule.
        lookahead: number of next actions whose receives a rank posts, with synchronous sends; None for asynchronous
            sends.
    """
    if not schedule:
        raise ScheduleError("A schedule needs one list of actions for each rank, but this one has no ranks.")
    _refuse_what_is_no_action(schedule)
    highest_stage = max((action.stage for actions in schedule for action in actions), default=0)
    highest_microbatch = max((action.microbatch for actions in schedule for action in actions), default=0)
    stages = max(highest_stage + 1, len(schedule)) if stages is None else stages
    microbatches = highest_microbatch + 1 if microbatches is None else microbatches
    _refuse_incomplete(schedule, stages, microbatches)
    _refuse_out_of_order(schedule)
    for _ in possible_order(schedule, lookahead):
        pass


def possible_order(schedule: Sequence[Sequence[Action]], lookahead: int | None = None) -> Iterator[Action]:
    """Yield all actions of all ranks in one order in which they can run.

    Raises ``ScheduleError`` if ranks deadlock.
    """
    needed = needs(schedule)
    rank_of = {action: rank for rank, actions in enumerate(schedule) for action in actions}
    # Action that sends a message -> rank of the receiver, and index of the receiving action in that rank's list.
    taken_by = {
        need: (rank_of[action], index)
        for actions in schedule
        for index, action in enumerate(actions)
        for need in needed[action]
        if rank_of.get(need) != rank_of[action]
    }
    at = [0] * len(schedule)  # for each rank the index of its current action
    done: set[Action] = set()

    def is_received(action):
        if lookahead is None or action not in taken_by:
            return True
        receiver, index = taken_by[action]
        return index <= at[receiver] + lookahead

    # Advance each rank as far as possible, until no rank advances any more. A synchronous send may block after its
    # action has run, so an action can be done while its rank has not moved on to the next one.
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action not in done:
                    if not done.issuperset(needed[action]):
                        break
                    done.add(action)
                    yield action
                if not is_received(action):
                    break
                at[rank] += 1
                moved = True

    def blocked_on(rank):
        """Return the rank that ``rank`` waits for, and the reason as text."""
        action = schedule[rank][at[rank]]
        if action in done:
            other, index = taken_by[action]
            return other, f"rank {rank} sends {action} until rank {other} receives it for {schedule[other][index]}"
        missing = next(need for need in needed[action] if need not in done)
        other = rank_of[missing]
        return other, f"rank {rank} has come to {action} and waits for {missing} of rank {other}"

    stuck = [rank for rank, actions in enumerate(schedule) if at[rank] < len(actions)]
    if stuck:
        raise ScheduleError(_circle(stuck[0], blocked_on, lookahead))


def _circle(rank, blocked_on, lookahead) -> str:
    """Follow the waits until a rank repeats; return the cycle as text. Each rank that others wait for is stuck, too."""
    passed, sentences = [], []
    while rank not in passed:
        passed.append(rank)
        rank, sentence = blocked_on(rank)
        sentences.append(sentence)
    circle = sentences[passed.index(rank) :]
    sends = any(" sends " in sentence for sentence in circle)
    how = f" (a send waits for its receive, which is posted {lookahead} actions ahead)" if sends else ""
    return f"Ranks wait for each other in a circle{how}: {'; '.join(circle)}."


def _refuse_what_is_no_action(schedule) -> None:
    for rank, actions in enumerate(schedule):
        for action in actions:
            if not isinstance(action, Action) or action.kind not in KINDS or min(action.stage, action.microbatch) < 0:
                raise ScheduleError(
                    f"The list of rank {rank} has {action!r}, which is not an action: write Action(0, 'F', 1), or "
                    f"parse('0F1'); kinds are {', '.join(KINDS)}."
                )


def _refuse_incomplete(schedule, stages: int, microbatches: int) -> None:
    """Refuse a schedule unless each stage runs F, and B or I and W, once per micro-batch, on the stage's rank."""
    ranks = len(schedule)
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.stage >= stages or action.microbatch >= microbatches:
                raise ScheduleError(
                    f"Rank {rank} does {action}, but there are {stages} stages and {microbatches} micro-batches, "
                    "counted from 0."
                )
            if action.stage % ranks != rank:
                raise ScheduleError(
                    f"Rank {rank} does {action}, but stage {action.stage} is on rank {action.stage % ranks}."
                )
        for action, times in Counter(actions).items():
            if times > 1:
                raise ScheduleError(f"Rank {rank} does {action} {times} times.")

    present = {action for actions in schedule for action in actions}
    missing = []
    for stage in range(stages):
        for microbatch in range(microbatches):
            forward, whole, *halves = (Action(stage, kind, microbatch) for kind in KINDS)
            # A backward pass is B, or both I and W. If one half is there, both are needed.
            some_half = next((half for half in halves if half in present), None)
            if whole in present and some_half:
                raise ScheduleError(
                    f"Rank {stage % ranks} does {whole} and {some_half}: a backward pass is whole, or in two halves."
                )
            wanted = [forward, *(halves if some_half else [whole])]
            missing += [action for action in wanted if action not in present]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ScheduleError(
            f"With {stages} stages and {microbatches} micro-batches, the schedule lacks these actions: "
            f"{', '.join(map(str, missing[:3]))}{more}."
        )


def _refuse_out_of_order(schedule) -> None:
    """Refuse a schedule in which a rank runs an action before another action of this rank that it needs."""
    needed = needs(schedule)
    for rank, actions in enumerate(schedule):
        index_of = {action: index for index, action in enumerate(actions)}
        for action in actions:
            for need in needed[action]:
                if index_of.get(need, -1) > index_of[action]:
                    raise ScheduleError(f"Rank {rank} does {action} before {need}, but needs its result.")
