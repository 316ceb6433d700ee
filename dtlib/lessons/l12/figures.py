"""The figures of lesson 12, each with its text."""

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table, table
from dtlib.lessons.l12 import axes
from dtlib.lessons.l12.work import path


@shown
def work_by_step(**orders):
    """A panel an order: quarter blocks of work of each rank (rows) in each step (columns); idle is empty."""
    figure, panels = subplots(1, len(orders), height=3.6, squeeze=False)
    tables = []
    for panel, (order, work) in zip(panels[0], orders.items(), strict=True):
        ranks = len(work)
        for rank, steps in enumerate(work):
            for step, blocks in enumerate(steps):
                _cell(panel, step, rank, blocks)
        longest = " + ".join(f"{max(step):g}" for step in zip(*work, strict=True))
        panel.set(title=f"{order}\n{longest} = {path(work):g}", xlabel="step", xlim=(-0.5, ranks - 0.5))
        panel.set(ylim=(ranks - 0.5, -0.5), xticks=range(ranks), yticks=range(ranks), aspect="equal")
        panel.set_yticklabels([f"rank {rank}" for rank in range(ranks)])
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        rows = [(rank, *(f"{blocks:g}" for blocks in steps)) for rank, steps in enumerate(work)]
        title = f"{order}: quarter blocks (simulated); longest of each step: {longest} = {path(work):g}"
        tables.append(Table(rows, ("rank", *(f"step {step}" for step in range(ranks))), title))
    alt = f"Quarter blocks of work, ranks by steps, {' beside '.join(orders)}; what is idle is empty."
    return figure, alt, *tables


def _cell(panel, step: int, rank: int, blocks: float) -> None:
    from matplotlib.patches import Rectangle

    style = {"facecolor": rank_colour(rank), "alpha": 0.25 + 0.15 * blocks} if blocks else {"facecolor": "none"}
    panel.add_patch(Rectangle((step - 0.46, rank - 0.46), 0.92, 0.92, edgecolor="lightgrey", **style))
    label = {"facecolor": "white", "pad": 1.5, "lw": 0} if blocks else None
    panel.text(step, rank, f"{blocks:g}" if blocks else "idle", ha="center", va="center", bbox=label,
               color="black" if blocks else "dimgrey")  # fmt: skip


@shown
def shares(**runs):
    """A panel a run: the share of tokens that each expert gets, step by step, one above the other."""
    figure, panels = subplots(1, len(runs), height=3.6, squeeze=False, sharey=True)
    tables = []
    for panel, (name, choices) in zip(panels[0], runs.items(), strict=True):
        parts = [[100 * step[expert] / sum(step) for step in choices] for expert in range(len(choices[0]))]
        panel.stackplot(range(len(choices)), parts, colors=RANK_COLOURS, edgecolor="white", linewidth=0.5)
        panel.set(title=name.replace("_", " "), xlabel="step", xlim=(0, len(choices) - 1), ylim=(0, 100))
        rows = [(expert, *(f"{of(part):.0f} %" for of in (_first, _last))) for expert, part in enumerate(parts)]
        tables.append(Table(rows, ("expert", "first 20 steps", "last 20 steps"), name.replace("_", " "), align="rrr"))
    panels[0][0].set(ylabel="% of the tokens")
    for expert, part in enumerate(parts):
        below = sum(each[-1] for each in parts[:expert])
        panel.text(len(choices), below + part[-1] / 2, f"expert {expert}", va="center")
    alt = f"The share of tokens of each expert, step by step: {' beside '.join(runs)}.".replace("_", " ")
    return figure, alt, *tables


def _first(part):
    return sum(part[:20]) / 20


def _last(part):
    return sum(part[-20:]) / 20


def held(measured: dict) -> None:
    """What a rank has of the model, over one process; that of experts over one process with all experts."""
    rows = []
    for axis in axes.AXES:
        if not axis.startswith("one process"):
            seen, whole = measured[axis], measured["one process, experts" if axis == "expert" else "one process"]
            rows.append((axis, *(f"{100 * seen[name] / whole[name]:.0f} %" for name in axes.HELD)))
    headers = ("axis", *(name.replace("_", " ") for name in axes.HELD))
    table(rows, headers, "What the busiest of 4 ranks has, of one process", align="lrrrr")


def sent(measured: dict) -> None:
    """Calls and bytes of a step, in each of its parts."""
    rows = []
    for axis in axes.AXES:
        if not axis.startswith("one process"):
            seen = measured[axis]
            calls = (", ".join(f"{count} {name}" for name, count in seen[when].items()) or "-" for when in axes.WHEN)
            rows.append((axis, *calls, f"{seen['sent'] / 1000:,.0f}"))
    table(rows, ("axis", *axes.WHEN, "kB"), "What the busiest of 4 ranks sends in a step", align="llllr")
