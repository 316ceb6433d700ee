"""A schedule as text: one row per rank, time from left to right."""

from collections.abc import Sequence
from math import ceil

from dtlib.schedule.actions import Action
from dtlib.schedule.simulation import Simulation, simulate


def draw(
    schedule: Simulation | Sequence[Sequence[Action]], unit: float | None = None, widest: int | None = None
) -> str:
    """Return a drawing of a schedule as text.

        rank 0  F0 F1 .. .. B0 -- .. B1 --
        rank 1  .. F0 B0 -- F1 B1 -- .. ..

    ``F0`` starts in this cell (``0F0`` if a rank has several stages), ``--`` continues, and in ``..`` the rank is idle.
    A cell shows the action at the middle of its time.

    Args:
        schedule: the result of ``simulate``, or a schedule, which is drawn with B twice as long as F.
        unit: time of a cell; by default that of the shortest action. Shorter actions may be missing in the drawing.
        widest: number of characters per line at most; longer drawings continue below, after an empty line.
    """
    simulation = schedule if isinstance(schedule, Simulation) else simulate(schedule)
    durations = [simulation.end[action] - simulation.start[action] for action in simulation.end]
    unit = unit or min((duration for duration in durations if duration > 0), default=1.0)

    def first_cell(time):
        # Rounded, so that rounding errors in sums of times such as 0.1 do not move an action to another cell.
        return ceil(round(time / unit - 0.5, 6))

    one_stage = all(len({action.stage for action in actions}) == 1 for actions in simulation.schedule)
    names = {action: str(action).lstrip("0123456789") if one_stage else str(action) for action in simulation.end}
    width = max(map(len, names.values()))
    columns = ceil(round(simulation.makespan / unit, 6))
    begins = [f"rank {rank:<{len(str(len(simulation.schedule) - 1))}}  " for rank in range(len(simulation.schedule))]
    rows = []
    for actions in simulation.schedule:
        cells = [".."] * columns
        for action in actions:
            first, after = first_cell(simulation.start[action]), first_cell(simulation.end[action])
            cells[first:after] = [names[action], *["-" * width] * (after - first - 1)][: after - first]
        rows.append([cell.ljust(width) for cell in cells])
    most = max(1, (widest - len(begins[0]) + 1) // (width + 1)) if widest else max(1, columns)
    return "\n\n".join(
        "\n".join((begin + " ".join(row[at : at + most])).rstrip() for begin, row in zip(begins, rows, strict=True))
        for at in range(0, max(1, columns), most)
    )
