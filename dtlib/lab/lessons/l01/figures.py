"""The figures of lesson 01, each with its text, and what the lecture says of claims about distributed training."""

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import MARKERS, shown, subplots, units
from dtlib.lab.tables import Table

KINDS = {
    "data": "the model on every rank, the batch cut",
    "sharded data (ZeRO-3)": "each layer's weights cut, whole while it computes",
    "pipeline": "cut between layers",
    "tensor": "cut within each layer",
}
LAYERS = 4


@shown
def growth(published: dict, claimed: dict, ylabel: str):
    """Points with names, and a line for each claim; ``published`` maps a name to (year, value), ``claimed`` a name to
    a dict of years and values."""
    figure, axes = subplots(height=4.6)
    years, values = zip(*published.values(), strict=True)
    axes.scatter(years, values, color=RANK_COLOURS[0], zorder=3, label="published")
    for name, (year, value) in published.items():
        axes.annotate(name, (year, value), (-6, 4), textcoords="offset points", ha="right")
    for number, (name, line) in enumerate(claimed.items(), 1):
        axes.plot(list(line), list(line.values()), "--", color=RANK_COLOURS[number], label=f"as claimed: {name}")
    axes.set(yscale="log", ylabel=ylabel, xlim=(min(years) - 2.2, max(years) + 0.5))
    axes.set_ylim(min(values) / 5, max(values) * 50)
    units(axes.yaxis)
    axes.legend(loc="upper left")
    rows = sorted((f"{year:.0f}", name, f"{value:.2g}") for name, (year, value) in published.items())
    return figure, f"{ylabel} against years: published models, and what is claimed.", Table(rows, ("", "model", ylabel))


@shown
def kinds(ranks: int = 4):
    """What each rank holds and computes: a row a layer, a column a slice of its weights, a colour a rank."""
    figure, axes = subplots(1, len(KINDS), height=3.4)
    rows = []
    for place, (name, words) in zip(axes, KINDS.items(), strict=True):
        for layer in range(LAYERS):
            for column in range(ranks):
                rank = layer if name == "pipeline" else column
                place.add_patch(_cell(column, layer, rank, whole=name == "data"))
        for rank in range(ranks):
            at = (-0.7, rank + 0.5) if name == "pipeline" else (rank + 0.5, LAYERS + 0.45)
            place.text(*at, str(rank), ha="center", va="center")
        place.set(xlim=(-1.1, ranks + 0.1), ylim=(LAYERS + 0.9, -0.1), aspect="equal", title=name.replace(" (", "\n("))
        place.axis("off")
        rows.append((name, words))
    alt = f"Four squares, a row a layer, a colour for each of {ranks} ranks: the kinds of parallelism."
    return figure, alt, Table(rows, ("kind", "what is cut"))


def _cell(column, layer, rank, whole):
    from matplotlib.patches import Rectangle

    # A copy of the whole model stands in each column: it has a gap on both sides.
    width = 0.8 if whole else 0.97
    return Rectangle((column + (1 - width) / 2, layer + 0.02), width, 0.96, facecolor=rank_colour(rank))


@shown
def throughput(table):
    """TFLOP/s a GPU against GPUs; ``table`` maps a scheme to a dict of GPUs and TFLOP/s."""
    figure, axes = subplots(height=3.8)
    for number, (scheme, points) in enumerate(table.items()):
        style = {"color": RANK_COLOURS[number], "marker": MARKERS[number]}
        axes.plot(list(points), list(points.values()), label=scheme, **style)
    gpus = sorted({count for points in table.values() for count in points})
    axes.set(xlabel="GPUs", ylabel="TFLOP/s on each GPU", xscale="log", ylim=(0, None))
    axes.xaxis.minorticks_off()
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus])
    axes.legend()
    rows = [(scheme, count, value) for scheme, points in table.items() for count, value in points.items()]
    alt = "Work of each GPU against their number, the batch of all staying the same: one line falls, one hardly does."
    return figure, alt, Table(rows, ("", "GPUs", "TFLOP/s on each GPU"))
