"""Pictures of lesson 03 and of the lessons on it: the collectives, and a machine with its links."""

from dtlib.lab.colours import rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table

SUM = "0.25"  # what is made of all ranks' values has no rank's colour
# name: what each of four ranks has before and after: the letter of a rank's values, its number for one piece of them,
# "+" for a sum; "" for nothing.
COLLECTIVES = {
    "broadcast": (["a"] + 3 * [""], 4 * ["a"]),
    "reduce": (["a", "b", "c", "d"], ["+", "", "", ""]),
    "all_reduce": (["a", "b", "c", "d"], 4 * ["+"]),
    "scatter": (["a0 a1 a2 a3", "", "", ""], ["a0", "a1", "a2", "a3"]),
    "all_gather": (["a0", "b1", "c2", "d3"], 4 * ["a0 b1 c2 d3"]),
    "reduce_scatter": ([" ".join(f"{x}{i}" for i in range(4)) for x in "abcd"], ["+0", "+1", "+2", "+3"]),
}


@shown
def collectives():
    """Six collectives of four ranks, before and after: a row a rank, a colour for whose values; grey is a sum."""
    from matplotlib.patches import Rectangle

    figure, axes = subplots(2, 3, height=5.2)
    for place, (name, both) in zip(axes.flat, COLLECTIVES.items(), strict=True):
        for left, column in zip((0, 5), both, strict=True):
            for rank, values in enumerate(column):
                place.add_patch(Rectangle((left, rank + 0.06), 4, 0.88, fc="white", ec="0.6"))
                for piece in values.split():
                    colour = SUM if piece[0] == "+" else rank_colour("abcd".index(piece[0]))
                    # One piece of an array is a quarter as wide, in its own place; a sum of pieces too.
                    at, wide = (left + int(piece[1]), 1) if piece[1:] else (left, 4)
                    place.add_patch(Rectangle((at, rank + 0.06), wide, 0.88, fc=colour, ec="white"))
                    text = "sum" if piece == "+" else "Σ" if piece[0] == "+" else piece[0]
                    place.text(at + wide / 2, rank + 0.5, text, ha="center", va="center", color="white")
        for rank in range(4):
            place.text(-0.3, rank + 0.5, str(rank), ha="right", va="center")
        place.annotate("", (5, 2), (4, 2), arrowprops={"arrowstyle": "->", "lw": 1.5})
        place.set(xlim=(-1, 9.1), ylim=(4.1, -0.1), title=name)
        place.axis("off")
    rows = [
        (name, *(" | ".join(value or "-" for value in column) for column in both))
        for name, both in COLLECTIVES.items()
    ]  # fmt: skip
    alt = "Six panels, four ranks each, before and after: " + ", ".join(COLLECTIVES) + "."
    return figure, alt, Table(rows, ("collective", "ranks 0 | 1 | 2 | 3 before", "after"))


LINKS = (
    ("memory of an accelerator", "1,000 to 4,000 GB/s"),
    ("accelerators of one machine (NVLink)", "300 to 900 GB/s"),
    ("accelerator and host (PCIe)", "16 to 64 GB/s"),
    ("machine and machine (InfiniBand, Ethernet)", "1 to 50 GB/s a link"),
)


@shown
def machine():
    """Two machines of four accelerators with their links, thicker where more bytes a second go through."""
    from matplotlib.patches import FancyBboxPatch

    figure, axes = subplots(height=3.9)
    box = {"boxstyle": "round,pad=0.02,rounding_size=0.12", "lw": 1.5}
    for node, left in enumerate((0, 6.4)):
        axes.add_patch(FancyBboxPatch((left, 0), 5.2, 4.3, fc="0.96", ec="0.5", **box))
        axes.text(left + 2.6, 4.0, f"machine {node}", ha="center", va="center")
        for number in range(4):
            rank, x = 4 * node + number, left + 0.25 + 1.25 * number
            axes.add_patch(FancyBboxPatch((x, 2.2), 0.9, 1.0, fc=rank_colour(rank), ec="white", zorder=3, **box))
            axes.text(x + 0.45, 2.7, f"{rank}", ha="center", va="center", color="white", weight="bold", zorder=4)
            axes.plot([x + 0.45, x + 0.45], [1.3, 2.2], color="0.45", lw=2.5, zorder=1)
            if number:
                axes.plot([x - 0.35, x], [2.7, 2.7], color="0.1", lw=9, zorder=2, solid_capstyle="butt")
        axes.add_patch(FancyBboxPatch((left + 0.25, 0.4), 4.65, 0.85, fc="white", ec="0.4", **box))
        axes.text(left + 2.6, 0.83, "host: cores, memory, disk", ha="center", va="center")
    axes.plot([5.2, 6.4], [0.83, 0.83], color="0.45", lw=1.2)
    axes.text(5.8, 1.05, "network", ha="center", va="bottom", rotation=90)
    axes.text(5.8, 3.2, "no wire", ha="center", va="center", rotation=90, color="0.45")
    axes.set(xlim=(-0.15, 11.75), ylim=(-0.15, 4.5), aspect="equal")
    axes.axis("off")
    alt = "Two machines of four accelerators: thick wires inside a machine, thin ones to its host and beyond."
    return figure, alt, Table(LINKS, ("between", "bytes a second, in orders of magnitude"))
