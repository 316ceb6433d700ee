"""lab.plan(): the meshes that fit a model and the time of a step on each, as a table and a map."""

from math import nan

from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table, table
from dtlib.planner import Estimate, report
from dtlib.planner.command import plan_for
from dtlib.planner.model import GIB, Device, Model

FULL, NOT, NONE = "#6db584", "#f3d0cb", "#f2f2f2"


def plan(
    model: Model | str | dict = "llama3-8b", gpus: int = 64, device: Device | str = "h100", batch: int = 0,
    seq: int = 0, best: int = 10, **fixed: object,
) -> list[Estimate]:  # fmt: skip
    """Show the ``best`` meshes and a map of all meshes; return the best estimates, the fastest first.

    Args:
        model: a name in ``dtlib.planner.MODELS``, a ``Model``, a transformers config (dictionary or file), or sizes.
        gpus: number of GPUs in the whole job.
        device: a name in ``dtlib.planner.DEVICES``, or a ``Device``.
        batch: samples per step; by default as many as make four million tokens.
        seq: tokens per sample; overrides the model's.
        best: number of meshes to show.
        fixed: fields of ``dtlib.planner.Plan`` with fixed values, such as ``zero=3``.
    """
    found, tried = plan_for(model, gpus, device, batch, seq, fixed, best)
    print(report.summary(found, tried))
    if found:
        table(report.best_rows(found), report.HEADERS, "The fastest that fit; ~ where nothing like it was measured")
    what_fits(tried)
    return found


@shown
def what_fits(tried: list[Estimate]) -> tuple:
    """Draw one square for each size of the tensor and the pipe axis.

    The shade is the memory in GiB of the fastest mesh that fits, and the text has the range of a step in seconds. Red
    squares show the GiB of the smallest mesh, which does not fit.
    """
    from matplotlib.colors import LinearSegmentedColormap

    tensors, pipes = (sorted({getattr(e.plan, axis) for e in tried}) for axis in ("tensor", "pipe"))
    # The best mesh of a square comes first in `tried`: reversed, it is stored last.
    found = {(e.plan.tensor, e.plan.pipe): e for e in reversed(tried)}
    gib = {mesh: e.memory.total / GIB for mesh, e in found.items()}
    limit = tried[0].device.memory / GIB
    shades = LinearSegmentedColormap.from_list("room", ("white", FULL)).with_extremes(bad=NONE, over=NOT)
    figure, axes = subplots(height=0.9 + 0.55 * len(tensors))
    shaded = [[gib.get((t, p), nan) for p in pipes] for t in tensors]
    squares = axes.pcolormesh(shaded, cmap=shades, vmin=0, vmax=limit, edgecolors="white", lw=3)
    figure.colorbar(squares, label="GiB", extend="max", pad=0.01)
    bounds = {mesh: f"{e.said(e.low)}–{e.said(e.high)} s, " * e.fits for mesh, e in found.items()}
    texts = {mesh: f"{bounds[mesh]}{gib[mesh]:.0f} GiB" for mesh in found}
    for (t, p), text in texts.items():
        axes.text(pipes.index(p) + 0.5, tensors.index(t) + 0.5, text.partition(",")[0], ha="center", va="center")
    axes.set_xticks([x + 0.5 for x in range(len(pipes))], [f"pipe {p}" for p in pipes])
    axes.set_yticks([y + 0.5 for y in range(len(tensors))], [f"tensor {t}" for t in tensors])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    alt = f"A grid of tensor and pipe: {sum(e.fits for e in tried)} of {len(tried)} meshes fit into {limit:.0f} GiB."
    rows = [(f"tensor {t}", *(texts.get((t, p), "-") for p in pipes)) for t in tensors]
    return figure, alt, Table(rows, ("", *(f"pipe {p}" for p in pipes)))
