"""Is a schedule complete, in order, and free of deadlock? Found out without a single process.

A rank works off its list in order. Before an action it waits for the message that the action needs, if that comes from
another rank; after it, it sends the result on. How a send behaves decides what is a deadlock:

    lookahead=None    It never waits. This is how dtlib runs schedules: sends are asynchronous.
    lookahead=n       It is synchronous: the rank stays where it is until the receiver has posted the receive. A rank
                      posts the receives of the action that it has come to, and of the n actions after it.

With synchronous sends nothing lies anywhere but in a posted receive, so what passes needs no buffers of an MPI library.
The fewest actions ahead with which the orders of this package pass, for p > 1 and m > 1 (found up to 6 ranks and 10
micro-batches; with one of either it is 0):

    gpipe             0
    one_f_one_b       1    0 is the famous deadlock: a rank sends activations down while the next sends gradients up
    zero_bubble_h1    1
    interleaved       1 with m = p; 2 with more, because messages also go from the last rank to the first and back

What happens is the same whoever is faster: an action that can run stays possible until it does. So ranks are moved on
one after the other until none can move; what has not run then never runs, and whoever waits waits in a circle.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from dtlib.schedule.actions import KINDS, Action, ScheduleError, needs

LOOKAHEAD = 2  # enough for every order of this package


def validate(
    schedule: Sequence[Sequence[Action]], stages: int | None = None, microbatches: int | None = None,
    lookahead: int | None = LOOKAHEAD,
) -> None:  # fmt: skip
    """Raises ``ScheduleError``, with the actions by name, unless ranks can carry out the schedule.

    Args:
        schedule: one list of actions a rank.
        stages: of the whole model, or as many as the schedule has; it has at least one a rank.
        microbatches: of a batch, or as many as the schedule has.
        lookahead: actions ahead for which a rank posts receives while sends are synchronous; None: sends never wait.
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
    """All actions of all ranks, one after the other, in an order in which they can run; each after what it needs.

    Raises ``ScheduleError`` where no rank can move on.
    """
    needed = needs(schedule)
    rank_of = {action: rank for rank, actions in enumerate(schedule) for action in actions}
    # The action that takes the message, and where it stands in the list of its rank.
    taken_by = {
        need: (rank_of[action], index)
        for actions in schedule
        for index, action in enumerate(actions)
        for need in needed[action]
        if rank_of.get(need) != rank_of[action]
    }
    at = [0] * len(schedule)  # the index of the action that each rank has come to
    done: set[Action] = set()

    def is_received(action):
        if lookahead is None or action not in taken_by:
            return True
        receiver, index = taken_by[action]
        return index <= at[receiver] + lookahead

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

    def what_holds_up(rank):
        """The rank that this one waits for, and what for."""
        action = schedule[rank][at[rank]]
        if action in done:
            other, index = taken_by[action]
            return other, f"rank {rank} sends {action} until rank {other} receives it for {schedule[other][index]}"
        missing = next(need for need in needed[action] if need not in done)
        other = rank_of[missing]
        return other, f"rank {rank} has come to {action} and waits for {missing} of rank {other}"

    stuck = [rank for rank, actions in enumerate(schedule) if at[rank] < len(actions)]
    if stuck:
        raise ScheduleError(_circle(stuck[0], what_holds_up, lookahead))


def _circle(rank, what_holds_up, lookahead) -> str:
    """Follows who waits for whom until a rank comes up again: whoever is waited for is stuck itself."""
    passed, sentences = [], []
    while rank not in passed:
        passed.append(rank)
        rank, sentence = what_holds_up(rank)
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
                    f"The list of rank {rank} has {action!r}, which is no action: write Action(0, 'F', 1), or "
                    f"parse('0F1'); kinds are {', '.join(KINDS)}."
                )


def _refuse_incomplete(schedule, stages: int, microbatches: int) -> None:
    """Every stage does F, and B or I and W, of every micro-batch once, on the stage's rank."""
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
                    f"Rank {rank} does {action}, but stage {action.stage} lives on rank {action.stage % ranks}."
                )
        for action, times in Counter(actions).items():
            if times > 1:
                raise ScheduleError(f"Rank {rank} does {action} {times} times.")

    present = {action for actions in schedule for action in actions}
    missing = []
    for stage in range(stages):
        for microbatch in range(microbatches):
            forward, whole, *halves = (Action(stage, kind, microbatch) for kind in KINDS)
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
            f"Of {stages} stages and {microbatches} micro-batches these are never done: "
            f"{', '.join(map(str, missing[:3]))}{more}."
        )


def _refuse_out_of_order(schedule) -> None:
    """On one rank, an action comes after what it needs."""
    needed = needs(schedule)
    for rank, actions in enumerate(schedule):
        index_of = {action: index for index, action in enumerate(actions)}
        for action in actions:
            for need in needed[action]:
                if index_of.get(need, -1) > index_of[action]:
                    raise ScheduleError(f"Rank {rank} does {action} before {need}, whose result it needs.")
