"""The figures of lesson 08, each with a text equivalent."""

from itertools import groupby

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import WIDTH, fits, shown, subplots
from dtlib.lab.tables import Table, fold
from dtlib.world.mesh import coordinates_of, rank_of, shape_of

_HATCHES = ("//", "\\\\", "--", "xx", "||", "++", "///", "---")


@shown
def cuts(ranks: int = 4):
    """Draw Y = X A with A split by columns and by rows, with each rank's parts of X, A and Y."""
    figure, rows = subplots(2, height=5.6)
    drawn = {
        "by columns": (("whole", "on every rank"), ("columns", "slice r of the columns"), ("columns", "slice r of Y")),
        "by rows": (("columns", "slice r of the columns"), ("rows", "slice r of the rows"), ("sum", "a summand each")),
    }
    for axes, (name, matrices) in zip(rows, drawn.items(), strict=True):
        sizes = {"X": (2.2, 1.6), "A": (2.8, 2.2), "Y": (2.8, 1.6)}
        left = 0.0
        for (letter, (width, height)), (cut, whose) in zip(sizes.items(), matrices, strict=True):
            _matrix(axes, left, width, height, cut, ranks)
            axes.text(left + width / 2, -1.45, f"{letter}: {whose}", ha="center")
            left += width + 1.4
            if letter != "Y":
                axes.text(left - 0.7, 0, "=" if letter == "A" else "times", ha="center", va="center")
        axes.set(xlim=(-0.2, left), ylim=(-1.8, 1.6), aspect="equal", title=name)
        axes.axis("off")
    table = [
        ("by columns", "whole", "columns", "columns of Y", "nothing", "all_reduce"),
        ("by rows", "columns", "rows", "a summand of Y", "all_reduce", "nothing"),
    ]
    headers = ("cut", "X on a rank", "A on a rank", "a rank computes", "for the whole Y, or a slice", "gradient of X")
    alt = f"Y = X A on {ranks} ranks: which slices of X, A and Y each of them has, by columns and by rows."
    return figure, alt, Table(table, headers)


def _matrix(axes, left, width, height, cut, ranks) -> None:
    """Draw a matrix around y = 0: whole, in slices with the colour and hatch of their rank, or stacked summands."""
    outline = {"edgecolor": "white", "lw": 1}
    if cut == "whole":
        axes.add_patch(_box(left, -height / 2, width, height, facecolor="lightgrey", **outline))
    for rank in range(ranks if cut != "whole" else 0):
        style = {"facecolor": rank_colour(rank), "hatch": _HATCHES[rank % len(_HATCHES)], **outline}
        if cut == "columns":
            x, y, w, h = left + rank * width / ranks, -height / 2, width / ranks, height
        elif cut == "rows":
            x, y, w, h = left, height / 2 - (rank + 1) * height / ranks, width, height / ranks
        else:
            x, y, w, h = left + 0.14 * rank, -height / 2 + 0.14 * rank, width, height
            style["zorder"] = ranks - rank
        axes.add_patch(_box(x, y, w, h, **style))
        label = {"ha": "center", "va": "center", "bbox": {"facecolor": "white", "pad": 1.5, "lw": 0}}
        if cut != "sum":
            axes.text(x + w / 2, y + h / 2, f"{rank}", **label)
    if cut == "sum":
        axes.text(left + width / 2, 0, " + ".join(f"{rank}" for rank in range(ranks)), zorder=ranks + 1, **label)


def _box(x, y, width, height, **style):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **style)


def groups_of(axis: str, shape: dict[str, int]) -> list[list[int]]:
    """Return the groups of ranks that communicate along an axis of a mesh."""
    ranks = 1
    for size in shape.values():
        ranks *= size
    firsts = [rank for rank in range(ranks) if coordinates_of(rank, shape)[axis] == 0]
    along = range(shape[axis])
    return [[rank_of(coordinates_of(first, shape) | {axis: place}, shape) for place in along] for first in firsts]


