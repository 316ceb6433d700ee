"""Lesson 07, the schedule puzzle, without ranks: check and score of schedules typed by hand.

``validate`` checks a schedule, and ``simulate`` scores it against par, the shortest possible time.
"""

import re
from collections import Counter
from dataclasses import dataclass

from dtlib.lab.checks.exercise import Exercise, Score, Wrong, rows
from dtlib.lab.tables import WIDEST
from dtlib.schedule import Action, ScheduleError, Simulation, draw, peak_activations, simulate, validate

STAGES, MICROBATCHES = 4, 8
HALVES = ("F", "I", "W")
TOKEN = re.compile(r"(\d*)([FBIW])(\d+)(?:-(\d+))?", re.ASCII)
LABEL = re.compile(r"\s*(?:rank\s*(\d+)\s*:?|(\d+)\s*:)(?=\s)", re.ASCII | re.IGNORECASE)
HOW = 'Write one line per rank, such as "F0-3 B0 F4 B1": a kind, and a micro-batch or a range of them.'
APART = "Write a blank between two actions, F0 B0, and a hyphen in a range, F0-3; # starts a comment."
FOUR = "Write four lines, rank 0 first. Empty lines and comments do not count. Two lines with `rank 1:` count as one."
HALF = "I and W are the two halves of B: a level uses either B, or both halves."
COUNTED = ("Micro-batches are counted from 0.", "Eight micro-batches are 0 to 7: F0-7.")


@dataclass(frozen=True)
class Level:
    """A level of the puzzle: at most ``activations`` per rank. ``par`` is proven optimal in the tests."""

    name: str
    activations: int
    par: int
    kinds: tuple = ("F", "B")
    hints: tuple = ()


LEVELS = {
    1: Level("puzzle", 8, 33, hints=("The last rank can work without a break. Does it wait between two of its actions?",
                                     "All forward passes, then all backward passes, on every rank.")),
    2: Level("puzzle_2", 4, 33, hints=(
        "If two actions are possible, for which one does another rank wait?",
        "After as many forward passes as there are ranks from this one to the last, do a backward pass.",
        "Rank r starts with 4 - r forward passes; then backward and forward passes alternate.",
    )),
    3: Level("puzzle_3", 3, 39, hints=(
        "How long does rank 0 keep an activation, from F0 to the end of B0? It may keep three.",
        "Rank 0 starts with three F, and then B and F alternate; on rank 3 F and B alternate. Ranks 1 and 2 may also "
        "keep three activations: an early F there keeps rank 3 busy.",
        "Rank 2 does F0-2 B0-2 F3 F4 B3 F5 B4 B5 F6 F7 B6 B7. What can rank 1 do?",
    )),
    4: Level("puzzle_4", 4, 27, HALVES, hints=(
        "The rank before waits only for I. Can W run later, when its rank would be idle?",
        "Rank 0 must not lose time at the end of I7. Its W can run later, but before a fifth activation is kept.",
        "Start with 1F1B, write I for B, and on rank r put the W of a micro-batch after r more I.",
    )),
}


# Observation


def observe(answer, comm=None):
    """Return the answer as one line of text per rank, or a description if it is no schedule."""
    if isinstance(answer, str):
        lines = answer.splitlines()
    elif isinstance(answer, dict):
        lines = [answer[key] for key in sorted(answer, key=str)]
    elif isinstance(answer, (list, tuple)):
        lines = answer
    else:
        return f"{answer!r:.60}"
    of_rank = {}
    for line in lines:
        line = " ".join(map(str, line)) if isinstance(line, (list, tuple)) else str(line)
        label, words = LABEL.match(line), _words(LABEL.sub("", line))
        if words:
            rank = int(label[1] or label[2]) if label else len(of_rank)
            of_rank[rank] = f"{of_rank.get(rank, '')} {words}".strip()
    return [of_rank[rank] for rank in sorted(of_rank)]


