"""The figures of lesson 14, each with a text equivalent."""

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table, fold, table
from dtlib.lessons.l14 import brief
from dtlib.lessons.l14.runs import steps_of
from dtlib.planner import CALIBRATIONS

MEASURED, PREDICTED = "#222222", RANK_COLOURS[0]


def fitting() -> dict:
    """Return the meshes that fit the memory limit."""
    return {name: plan for name, plan in brief.MESHES.items() if brief.held(plan) <= brief.LIMIT}


@shown
def times(sample: float):
    """Draw the predicted seconds per step of each mesh that fits, with its band."""
    figure, axes = subplots(height=0.45 * len(fitting()) + 1)
    rows = []
    for name, plan in fitting().items():
        said = 1000 * brief.predicted(plan, sample)
        low, high = said / brief.BAND, said * brief.BAND
        axes.errorbar(said, name, xerr=[[said - low], [high - said]], color=PREDICTED, marker="o", capsize=4)
        rows.append((name, f"{said:.0f}", f"{low:.0f} to {high:.0f}"))
    axes.set(xscale="log", xlabel="ms per step, predicted")
    axes.set_xticks([100, 200, 500, 1000, 2000], ["100", "200", "500", "1,000", "2,000"])
    axes.minorticks_off()
    axes.invert_yaxis()
    alt = f"The predicted ms of a step for each of {len(rows)} meshes, with a band of {brief.BAND} times."
    return figure, alt, Table(rows, ("mesh", "ms, predicted", "band"))


@shown
def ratios(sample: float, measured: dict, without_bubble: bool = False):
    """Draw measured over predicted seconds of each mesh, in the band; arrows lead to ratios without the bubble."""
    figure, axes = subplots(height=0.45 * len(fitting()) + 1)
    rows = []
    for y, (name, plan) in enumerate(fitting().items()):
        took = measured[name]["seconds"]
        said, eager = (brief.predicted(plan, sample, bubble=bubble) for bubble in (True, False))
        axes.plot([took / said], [name], color=MEASURED, marker="D", markersize=9)
        if without_bubble and plan.pipe > 1:
            arrow = {"arrowstyle": "->", "lw": 2, "color": PREDICTED}
            axes.annotate("", (took / eager, y), (took / said, y), arrowprops=arrow)
        cells = (f"{took / eager:.2f}",) if without_bubble else ()
        rows.append((name, f"{1000 * said:.0f}", f"{1000 * took:.0f}", f"{took / said:.2f}", *cells))
    ends = 1 / brief.BAND, 1, brief.BAND
    axes.axvspan(ends[0], ends[-1], color=PREDICTED, alpha=0.15, lw=0)
    axes.axvline(1, color=PREDICTED)
    axes.set(xscale="log", xlabel="measured / predicted (left: faster than predicted)")
    axes.set_xlim(min(0.55, axes.get_xlim()[0]), max(1.8, axes.get_xlim()[1]))
    axes.set_xticks(ends, [f"{end:.2g}" for end in ends])
    axes.minorticks_off()
    axes.invert_yaxis()
    headers = ("mesh", "ms, predicted", "ms, measured", "ratio", "without the bubble")[: len(rows[0])]
    alt = f"Measured over predicted ms of a step, for {len(rows)} meshes, in a band of {brief.BAND} times"
    alt += "; arrows lead to the ratio without the bubble." if without_bubble else "."
    return figure, alt, Table(rows, headers)


@shown
def losses(events: list[dict], undisturbed: list[dict]):
    """Draw losses of a run with and without a death, and the order in which steps were done."""
    figure, axes = subplots(1, 2, height=3.4)
    steps, whole = steps_of(events), steps_of(undisturbed)
    axes[0].plot(*zip(*whole, strict=True), color="black", linewidth=7, alpha=0.2, label="no rank died")
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
    rows = [("steps done", len(steps)), ("repeated", twice), ("largest difference from the other curve", f"{off:.1e}")]
    alt = "Losses by step, once with a death and once without, which coincide; and the time of each step."
    return figure, alt, Table(rows, ("", "this run"))


def seen_by_the_fit() -> None:
    """Show the ranges of the runs to which the planner's times were fitted."""
    fit = CALIBRATIONS["h100-cluster"]
    names = {"gpus": "GPUs", "zero": "ZeRO stage", "hidden": "hidden size"}
    names = {**names, **{axis: axis for axis in ("data", "tensor", "pipe")}}
    rows = [(name, f"{fit.seen[key][0]:,}", f"{fit.seen[key][1]:,}") for key, name in names.items()]
    table(rows, ("", "from", "to"), fold(f"{fit.rows} runs: {fit.source}"), align="lrr")
