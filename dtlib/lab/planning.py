"""lab.plan(): which meshes a model fits on, and how long a step takes there, as a table and a map."""

from matplotlib.patches import Rectangle

from dtlib.lab.drawing import POINTS, shown, subplots
from dtlib.lab.tables import Table, table
from dtlib.planner import Estimate, report
from dtlib.planner.command import asked
from dtlib.planner.model import GIB, Device, Model

FITS, NOT, NONE = "#cfe8d5", "#f3d0cb", "#f2f2f2"


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
    """A square a tensor and a pipe axis: green with seconds where a plan fits, red with GiB where none does."""
    rows, headers = report.map_rows(tried)
    figure, axes = subplots(height=0.9 + 0.55 * len(rows))
    for y, (_, *cells) in enumerate(rows):
        for x, cell in enumerate(cells):
            colour = NONE if cell == "-" else NOT if cell.startswith("no") else FITS
            axes.add_patch(Rectangle((x, y), 0.96, 0.92, color=colour))
            axes.text(x + 0.48, y + 0.46, cell.replace("no: ", "x "), ha="center", va="center", fontsize=POINTS)
    axes.set_xlim(0, len(headers) - 1)
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([x + 0.48 for x in range(len(headers) - 1)], headers[1:])
    axes.set_yticks([y + 0.46 for y in range(len(rows))], [name for name, *_ in rows])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    fit = sum(each.fits for each in tried)
    room = tried[0].device.memory / GIB
    alt = f"A grid of tensor and pipe axes: {fit} of {len(tried)} meshes fit into {room:.0f} GiB; x marks others."
    return figure, alt, Table(rows, headers)