def _words(line: str) -> str:
    """Return the actions without comments and drawing characters, so that a drawing may be pasted."""
    return " ".join(word for word in re.split(r"[\s,;]+", re.sub(r"#.*", "", line)) if word.strip("-."))


def actions_of(lines: list[str]) -> list[list[Action]]:
    """Return ``["F0-1 B0 B1", ...]`` as a schedule in which rank r has stage r.

    Raises ``Wrong`` for text that cannot be read.
    """
    schedule = []
    for rank, line in enumerate(lines):
        actions = []
        for word in line.split():
            match = TOKEN.fullmatch(word.upper())
            wrong = rows(rank)
            if not match:
                got = f"`{word}`"
                wrong("unreadable", True, "words such as F0, B3, or F0-3 for four of them", got, HOW, APART)
            stage, kind, first, last = match.groups()
            wrong("other-stage", stage and int(stage) != rank, f"actions of stage {rank}, which is on rank {rank}",
                  f"`{word}`", "The first number is the stage. You can omit it.",
                  "Line r is the line of rank r, and rank r has stage r: write F3, not 1F3 of another rank.")
            first, last = int(first), int(last or first)
            step = 1 if last >= first else -1
            # Limited, so that F0-999999999 gives an error at once.
            for microbatch in range(first, last + step, step)[: 2 * MICROBATCHES]:
                actions.append(Action(rank, kind, microbatch))
        schedule.append(actions)
    return schedule


# Checks


def picture(observations):
    """Return a drawing of the answer if ranks can run it, else an empty text."""
    try:
        return Drawn(simulate(actions_of(observations[0])))
    except (Wrong, ScheduleError):
        return ""


@dataclass(frozen=True)
class Drawn:
    """A schedule as text, or as the figure of the lecture on a page."""

    simulation: Simulation

    def __str__(self):
        return draw(self.simulation, widest=WIDEST)

    def _repr_html_(self):
        from dtlib.lessons.l07.figures import picture

        return picture.drawn({"Yours": self.simulation})._repr_html_()


def exercise(level: int) -> Exercise:
    """Return the exercise for a level; it needs no ranks."""
    rules = LEVELS[level]
    return Exercise(rules.name, observe, lambda seen: _judge(rules, seen[0]), picture, needs_ranks=False)


def _judge(level: Level, lines) -> Score:
    """Check completeness, order, deadlock, memory and time; return the score."""
    return _judge_score(level, schedule_of(level, lines))


def schedule_of(level: Level, lines) -> list[list[Action]]:
    """Return the schedule of ``lines``; raise ``Wrong`` if it is incomplete, out of order or deadlocks."""
    wrong = rows(None)
    wrong("unreadable", isinstance(lines, str), f"{level.name}: text with one line per rank, or a list of lines", lines,
          HOW, FOUR)
    wrong("ranks", len(lines) != STAGES, f"{STAGES} lines, one per rank", f"{len(lines)} lines", FOUR, HOW)
    schedule = actions_of(lines)
    _judge_complete(level, schedule)
    _judge_order(schedule)
    return schedule


def _judge_complete(level: Level, schedule) -> None:
    """Check that every rank runs each kind of action once for each micro-batch."""
    for rank, actions in enumerate(schedule):
        times = Counter(actions)
        other = next((action for action in times if action.kind not in level.kinds), None)
        if other:
            kinds = f"only {', '.join(level.kinds)} in this level"
            raise Wrong("other-kind", rank, kinds, _short(other), HALF, f"Write {_all_kinds(level)}.")
        wanted = {Action(rank, kind, microbatch) for microbatch in range(MICROBATCHES) for kind in level.kinds}
        unknown = next((action for action in times if action not in wanted), None)
        if unknown:
            numbers = f"micro-batches 0 to {MICROBATCHES - 1}"
            raise Wrong("unknown-microbatch", rank, numbers, _short(unknown), *COUNTED)
        twice = next((action for action in times if times[action] > 1), None)
        if twice:
            got = f"{_short(twice)} {times[twice]} times"
            raise Wrong("twice", rank, "each action once", got, *_leave_out(_short(twice)))
        missing = sorted(wanted - set(times), key=lambda action: (level.kinds.index(action.kind), action.microbatch))
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            got = f"without {', '.join(map(_short, missing[:3]))}{more}"
            expected = f"{', '.join(level.kinds)} of all {MICROBATCHES} micro-batches"
            raise Wrong("missing-action", rank, expected, got, *_left_out(level, missing[0]))


