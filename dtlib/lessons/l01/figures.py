"""The figures of lesson 01, each with a text equivalent."""

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import MARKERS, shown, subplots
from dtlib.lab.tables import Table

# Kind of parallelism: (what is split, samples of a rank, what is communicated).
KINDS = {
    "data": ("the batch", "different on each rank", "gradients,\nonce per step"),
    "sharded (ZeRO-3)": (
        "the batch, and each layer that does not compute",
        "different on each rank",
        "weights and gradients\nof each layer",
    ),
    "pipeline": ("the model, between layers", "all", "activations,\nrank to rank"),
    "tensor": ("each layer", "all", "activations\nin each layer"),
}
LAYERS = 4
# Places of names that would cover other names or lines: below their points, and to the right of the point.
BELOW = {"MT-NLG": "right", "LLaMA 65B": "center"}
RIGHT = ("PaLM",)


@shown
def growth(published: dict, claimed: dict, ylabel: str):
    """Draw named points, and a line for each claim, against years.

    ``published`` maps a name to (year, value); ``claimed`` maps a name to a dict of years and values.
    """
    figure, axes = subplots(height=4.6)
    years, values = zip(*published.values(), strict=True)
    axes.scatter(years, values, color=RANK_COLOURS[0], zorder=3, label="published")
    for name, (year, value) in published.items():
        below = name in BELOW
        style = {
            "textcoords": "offset points",
            "ha": "left" if name in RIGHT else BELOW.get(name, "right"),
            "va": "top" if below else "bottom",
            "bbox": {"fc": "white", "ec": "none", "pad": 0.5},  # hides lines behind the name
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
    """Draw one panel per kind of parallelism: samples and layers of each rank (columns), and communication."""
    figure, panels = subplots(1, len(KINDS), height=3.7)
    wide = 0.9 / ranks
    for axes, (name, (_, samples, travels)) in zip(panels, KINDS.items(), strict=True):
        for rank in range(ranks):
            of_rank, piece = (rank, ranks * wide), (rank + rank * wide, wide)
            seen = [(rank + i * wide, 0.8 * wide) for i in range(ranks) if samples == "all" or i == rank]
            axes.broken_barh(seen, (-1.4, 0.7), color=rank_colour(rank))
            for layer in range(LAYERS):
                if name.startswith("sharded"):
                    pale = {"facecolor": "white", "edgecolor": rank_colour(rank), "hatch": "////", "lw": 0}
                    axes.broken_barh([of_rank], (layer, 0.85), **pale)
                if name != "pipeline" or layer == rank:
                    axes.broken_barh([piece if name[0] in "st" else of_rank], (layer, 0.85), color=rank_colour(rank))
        arrow = {"arrowstyle": "->" if name == "pipeline" else "<->", "lw": 2}
        axes.annotate("", (ranks - 0.1, LAYERS + 0.3), (0, LAYERS + 0.3), arrowprops=arrow)
        axes.set(title=name, xlabel=travels, xlim=(-0.1, ranks), ylim=(LAYERS + 0.6, -1.5), yticks=[])
        axes.set_xticks([rank + 0.45 for rank in range(ranks)], range(ranks))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
    panels[0].set_yticks([-1.05, LAYERS / 2], ["samples", "layers"])
    alt = f"Four panels, a column for each of {ranks} ranks: samples, part of each layer, and communication."
    rows = [(name, *(" ".join(cell.split()) for cell in cells)) for name, cells in KINDS.items()]
    return figure, alt, Table(rows, ("kind", "what is split", "samples on a rank", "what is communicated"))


@shown
def throughput(table):
    """Draw TFLOP/s per GPU against GPUs; ``table`` maps a scheme to a dict of GPUs and TFLOP/s."""
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