# Directions of the axes of a mesh, from the last axis to the first: right, down, back.
_STEPS = ((1.5, 0), (0, -1.6), (0.65, 0.7))
_LINES = ((7, "-", "0.6"), (2.5, "-", "black"), (2.5, ":", "black"))


@shown
def mesh(**axes: int):
    """Draw ranks on a mesh of at most three axes, with a different line between neighbours along each axis.

    A box is a machine, which has one group along ``tensor``.
    """
    import numpy as np
    from matplotlib.patches import FancyBboxPatch

    ranks = range(np.prod(list(axes.values())))
    shape = shape_of(axes, len(ranks))
    places = [[*coordinates_of(rank, shape).values()][::-1] for rank in ranks] @ np.array(_STEPS[: len(shape)])
    wide, high = np.ptp(places, axis=0)
    figure, panel = subplots(height=high + 1, width=min(WIDTH, wide + 3))
    rows = []
    for (axis, size), (thick, line, colour) in zip(reversed(shape.items()), _LINES, strict=False):
        groups = groups_of(axis, shape)
        labels = [axis] + [""] * (len(groups) - 1)
        panel.plot(*places[np.array(groups)].T, lw=thick, ls=line, color=colour, zorder=2, label=labels)
        for group in groups if axis == "tensor" else ():
            low, long, label = places[group].min(axis=0), np.ptp(places[group], axis=0), "" if group[0] else "a machine"
            panel.add_patch(FancyBboxPatch(low, *long, boxstyle="round,pad=0.28", fc="0.95", ec="0.7", label=label))
        rows.insert(0, (axis, size, "  ".join("-".join(map(str, group)) for group in groups)))
    for rank in ranks:
        circle = {"marker": "o", "s": 480, "facecolors": "white", "edgecolors": rank_colour(rank), "linewidths": 3}
        panel.scatter(*places[rank], zorder=3, **circle)
        panel.text(*places[rank], f"{rank}", ha="center", va="center", zorder=4)
    panel.set_aspect("equal")
    panel.axis("off")
    figure.legend(loc="outside center right", frameon=False)
    alt = f"{len(ranks)} ranks on a grid, connected to the ranks that they communicate with along {', '.join(shape)}."
    return figure, alt, Table(rows, ("axis", "size", "ranks that communicate along the axis"))


@shown
def bytes_of_axes(sent: dict[str, int], title: str = ""):
    """Draw the bytes that a rank sends per step along each axis; ``sent`` maps an axis to bytes."""
    figure, axes = subplots(height=0.5 * len(sent) + 1.1)
    style = {"color": RANK_COLOURS[: len(sent)], "hatch": _HATCHES[: len(sent)], "edgecolor": "white", "lw": 0}
    axes.bar_label(axes.barh(list(sent), list(sent.values()), 0.6, **style), fmt=_readable, padding=4)
    axes.set(title=title, xticks=[])
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    least = min(sent.values())
    rows = [(name, _readable(count), f"{count / least:.3g}") for name, count in sent.items()]
    alt = f"{title or 'Bytes of a step'}: bars of the bytes that a rank sends along {', '.join(sent)}."
    return figure, alt, Table(rows, ("axis", "a rank sends per step", "relative to the least"), title, align="lrr")


def _readable(count: float) -> str:
    from matplotlib.ticker import EngFormatter

    return EngFormatter("B")(float(f"{count:.3g}"))


# The rewired graph of a Replicator

# Operations that compute nothing: views and aliases of a tensor.
_VIEWS = {
    "t", "view", "detach", "slice", "split_with_sizes", "unbind", "alias", "expand", "_to_copy", "reshape",
    "transpose", "unsqueeze", "squeeze", "full_like", "ones_like", "clone", "stack", "lift_fresh_copy",
}  # fmt: skip


