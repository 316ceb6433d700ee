"""The figure of lesson 03: six collectives."""

from dtlib.lab.colours import ink, rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table

SUM = "0.25"  # grey, because a sum belongs to no single rank
# Name -> data of each of four ranks before and after. A letter stands for the values of a rank, a letter and a number
# for one piece of them, "+" for a sum, and "" for nothing.
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
    """Draw six collectives on four ranks, before and after: ranks as rows, colours for the source, grey for sums."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    figure, axes = subplots(2, 3, height=5.2)
    for place, (name, both) in zip(axes.flat, COLLECTIVES.items(), strict=True):
        for left, column in zip((0, 5), both, strict=True):
            for rank, values in enumerate(column):
                place.add_patch(Rectangle((left, rank + 0.06), 4, 0.88, fc="white", ec="0.6"))
                for piece in values.split():
                    colour = SUM if piece[0] == "+" else rank_colour("abcd".index(piece[0]))
                    # A piece, or a sum of pieces, is a quarter of an array wide, and drawn at its own place.
                    at, wide = (left + int(piece[1]), 1) if piece[1:] else (left, 4)
                    place.add_patch(Rectangle((at, rank + 0.06), wide, 0.88, fc=colour, ec="white"))
                    text = "sum" if piece == "+" else "Σ" if piece[0] == "+" else piece[0]
                    place.text(at + wide / 2, rank + 0.5, text, ha="center", va="center", color=ink(*to_rgb(colour)))
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
