"""The figures of lesson 12, each with a text equivalent."""

from dtlib.lab.colours import rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table
from dtlib.lessons.l12.work import path


@shown
def work_by_step(**orders):
    """Draw one panel per order: quarter blocks of work of each rank (rows) in each step (columns)."""
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
    alt = f"Quarter blocks of work, a row per rank, a column per step, {' beside '.join(orders)}; empty: idle."
    return figure, alt, *tables


def _cell(panel, step: int, rank: int, blocks: float) -> None:
    from matplotlib.patches import Rectangle

    style = {"facecolor": rank_colour(rank), "alpha": 0.25 + 0.15 * blocks} if blocks else {"facecolor": "none"}
    panel.add_patch(Rectangle((step - 0.46, rank - 0.46), 0.92, 0.92, edgecolor="lightgrey", **style))
    label = {"facecolor": "white", "pad": 1.5, "lw": 0} if blocks else None
    panel.text(step, rank, f"{blocks:g}" if blocks else "idle", ha="center", va="center", bbox=label,
               color="black" if blocks else "dimgrey")  # fmt: skip
