"""The figures of lesson 01, each with its text, and what the lecture says of claims about distributed training."""

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import MARKERS, shown, subplots
from dtlib.lab.tables import Table

KINDS = {
    "data": "the model on every rank, the batch cut",
    "sharded data (ZeRO-3)": "each layer's weights cut, whole while it computes",
    "pipeline": "cut between layers",
    "tensor": "cut within each layer",
}
LAYERS = 4
BELOW = {"MT-NLG": "right", "LLaMA 65B": "center"}  # names that stand below their points, as there are others above
RIGHT = ("PaLM",)  # and on the right of its point, as a line is on the left


@shown
def growth(published: dict, claimed: dict, ylabel: str):
    """Points with names, and a line for each claim; ``published`` maps a name to (year, value), ``claimed`` a name to
    a dict of years and values."""
    figure, axes = subplots(height=4.6)
    years, values = zip(*published.values(), strict=True)
    axes.scatter(years, values, color=RANK_COLOURS[0], zorder=3, label="published")
    for name, (year, value) in published.items():
        below = name in BELOW
        style = {
            "textcoords": "offset points",
            "ha": "left" if name in RIGHT else BELOW.get(name, "right"),
            "va": "top" if below else "bottom",
            "bbox": {"fc": "white", "ec": "none", "pad": 0.5},  # a line ends at a name
        }
        axes.annotate(name, (year, value), (0, -7) if below else (6 if name in RIGHT else -6, 2), **style)
    for number, (name, line) in enumerate(claimed.items(), 1):
        axes.plot(list(line), list(line.values()), "--", color=RANK_COLOURS[number], label=f"as claimed: {name}")
    axes.set(yscale="log", ylabel=ylabel, xlim=(min(years) - 2.2, max(years) + 0.5))
    axes.set_ylim(min(values) / 5, max(values) * 50)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("+", ""))
    axes.yaxis.minorticks_off()
    axes.legend(loc="upper left")
    in_time = sorted(published.items(), key=lambda model: model[1])
    rows = [(f"{int(year)}", name, f"{value:.2g}") for name, (year, value) in in_time]
    return figure, f"{ylabel} against years: published models, and what is claimed.", Table(rows, ("", "model", ylabel))


@shown
def kinds(ranks: int = 4):
    """What each rank holds: a row a layer, a colour a rank; with data parallelism there are as many whole models."""
    from matplotlib.patches import Rectangle

    figure, axes = subplots(1, len(KINDS), height=2.9)
    for place, name in zip(axes, KINDS, strict=True):
        for rank in range(ranks):
            for x, y, width, height in _cells(name, rank, ranks):
                hatch = "///" if name.startswith("sharded") else ""
                place.add_patch(Rectangle((x, y), width, height, fc=rank_colour(rank), ec="white", lw=2, hatch=hatch))
            at = (-0.5, rank + 0.5) if name == "pipeline" else (rank + 0.5, LAYERS + 0.4)
            if name != "data":
                place.text(*at, str(rank), ha="center", va="center")
        place.set(xlim=(-0.8, ranks + 0.1), ylim=(LAYERS + 0.8, -0.1), aspect="equal", title=name.replace(" (", "\n("))
        place.axis("off")
    alt = f"Four squares, a row a layer, a colour for each of {ranks} ranks: the kinds of parallelism."
    return figure, alt, Table(list(KINDS.items()), ("kind", "what is cut"))


def _cells(name: str, rank: int, ranks: int):
    """(x, y, width, height) of what a rank holds, in a square of ``ranks`` by ``LAYERS``."""
    for layer in range(LAYERS):
        if name == "data":  # a model of its own, two in a row
            half = LAYERS / 2 - 0.1
            yield ranks / 2 * (rank % 2), (half + 0.2) * (rank // 2) + half / LAYERS * layer, half, half / LAYERS
        elif name != "pipeline":
            yield rank, layer, 1, 1
        elif layer == rank:
            yield 0, layer, ranks, 1


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
    alt = "Work of each GPU against their number, for two models: ZeRO-3's lines fall, PTD's hardly do."
    return figure, alt, Table(rows, ("", "GPUs", "TFLOP/s on each GPU"))
