"""The figures of lesson 14, each with its text."""

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table
from dtlib.lessons.l14 import brief
from dtlib.lessons.l14.runs import steps_of

MEASURED, PREDICTED = "#222222", RANK_COLOURS[0]


def fitting() -> dict:
    """The meshes that hold to the limit."""
    return {name: plan for name, plan in brief.MESHES.items() if brief.held(plan) <= brief.LIMIT}


@shown
def times(sample: float, measured: dict | None = None, bubble: bool = True):
    """A bar a mesh that fits: its predicted step and its band; a mark: what was measured."""
    meshes, rows = fitting(), []
    figure, axes = subplots(height=0.55 * len(meshes) + 1)
    for y, (name, plan) in enumerate(meshes.items()):
        said = 1000 * brief.predicted(plan, sample, bubble=bubble)
        low, high = said / brief.BAND, said * brief.BAND
        axes.barh(y, said, color=PREDICTED, alpha=0.45, height=0.55)
        axes.plot([low, high], [y, y], color=PREDICTED, linewidth=3)
        row = [name, f"{said:.0f}", f"{low:.0f} to {high:.0f}"]
        if measured:
            took = 1000 * measured[name]["seconds"]
            axes.plot(took, y, color=MEASURED, marker="D", markersize=9)
            row += [f"{took:.0f}", f"{took / said:.2f}"]
        rows.append(tuple(row))
    axes.set_yticks(range(len(meshes)), list(meshes))
    axes.set_ylim(len(meshes) - 0.5, -0.5)
    axes.set(xlabel="ms a step" + (" (bars: predicted, diamonds: measured)" if measured else ", predicted"))
    headers = ("mesh", "ms, predicted", "band", *(("ms, measured", "ratio") if measured else ()))
    alt = f"A bar for each of {len(meshes)} meshes, its predicted ms a step, with a band of {brief.BAND} times"
    return figure, alt + (", and a diamond for what was measured." if measured else "."), Table(rows, headers)


@shown
def losses(events: list[dict], undisturbed: list[dict]):
    """Losses by step, of a run in which a rank died and of one without; and in which order steps were done."""
    figure, axes = subplots(1, 2, height=3.4)
    steps, whole = steps_of(events), steps_of(undisturbed)
    axes[0].plot(*zip(*whole, strict=True), color="black", linewidth=7, alpha=0.2, label="nobody died")
    axes[0].plot(*zip(*steps, strict=True), color=PREDICTED, marker="o", linewidth=1, label="a rank died")
    axes[0].set(xlabel="step", ylabel="loss")
    axes[0].legend(frameon=False)
    began = next(event["at"] for event in events if event["what"] == "step")
    done = [(event["at"] - began, event["step"]) for event in events if event["what"] == "step"]
    axes[1].plot(*zip(*done, strict=True), color=PREDICTED, marker="o", linestyle="")
    for event in events:
        if event["what"] == "fault":
            axes[1].plot(event["at"] - began, event["step"], marker="X", color="black", markersize=11)
    axes[1].set(xlabel="seconds (a cross: a rank dies)", ylabel="step")
    twice = len(steps) - len({step for step, _ in steps})
    off = max(abs(loss - dict(whole)[step]) for step, loss in steps)
    rows = [("steps done", len(steps)), ("done twice", twice), ("furthest from the other curve", f"{off:.1e}")]
    alt = "Losses by step, once with a death and once without, which lie on each other; and when each step was done."
    return figure, alt, Table(rows, ("", "this run"))
