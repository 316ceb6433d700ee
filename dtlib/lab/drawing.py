"""A figure as every lesson shows it: sharp at any size, with a sentence for whoever does not see it, and its text.

    @shown
    def ladder(rungs):
        figure, axes = subplots(height=4)
        ...
        return figure, "Bars: points per second of each rung.", Table(rows, headers)

The figure is an SVG in an <img>: so it has alternative text, its names do not clash with those of other figures, and it
is shown in a notebook that was not run here (in HTML that JupyterLab does not trust it leaves out SVG). An <img> hears
of no theme: on a dark page its white is a card, less bright (settings/custom/custom.css, docs/_static/site.css).
"""

import functools
import io
import re
from collections.abc import Callable
from html import escape
from urllib.parse import quote

from dtlib.lab.foreign import Axis, Figure

WIDTH = 8.6  # inches of 96 CSS pixels: an output beside JupyterLab's file browser in a window of 1,280 pixels
POINTS = 12  # of all text: 16 CSS pixels
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # which differ by shape as well as by colour
STYLE: dict = {
    **{f"{what}.labelsize": POINTS for what in ("axes", "xtick", "ytick")},
    "font.size": POINTS, "axes.titlesize": POINTS, "legend.fontsize": POINTS, "hatch.linewidth": 0.7,
    "font.sans-serif": ["DejaVu Sans", "Verdana"], "svg.fonttype": "none",
    "svg.hashsalt": "dtlib",  # the same figure has the same bytes
    "figure.constrained_layout.use": True, "figure.dpi": 100,
    "savefig.dpi": 192,  # of what is too much to be drawn as lines
}  # fmt: skip
LARGER = 1.5  # on a projector: letters, lines and marks, in a figure that is as wide as before
_COORDINATES = re.compile(r' (?:d|x|y|transform)="[^"]*"')


def projector(on: bool = True) -> None:
    """Larger letters, thicker lines and taller figures from the next figure on; ``projector(False)`` takes it back."""
    _projector["on"] = on


_projector = {"on": False}


def _style() -> dict:
    if not _projector["on"]:
        return STYLE
    sizes = {name: LARGER * value for name, value in STYLE.items() if name.endswith(("size", "linewidth"))}
    return {**STYLE, **sizes, "lines.linewidth": 3.5, "lines.markersize": 10, "axes.linewidth": 1.4}


class Picture:
    """A figure, a sentence that says what it shows, and its text equivalent: tables and texts."""

    def __init__(self, figure: Figure, alt: str, *texts: object):
        self.alt, self.texts = alt, texts
        self.svg = _svg(figure)

    def __str__(self) -> str:
        from dtlib.lab.tables import fold

        return "\n\n".join([fold(self.alt), *map(str, self.texts)])

    __repr__ = __str__

    def _repr_html_(self):
        address = "data:image/svg+xml," + quote(self.svg, safe=" =:;,/()[]{}+*!?@$~'")
        texts = [
            text._repr_html_() if hasattr(text, "_repr_html_") else f"<pre>{escape(str(text))}</pre>"
            for text in self.texts
        ]
        return (
            '<figure class="dtlib-figure" style="margin:0">'
            f'<img alt="{escape(self.alt)}" src="{address}" style="max-width:100%">'
            f"<details><summary>as text</summary>{''.join(texts)}</details></figure>"
        )


def shown(draw: Callable) -> Callable:
    """Have a function that returns the arguments of a ``Picture`` show it; its ``drawn`` returns the picture."""

    def drawn(*arguments, **named) -> Picture:
        from matplotlib import rc_context

        with rc_context(_style()):
            return Picture(*draw(*arguments, **named))

    @functools.wraps(draw)
    def show(*arguments, **named) -> None:
        from IPython.display import display

        display(drawn(*arguments, **named))

    vars(show)["drawn"] = drawn
    return show


def show_widget(widget: object, text: str) -> None:
    """Show a widget; where nobody could move it, its place says in words what would be there."""
    from IPython.display import display

    data = widget._repr_mimebundle_() if hasattr(widget, "_repr_mimebundle_") else {}
    display({**data, "text/plain": text}, raw=True)


def subplots(rows: int = 1, columns: int = 1, *, height: float, width: float = WIDTH, **other: object) -> tuple:
    """A figure of so many inches and its axes, as pyplot would make them, but known to nobody else."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * (LARGER**0.5 if _projector["on"] else 1)))
    drawn: Callable = figure.subplots
    return figure, drawn(rows, columns, **other)


def fits(text: object, inches: float) -> bool:
    """Whether a label fits into so much of a figure."""
    return inches > text_width(text) + 0.06


def text_width(text: object) -> float:
    """Inches."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), str(text), size=POINTS * (LARGER if _projector["on"] else 1)).get_extents().width / 72


def in_short(value: float) -> str:
    """Two digits of it: 1.4 G, 790 k."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter()(float(f"{value:.2g}"))


def units(axis: Axis, unit: str = "") -> None:
    """Label a logarithmic axis with 1 k, 10 k, 1 M (of a unit): powers would be in small print."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    axis.set_major_formatter(EngFormatter(unit))
    axis.set_minor_formatter(NullFormatter())


def _svg(figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = _COORDINATES.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found.group()), svg)
    return re.sub(r"\s+", " ", svg)
