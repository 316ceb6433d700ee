"""The figures of lesson 11b: training before and after a rank died, and the time of recovery."""

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import STYLE, Picture, subplots
from dtlib.lab.tables import Table

NAMES = {
    "checkpoint": "restart all ranks from the checkpoint",
    "memory": "commit and restore in memory",
    "shrink": "shrink and continue",
}
_MARKERS = {"checkpoint": "s", "memory": "^", "shrink": "o"}


def steps_of(events: list[dict]) -> list[dict]:
    """Return the events of steps."""
    return [event for event in events if event["what"] == "step"]


def draw(histories: dict, undisturbed: list[float]):
    """Draw losses against steps, and below them the time of each step and death.

    ``histories`` maps a recovery (a key of ``NAMES``) to the events of its runs, in order. ``undisturbed`` are losses
    of one process without faults.
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        began = any(steps_of(events) for events in histories.values())
        figure, axes = subplots(1 + began, 1, height=2.8 * (1 + began), squeeze=False)
        by_step, by_time = axes[0, 0], axes[-1, 0]  # the same axes, if there are no steps to draw below
        by_step.plot(range(1, len(undisturbed) + 1), undisturbed, color="black", lw=6, alpha=0.2, label="undisturbed")
        for lane, (by, events) in enumerate(histories.items()):
            steps, colour = steps_of(events), RANK_COLOURS[lane]
            style = {"color": colour, "marker": _MARKERS[by], "markersize": 6, "lw": 1, "markevery": (lane, 3)}
            by_step.plot([e["step"] for e in steps], [e["loss"] for e in steps], label=NAMES[by], **style)
            first = steps[0]["at"] if steps else 0.0
            by_time.scatter([e["at"] - first for e in steps], [lane] * len(steps), marker="|", s=250, color=colour)
            for event in events:
                if event["what"] == "fault":
                    by_time.plot(event["at"] - first, lane, marker="X", color="black", markersize=10)
                    by_time.text(event["at"] - first, lane - 0.2, f"rank {event['rank']}", ha="center")
        if began:
            by_time.set(xlabel="seconds; a bar: a step is done; a cross: a rank dies", ylim=(2.6, -0.6))
            names = [NAMES[by].replace(" from", "\nfrom").replace(" and", "\nand") for by in histories]
            by_time.set_yticks(range(len(histories)), names)
        by_step.set(xlabel="step", ylabel="loss", ylim=(0, None), xlim=(0, len(undisturbed) + 1))
        by_step.legend(frameon=False)
    return figure


def times(histories: dict) -> list[tuple]:
    """Return for each recovery its seconds, the ranks before and after, and the number of repeated steps."""
    from dtlib.recovery.journal import recovery_seconds

    rows = []
    for by, events in histories.items():
        steps = steps_of(events)
        seconds = ", ".join(f"{taken:.2f}" for taken in recovery_seconds(events)) or "-"
        ranks = f"{steps[0]['ranks']} -> {steps[-1]['ranks']}" if steps else "-"
        rows.append((NAMES[by], seconds, ranks, len(steps) - len({event["step"] for event in steps})))
    return rows


HEADERS = ("recovery", "seconds from the kill to the next completed step", "ranks", "repeated steps")


def picture(histories: dict, undisturbed: list[float]) -> Picture:
    """Return the figure with its table as text equivalent."""
    from matplotlib import rc_context

    done = [f"{NAMES[by]}, {len(steps)} steps" for by, events in histories.items() if (steps := steps_of(events))]
    alt = f"Losses against {len(undisturbed)} steps: undisturbed"
    alt += f"; and these, below with the seconds of each step: {'; '.join(done)}." if done else ", nothing else yet."
    with rc_context(STYLE):
        return Picture(draw(histories, undisturbed), alt, Table(times(histories), HEADERS))


def compare(histories: dict, undisturbed: list[float]) -> None:
    """Show the figure and its table."""
    from IPython.display import display

    display(picture(histories, undisturbed), Table(times(histories), HEADERS))
