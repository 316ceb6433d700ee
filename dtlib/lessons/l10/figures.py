"""The figures of lesson 10, each with a text equivalent."""

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table, table
from dtlib.lessons.l10 import stage3

STYLES = ("-", "--", ":", "-.")


@shown
def curves(results: dict, title: str = ""):
    """Draw the loss against steps, one line per run; ``results`` maps a name to the result of ``train``."""
    figure, axes = subplots(height=4)
    for number, (name, result) in enumerate(results.items()):
        losses = result["losses"]
        style = {"color": RANK_COLOURS[number], "linestyle": STYLES[number % len(STYLES)], "lw": max(1.5, 4 - number)}
        axes.plot(range(1, len(losses) + 1), losses, label=name, **style)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend(frameon=False)
    rows = [
        (name, result["steps"], *(f"{result['losses'][at]:.4f}" for at in (0, len(result["losses"]) // 2, -1)))
        for name, result in results.items()
    ]
    alt = f"{title + ': ' if title else ''}the loss of each step, one line for each of {', '.join(results)}."
    return figure, alt, Table(rows, ("run", "steps", "first loss", "loss in the middle", "last loss"), title)


@shown
def runs(results: dict):
    """Draw final loss, milliseconds per step, and megabytes of model states of each rank, in three panels."""
    names = list(results)
    times = {name: 1e3 * result["seconds"] / len(result["losses"]) for name, result in results.items()}
    figure, panels = subplots(1, 3, height=4)
    loss, time, memory = panels.flat
    loss.bar(names, [result["loss"] for result in results.values()], color=RANK_COLOURS[0])
    time.bar(names, list(times.values()), color=RANK_COLOURS[2])
    for at, result in enumerate(results.values()):
        held = result["bytes_per_rank"]
        width = 0.8 / len(held)
        for rank, count in enumerate(held):
            place = at + (rank - (len(held) - 1) / 2) * width
            label = None if at else f"rank {rank}"
            style = {"color": rank_colour(rank), "hatch": ("", "//")[rank % 2]}
            memory.bar(place, count / 1e6, 0.9 * width, label=label, **style)
    memory.set_xticks(range(len(names)), names)
    memory.legend(frameon=False)
    for axes, what in ((loss, "last loss"), (time, "ms per step"), (memory, "MB per rank")):
        axes.set_title(what)
        axes.tick_params("x", rotation=90)
    ranks = len(next(iter(results.values()))["bytes_per_rank"])
    rows = [
        (name, f"{result['loss']:.6f}", f"{times[name]:.1f}", *result["bytes_per_rank"])
        for name, result in results.items()
    ]
    headers = ("run", "loss", "ms per step", *(f"bytes of rank {rank}" for rank in range(ranks)))
    alt = f"Bars for {', '.join(names)}: the last loss, the time per step, and bytes of model states on each rank."
    return figure, alt, Table(rows, headers)


def at_stage_3(counted: dict) -> None:
    """Show bytes per step with each runtime; DeepSpeed's are stored numbers, unless it ran."""
    if "deepspeed" not in counted:
        counted = {**counted, **stage3.STORED}
    rows = [
        (name, *(f"{seen[what] / 1e6:,.1f}" for what in ("sent", "held", "peak")), seen["messages"])
        for name, seen in counted.items()
    ]
    headers = ("runtime", "MB sent", "MB held between steps", "MB at the peak", "messages")
    table(rows, headers, f"A step of a rank of two, at stage 3 (stored: {stage3.WHEN})", align="lrrrr")
