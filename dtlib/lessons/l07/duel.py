"""Lesson 07, the schedule duel: learners paste schedules, the simulator ranks them, and the winner runs on the ranks.

    duel.line("Ada", puzzle_2)           Ada: F0-3 B0 F4 ... | F0-2 B0 ... | F0-1 ... | F0 B0 ...
    winner = duel.rank(lines)            a table, the fastest first, beside 1F1B and ZB-H1
    duel.run(winner)                     measured on four engines, beside the same two

For a given cost of messages no optimal schedule is known: try ``rank(lines, message=0.5)``.
"""

from dataclasses import dataclass

from dtlib.errors import DtlibError
from dtlib.lab.checks.exercise import Wrong
from dtlib.lab.tables import fold, table
from dtlib.lessons.l07 import judge_puzzle
from dtlib.lessons.l07.judge_puzzle import HALVES, MICROBATCHES, STAGES, Level
from dtlib.schedule import one_f_one_b, peak_activations, simulate, zero_bubble_h1

ACTIVATIONS = 4  # the peak of 1F1B and ZB-H1
BETWEEN = "|"  # separates ranks in a line
HEADERS = ("", "makespan", "bubble", "activations")


@dataclass(frozen=True)
class Entry:
    """A schedule in the duel; ``message`` and ``backward`` are times in forward passes."""

    name: str
    actions: list
    message: float = 0.0
    backward: float = 2.0

    @property
    def makespan(self) -> float:
        """Simulated time of the step, in forward passes."""
        return self.simulated().makespan

    @property
    def activations(self) -> int:
        """Largest number of stored activations on any rank."""
        return max(peak_activations(self.actions))

    def simulated(self):
        """Return the simulation of the schedule."""
        return simulate(self.actions, 1.0, self.backward, message=self.message)


LIBRARYS = {
    "1F1B (the library's)": one_f_one_b(STAGES, MICROBATCHES),
    "ZB-H1 (the library's)": zero_bubble_h1(STAGES, MICROBATCHES),
}


def line(name: str, puzzle) -> None:
    """Print the answer to the puzzle as one line for the class, or why it cannot take part."""
    lines = judge_puzzle.observe(puzzle)
    try:
        _admitted(lines)
        print(fold(f"{name}: {f' {BETWEEN} '.join(lines)}"))
    except Wrong as wrong:
        print(fold(f"This order cannot take part yet. {_reason(wrong)}"))


def rank(lines: str, message: float = 0.0, backward: float = 2.0) -> Entry:
    """Show a table of the schedules in ``lines``, the fastest first; return the winner.

    ``lines`` has one schedule per line, as ``line`` prints it. Among equally fast schedules the one with fewer
    activations wins, then the first in ``lines``.

    Raises:
        DtlibError: if no line can take part.
    """
    everybody, refused = ranked(lines, message, backward)
    winner = next(each for each in everybody if each.name not in LIBRARYS)
    table(rows_of(everybody), HEADERS, f"A message takes {message:g}, simulated", align="lrrr")
    print("\n".join([*map(fold, refused), f"{winner.name} wins."]))
    return winner


def ranked(lines: str, message: float = 0.0, backward: float = 2.0) -> tuple[list[Entry], list[str]]:
    """Return the entries and the library's schedules, the best first, and the reasons of refused lines."""
    entries, refused = [], []
    for text in filter(str.strip, lines.splitlines()):
        name, _, order = text.partition(":")
        try:
            actions = _admitted(judge_puzzle.observe(order.split(BETWEEN)))
            entries.append(Entry(name.strip(), actions, message, backward))
        except Wrong as wrong:
            refused.append(f"{name.strip()} does not take part. {_reason(wrong)}")
    if not entries:
        said = ["No order takes part: paste lines that duel.line() has printed.", *map(fold, refused)]
        raise DtlibError("\n".join(said))
    beside = [Entry(name, actions, message, backward) for name, actions in LIBRARYS.items()]
    return sorted([*entries, *beside], key=_rank), refused


def rows_of(entries: list[Entry]) -> list[tuple]:
    """Return the rows of the table with ``HEADERS``."""
    return [(each.name, each.makespan, f"{each.simulated().bubble:.1%}", each.activations) for each in entries]


def run(winner: Entry) -> None:
    """Run the winner, 1F1B and ZB-H1 on four engines, and draw the measurements. Stages are EMULATED."""
    from dtlib.lessons.l07 import explorer
    from dtlib.lessons.l07.figures import picture

    orders = {winner.name: winner.actions, **LIBRARYS}
    picture({
        f"{name}, measured": explorer.measure(
            actions, STAGES, MICROBATCHES, winner.backward, winner.message
        ).simulation
        for name, actions in orders.items()
    })  # fmt: skip


def _rank(entry: Entry) -> tuple:
    return entry.makespan, sum(peak_activations(entry.actions))


def _admitted(lines) -> list:
    """Return the schedule of a line, or raise ``Wrong`` if ranks cannot run it or it is not allowed."""
    halves = not isinstance(lines, str) and any(kind in " ".join(lines).upper() for kind in "IW")
    level = Level("duel", ACTIVATIONS, 0, HALVES if halves else ("F", "B"))
    schedule = judge_puzzle.schedule_of(level, lines)
    if (most := max(peak_activations(schedule))) > ACTIVATIONS:
        raise Wrong("too-many-activations", None, f"at most {ACTIVATIONS} activations on any rank", f"{most}")
    for rank, actions in enumerate(schedule):
        for kind in level.kinds:
            turns = [action.microbatch for action in actions if action.kind == kind]
            if turns != sorted(turns):
                raise Wrong("out-of-turn", rank, f"{kind} of all micro-batches in increasing order", f"{turns}")
    return schedule


def _reason(wrong: Wrong) -> str:
    where = "" if wrong.rank is None else f" on rank {wrong.rank}"
    return f"Expected{where}: {wrong.expected}. Got: {wrong.got}."