def _judge_order(schedule) -> None:
    """Turn an error of ``validate`` into a named mistake."""
    said = _said_of(schedule)
    if not said:
        return
    for rank, actions in enumerate(schedule):
        place = {action: i for i, action in enumerate(actions)}
        for action in actions:
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            need = before and Action(rank, before, action.microbatch)
            if need and place[need] > place[action]:
                raise Wrong("before-its-forward" if before == "F" else "before-its-half", rank,
                            f"{_short(need)} before {_short(action)}", f"{_short(action)} first",
                            said, f"On this line {_short(need)} must be to the left of {_short(action)}.")
    raise Wrong("deadlock", None, "orders without a deadlock between ranks", said,
                "Each line is in order. But for which action does each rank wait, and which rank must do it?",
                "If a rank does F1 before B0, all ranks before it must do so too, because its F1 needs their F1.")


def _judge_score(level: Level, schedule) -> Score:
    simulation, peaks = simulate(schedule), peak_activations(schedule)
    most = max(peaks)
    score = (
        f"makespan {simulation.makespan:g}, par {level.par}; bubble {simulation.bubble:.0%}; "
        f"{most} activation{'s' * (most > 1)}"
    )
    if most > level.activations:
        rank = peaks.index(most)
        raise Wrong("too-many-activations", rank, f"at most {level.activations} activations on any rank",
                    f"{most} on this one ({score})",
                    f"An activation is kept from F to the end of {level.kinds[-1]}: read the line from the left and "
                    "count.", f"After {level.activations} forward passes the next action must be a {level.kinds[-1]}.")
    found = Score(simulation.makespan, level.par, "forward passes", f"{score[0].upper()}{score[1:]}.")
    if simulation.makespan > level.par:
        expected = f"makespan {level.par} (par), with this number of activations"
        raise Wrong("over-par", None, expected, score, *_orders_that_differ(schedule), *level.hints, score=found)
    return found


def _orders_that_differ(schedule) -> list[str]:
    """Return a hint if two neighbours run micro-batches in different orders, so that they deadlock."""
    for rank in range(STAGES - 1):
        for kind in ("F", "B", "I"):
            mine, next_ones = (
                ", ".join(str(action.microbatch) for action in schedule[at] if action.kind == kind)
                for at in (rank, rank + 1)
            )
            if mine != next_ones:
                return [
                    f"Rank {rank} takes {kind} in the order {mine}, and rank {rank + 1} in the order {next_ones}: "
                    "which of them waits for the other?"
                ]
    return []


def _said_of(schedule) -> str:
    try:
        validate(schedule, STAGES, MICROBATCHES, lookahead=None)
    except ScheduleError as error:
        return str(error)
    return ""


def _all_kinds(level: Level) -> str:
    return f"{', '.join(level.kinds[:-1])} and {level.kinds[-1]}"


def _leave_out(action: str) -> tuple:
    return f"Remove one {action}: is it in a range?", "F0-3 contains F0, F1, F2 and F3: continue with F4."


def _left_out(level: Level, first: Action) -> tuple:
    return (f"Each rank does {_all_kinds(level)} of all of them.",
            f"Where should {_short(first)} be on this line? A range includes both ends: F0-7 are eight.")


def _short(action: Action) -> str:
    return f"{action.kind}{action.microbatch}"


EXERCISES = {
    "schedule-puzzle": exercise(1),
    "schedule-puzzle-2": exercise(2),
    "schedule-puzzle-3": exercise(3),
    "schedule-puzzle-4": exercise(4),
}
