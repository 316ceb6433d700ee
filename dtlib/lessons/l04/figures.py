"""The figure of lesson 04: data parallelism."""

from dtlib.lab.colours import rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table

STEPS = (
    ("a slice of the batch", "a different slice on each rank"),
    ("the model", "the same on all ranks"),
    ("gradients", "of the rank's slice: different on each rank"),
    ("all_reduce, mean", "the same on all ranks: the gradient of the whole batch"),
    ("optimizer.step()", "the same on all ranks, so models stay equal"),
)


@shown
def data_parallelism(ranks: int = 4):
    """Draw one step with ranks as columns: slices of the batch, models, gradients, all_reduce, optimizer steps."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    figure, axes = subplots(height=5.4)
    box = {"boxstyle": "round,pad=0.02,rounding_size=0.08"}

    def label(y, text):
        axes.text(-0.15, y, text, ha="right", va="center")

    for rank in range(ranks):
        x, colour = 2.0 * rank, rank_colour(rank)
        arrow = {"arrowstyle": "->", "color": "0.3", "lw": 1.5}
        axes.text(x + 0.8, 6.75, f"rank {rank}", ha="center", va="center", weight="bold")
        for number in range(4):
            axes.add_patch(Rectangle((x + 0.4 * number, 6.0), 0.36, 0.45, fc=colour, ec="white"))
        axes.annotate("", (x + 0.8, 5.45), (x + 0.8, 5.95), arrowprops=arrow)
        axes.add_patch(FancyBboxPatch((x, 4.4), 1.6, 1.0, fc="0.88", ec="0.4", **box))
        for layer in range(3):
            axes.plot([x + 0.15, x + 1.45], [4.65 + 0.25 * layer] * 2, color="0.35", lw=3)
        axes.annotate("", (x + 0.8, 3.85), (x + 0.8, 4.35), arrowprops=arrow)
        axes.add_patch(Rectangle((x, 3.35), 1.6, 0.45, fc=colour, ec="white", hatch="//"))
        axes.annotate("", (x + 0.8, 2.75), (x + 0.8, 3.3), arrowprops=arrow)
        axes.annotate("", (x + 0.8, 1.5), (x + 0.8, 1.95), arrowprops=arrow)
        axes.add_patch(Rectangle((x, 1.0), 1.6, 0.45, fc="0.25", ec="white"))
        axes.annotate("", (x + 0.8, 0.45), (x + 0.8, 0.95), arrowprops=arrow)
        axes.text(x + 0.8, 0.2, "step()", ha="center", va="center", family="monospace")
    axes.add_patch(FancyBboxPatch((0, 2.0), 2.0 * ranks - 0.4, 0.7, fc="white", ec="0.1", lw=2, **box))
    axes.text(ranks - 0.2, 2.35, 'all_reduce(gradients, op="mean")', ha="center", va="center", family="monospace")
    for y, text in ((6.22, "batch"), (4.9, "model"), (3.57, "gradients"), (1.22, "mean gradients")):
        label(y, text)
    axes.set(xlim=(-1.9, 2.0 * ranks - 0.2), ylim=(0, 7.1))
    axes.axis("off")
    alt = f"A step of data parallelism on {ranks} ranks: slices of the batch differ, models and mean gradients do not."
    return figure, alt, Table(STEPS, ("what", "on the ranks"))
