"""The room with the planner: which meshes fit a model, the time of a step on each, and a map of all meshes."""

from dtlib.browser.fields import Choice, Number
from dtlib.browser.svg import Picture, sentence
from dtlib.lab.tables import Table
from dtlib.planner import DEVICES, MODELS, report
from dtlib.planner.command import plan_for
from dtlib.planner.model import GIB

TITLE, LESSON = "Planner", "08_tensor_and_hybrid"
SAYS = (
    "A model, GPUs and a batch: the fastest meshes that fit, each with the band in which nine of ten steps are "
    "expected, and a map of what fits. ~ marks what nothing like it was measured for."
)
FORM = (
    Choice("plan", "model", "llama3-8b", {name: name for name in MODELS}),
    Number("gpus", "GPUs", 64, 1, 100_000),
    Choice("device", "GPU", "h100", {name: name for name in DEVICES}),
    Number("batch", "samples of a step, 0: four million tokens", 0, 0, 10_000_000),
)
BEST = 10
FITS, NOT, NONE = "#cfe8d5", "#f3d0cb", "#f2f2f2"


def show(plan: str, gpus: int, device: str, batch: int) -> str:
    """Return a summary, the fastest meshes, the map and details of the fastest, as HTML."""
    found, tried = plan_for(plan, gpus, device, batch, best=BEST)
    title = "The fastest that fit; ~ where nothing like it was measured"
    best = Table(report.best_rows(found), report.HEADERS, title)._repr_html_() if found else ""
    details = Table(report.details(found[0]), ("", "of the fastest"))._repr_html_() if found else ""
    return sentence(report.summary(found, tried)) + best + _map(tried) + details


def _map(tried) -> str:
    rows, headers = report.map_rows(tried)
    fit, limit = sum(each.fits for each in tried), tried[0].device.memory / GIB
    alt = (
        f"A grid of tensor and pipe axes: {fit} of {len(tried)} meshes fit into {limit:.0f} GiB; green has the seconds "
        "of the fastest that fits, x the GiB where none does."
    )
    text = "\n".join("".join(str(cell).ljust(14) for cell in row).rstrip() for row in [headers, *rows])
    picture = Picture(34 * len(rows) + 26, alt, text, width=110 + 112 * (len(headers) - 1))
    for y, (name, *cells) in enumerate(rows):
        picture.words(0, y * 34 + 22, name)
        for x, cell in enumerate(cells):
            colour = NONE if cell == "-" else NOT if cell.startswith("no") else FITS
            picture.box(100 + x * 112, y * 34 + 2, 108, 30, colour)
            picture.words(154 + x * 112, y * 34 + 22, cell.replace("no: ", "x "), "middle", "#000000")
    for x, header in enumerate(headers[1:]):
        picture.words(154 + x * 112, 34 * len(rows) + 18, header, "middle")
    return picture.html()
