"""lab.chart(): which parallelism to use when, on one page: question, deciding inequality, and the lesson to measure it.

P: parameters. N: data ranks. t: tensor ranks. c: context ranks. p: stages. m: micro-batches. n: tokens of a micro-batch
on one rank. h: hidden size. k: width of keys and values. s: tokens of a sample. F: operations per second of a GPU. B:
bytes per second of the link. 16 bytes per parameter: mixed precision with Adam.
"""

from textwrap import fill

from dtlib.lab.drawing import POINTS, shown, subplots
from dtlib.lab.tables import Table

# question, the inequality for yes, the method to use then, the lesson that measures it
BRANCHES = (
    ("Does it fit on one GPU?", "16 P + activations\n≤ memory", "data parallelism:\none copy per GPU", "lesson 04"),
    ("Are activations the\nlargest part?", "activations\n> model states",
     "smaller micro-batch, then\nrecompute: 1/3 more work", "07; dtlib plan"),
    ("Do states fit if some\nare sharded?", "4 P + 12 P/N or\n2 P + 14 P/N ≤ memory",
     "ZeRO-1, or 2 with one\nmicro-batch: same bytes sent", "lesson 06"),
    ("Does computing hide\nsending 3 P per step?", "16 P/N ≤ memory\nand n ≥ F/B",
     "ZeRO-3 (FSDP): 1.5 times\nthe bytes sent, or more", "lesson 06"),
    ("Is the link within the\nnode fast enough?", "t - 1 < 4.5 h B/F,\nt divides the heads",
     "tensor parallelism,\nwithin a node", "08; dtlib plan"),
    ("Are there micro-batches\nto fill a pipeline?", "m ≥ 4 (p - 1): the\nbubble is ≤ 20 %",
     "pipeline over nodes", "lesson 07"),
    ("Is one sample too long\nfor a GPU?", "s/c ≥ (k/h) F/B:\nthe ring is hidden",
     "context parallelism\nover c ranks", "lesson 12"),
    ("Are most parameters\nexperts?", "experts P > memory,\nranks divide experts",
     "expert parallelism,\nwithin a node", "lesson 12b"),
)  # fmt: skip
ELSE = "More GPUs, a smaller model, or fewer bytes per parameter"
# The legend is the second paragraph of this module's docstring.
LEGEND = " ".join(__doc__.partition("\n\n")[2].split())
ALL_SHARDED = ("Do they fit, sharded\nover all ranks?", "16 P/N ≤ memory", *BRANCHES[3][2:])
SHORT_BRANCHES = (BRANCHES[0], BRANCHES[2], ALL_SHARDED, BRANCHES[5])
SHORT_LEGEND = "P: parameters. N: data ranks. p: stages. m: micro-batches. " + LEGEND[LEGEND.index("16 bytes") :]
QUESTION, METHOD, LINE = "#dfe9f5", "#cfe8d5", "#555555"


@shown
def chart(short: bool = False) -> tuple:
    """Draw the chart. Each question follows if the answer above was no, or if the method above was not enough.

    ``short``: only the four questions of the two-hour track.
    """
    branches, legend = (SHORT_BRANCHES, SHORT_LEGEND) if short else (BRANCHES, LEGEND)
    rows = len(branches)
    figure, axes = subplots(height=1.02 * rows + (1.1 if short else 1.5))
    axes.set(xlim=(0, 10), ylim=(rows + (1.05 if short else 1.45), 0))
    axes.axis("off")
    for y, (question, rule, method, where) in enumerate(branches):
        _box(axes, 0.05, y, 3.1, question, QUESTION)
        axes.text(4.75, y + 0.36, rule, ha="center", va="center", fontsize=POINTS, family="monospace")
        axes.annotate("", (6.42, y + 0.72), (3.2, y + 0.72), arrowprops={"arrowstyle": "->", "color": LINE})
        _box(axes, 6.45, y, 3.5, f"{method}", METHOD)
        axes.text(3.3, y + 0.86, f"yes ({where})", va="center", fontsize=POINTS, color=LINE)
        axes.annotate("", (0.7, y + 1.06), (0.7, y + 0.8), arrowprops={"arrowstyle": "->", "color": LINE})
        axes.text(0.85, y + 0.93, "no, or not enough", va="center", fontsize=POINTS, color=LINE)
    axes.text(0.1, rows + 0.25, ELSE, va="center", fontsize=POINTS)
    axes.text(0.1, rows + 0.5, fill(legend, 84), va="top", fontsize=POINTS, color=LINE)
    said = "; ".join(f"{_line(q)} If {_line(rule)}: {_line(method)}" for q, rule, method, _ in branches)
    table = Table([tuple(map(_line, row)) for row in branches], ("question", "yes, if", "then", "measured in"))
    return figure, f"A chart of {rows} questions, top to bottom. {said}. Otherwise: {ELSE}.", table, fill(legend, 94)


def _box(axes, x, y, width, text, colour):
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(FancyBboxPatch((x, y + 0.06), width, 0.7, boxstyle="round,pad=0,rounding_size=0.08", color=colour))
    axes.text(x + width / 2, y + 0.41, text, ha="center", va="center", fontsize=POINTS)


def _line(text: str) -> str:
    return text.replace("\n", " ")
