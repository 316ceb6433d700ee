"""lab.plan(): which meshes a model fits on, and how long a step takes there, as a table and a map."""

from math import nan

from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table, table
from dtlib.planner import Estimate, report
from dtlib.planner.command import asked
from dtlib.planner.model import GIB, Device, Model

FULL, NOT, NONE = "#6db584", "#f3d0cb", "#f2f2f2"


def plan(
    model: Model | str | dict = "llama3-8b", gpus: int = 64, device: Device | str = "h100", batch: int = 0,
    seq: int = 0, best: int = 10, **fixed: object,
) -> list[Estimate]:  # fmt: skip
    """Show the ``best`` meshes and the map of what fits; return the estimates of the best, the fastest first.

    Args:
        model: a name in ``dtlib.planner.MODELS``, a ``Model``, a transformers config (dictionary or file), or sizes.
        gpus: of the whole job.
        device: a name in ``dtlib.planner.DEVICES``, or a ``Device``.
        batch: samples of a step; by default four million tokens.
        seq: tokens of a sample, in place of the model's.
        fixed: fields of ``dtlib.planner.Plan`` that are given, such as ``zero=3``.
    """
    found, tried = asked(model, gpus, device, batch, seq, fixed, best)
    print(report.summary(found, tried))
    if found:
        table(report.best_rows(found), report.HEADERS, "The fastest that fit; ~ where nothing like it was measured")
    what_fits(tried)
    return found


@shown
def what_fits(tried: list[Estimate]) -> tuple:
    """A square a tensor and a pipe axis: its shade is the GiB of the fastest that fits, and its text the bounds of the
    step in seconds. Red squares have the GiB of the smallest, which does not fit."""
    from matplotlib.colors import LinearSegmentedColormap

    tensors, pipes = (sorted({getattr(e.plan, axis) for e in tried}) for axis in ("tensor", "pipe"))
    found = {(e.plan.tensor, e.plan.pipe): e for e in reversed(tried)}  # the best of a square is the last
    gib = {mesh: e.memory.total / GIB for mesh, e in found.items()}
    room = tried[0].device.memory / GIB
    shades = LinearSegmentedColormap.from_list("room", ("white", FULL)).with_extremes(bad=NONE, over=NOT)
    figure, axes = subplots(height=0.9 + 0.55 * len(tensors))
    shaded = [[gib.get((t, p), nan) for p in pipes] for t in tensors]
    squares = axes.pcolormesh(shaded, cmap=shades, vmin=0, vmax=room, edgecolors="white", lw=3)
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
    alt = f"A grid of tensor and pipe: {sum(e.fits for e in tried)} of {len(tried)} meshes fit into {room:.0f} GiB."
    rows = [(f"tensor {t}", *(texts.get((t, p), "-") for p in pipes)) for t in tensors]
    return figure, alt, Table(rows, ("", *(f"pipe {p}" for p in pipes)))