def steps_of(graph) -> list[tuple]:
    """Return the operations of a rewired graph in order.

    They are ("replica", number, operation), ("exchange", text) or ("variables", n). Operations that only change a
    tensor's shape or name are left out.
    """
    variables = {node.target for node in graph.module.graph.nodes if node.op == "get_attr" and node.users}
    trained = {name for name in variables if getattr(graph.module, name).requires_grad}
    steps = [("variables", len(trained))]
    for node in graph.module.graph.nodes:
        if "exchange" in node.meta:
            steps.append(("exchange", node.meta["exchange"]))
        elif node.op == "call_function" and "replica" in node.meta:
            name = getattr(node.target, "__name__", f"{node.target}").partition(".")[0]
            if name not in _VIEWS and name != "getitem":
                steps.append(("replica", node.meta["replica"], name.strip("_")))
    return steps


@shown
def rewired(graph):
    """Draw the graph of all replicas from top to bottom: one column per replica, and bars for exchanges."""
    steps = steps_of(graph)
    replicas = graph.replicas
    bands = [list(band) for _, band in groupby(steps, key=lambda step: step[0])]
    heights = [_height(band, replicas) for band in bands]
    figure, axes = subplots(height=0.36 * sum(heights) + 0.8, width=min(WIDTH, 3.2 * replicas + 0.6))
    top, column = 0, 0.92 * figure.get_figwidth() / (replicas + 0.2) - 0.1
    for band, height in zip(bands, heights, strict=True):
        if band[0][0] == "replica":
            for replica in range(replicas):
                for line, name in enumerate(_names(band, replica)):
                    _operation(axes, replica, top + line, _cut(name, column))
        for line, step in enumerate(band):
            if step[0] == "variables":
                _bar(axes, replicas, top + line, f"{step[1]} variables, shared by all replicas", "white")
            elif step[0] == "exchange":
                _bar(axes, replicas, top + line, step[1], "lightgrey")
        top += height
    for replica in range(replicas):
        axes.text(replica, -0.75, f"replica {replica}", ha="center", weight="bold")
    axes.set(xlim=(-0.6, replicas - 0.4), ylim=(top - 0.4, -1.2))
    axes.axis("off")
    alt = f"The graph of {replicas} replicas from top to bottom: what each computes, and where they exchange."
    return figure, alt, _as_text(bands, replicas)


def _names(band, replica: int) -> list[str]:
    return [step[2] for step in band if step[1] == replica]


def _height(band, replicas: int) -> int:
    """Return the number of lines of a band: those of its longest replica, or one per exchange."""
    return max(len(_names(band, r)) for r in range(replicas)) if band[0][0] == "replica" else len(band)


def _cut(name: str, inches: float) -> str:
    """Return as much of a name as fits."""
    while len(name) > 1 and not fits(name, inches):
        name = f"{name.removesuffix('…')[:-1]}…"
    return name


def _operation(axes, replica: int, y: float, name: str) -> None:
    frame = {"facecolor": "white", "edgecolor": rank_colour(replica), "boxstyle": "round,pad=0.2", "lw": 1.5}
    axes.text(replica, y, name, ha="center", va="center", bbox=frame, zorder=3)
    axes.plot([replica, replica], [y - 0.5, y + 0.5], color=rank_colour(replica), lw=1, zorder=1)


def _bar(axes, replicas: int, y: float, text: str, colour: str) -> None:
    axes.add_patch(_box(-0.5, y - 0.38, replicas, 0.76, facecolor=colour, edgecolor="black", zorder=2))
    axes.text((replicas - 1) / 2, y, text, ha="center", va="center", weight="bold", zorder=3)


def _as_text(bands, replicas: int) -> str:
    """Return the graph as text; operations that are equal on all replicas are listed once."""
    lines = []
    for band in bands:
        if band[0][0] == "replica":
            ours = [_names(band, replica) for replica in range(replicas)]
            if all(names == ours[0] for names in ours):
                lines.append(f"each replica: {', '.join(ours[0])}")
            else:
                lines += [f"replica {replica}: {', '.join(names) or 'nothing'}" for replica, names in enumerate(ours)]
        for step in band:
            if step[0] == "variables":
                lines.append(f"[ {step[1]} variables, shared by all replicas ]")
            elif step[0] == "exchange":
                lines.append(f"==== {step[1]} ====")
    return fold("\n".join(lines))
