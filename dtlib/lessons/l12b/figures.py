"""The figures of lesson 12b, each with a text equivalent."""

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table, table
from dtlib.lessons.l12 import axes

LINES = ("solid", "dashed", "dashdot", "dotted")


@shown
def shares(**runs):
    """Draw each expert's share of tokens step by step, one panel per run, beside an even share."""
    figure, panels = subplots(1, len(runs), height=3.6, squeeze=False, sharey=True)
    tables = []
    for panel, (name, choices) in zip(panels[0], runs.items(), strict=True):
        parts = [[100 * step[expert] / sum(step) for step in choices] for expert in range(len(choices[0]))]
        panel.axhline(100 / len(parts), color="dimgrey", linestyle="dashed", linewidth=1)
        for expert, part in enumerate(parts):
            panel.plot([_mean(part[max(0, at - 4) : at + 1]) for at in range(len(part))], color=RANK_COLOURS[expert],
                       linestyle=LINES[expert], label=f"expert {expert}")  # fmt: skip
        panel.set(title=name.replace("_", " "), xlabel="step", xlim=(0, len(choices) - 1), ylim=(0, 100))
        rows = [
            (expert, f"{_mean(part[:20]):.0f} %", f"{_mean(part[-20:]):.0f} %") for expert, part in enumerate(parts)
        ]
        tables.append(Table(rows, ("expert", "first 20 steps", "last 20 steps"), name.replace("_", " "), align="rrr"))
    panels[0][0].set(ylabel="% of the tokens, mean of 5 steps")
    panels[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    alt = f"The share of tokens of each expert, step by step: {' beside '.join(runs)}. Dashed: an even share."
    return figure, alt.replace("_", " "), *tables


def _mean(part) -> float:
    return sum(part) / len(part)


def held(measured: dict) -> None:
    """Show a rank's memory relative to one process; for experts, to one process with all experts."""
    rows = []
    for axis in axes.AXES:
        if not axis.startswith("one process"):
            seen, whole = measured[axis], measured["one process, experts" if axis == "expert" else "one process"]
            rows.append((axis, *(f"{100 * seen[name] / whole[name]:.0f} %" for name in axes.HELD)))
    headers = ("axis", *(name.replace("_", " ") for name in axes.HELD))
    table(rows, headers, "Memory of the busiest of 4 ranks, in % of one process", align="lrrrr")


def sent(measured: dict) -> None:
    """Show calls and bytes of a step, for each part of the step."""
    rows = []
    for axis in axes.AXES:
        if not axis.startswith("one process"):
            seen = measured[axis]
            calls = (", ".join(f"{count} {name}" for name, count in seen[when].items()) or "-" for when in axes.WHEN)
            rows.append((axis, *calls, f"{seen['sent'] / 1000:,.0f}"))
    table(rows, ("axis", *axes.WHEN, "kB"), "Bytes that the busiest of 4 ranks sends in a step", align="llllr")
