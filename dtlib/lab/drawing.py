"""Figures of the lessons: sharp at any size, with alternative text and a text version.

    @shown
    def ladder(rungs):
        figure, axes = subplots(height=4)
        ...
        return figure, "Bars: points per second of each rung.", Table(rows, headers)

A figure is an SVG in an <img>. So it can have alternative text, and its internal names do not clash with those of other
figures. JupyterLab also shows it in a notebook that was not run here, whose inline SVG it would remove as untrusted. An
<img> ignores the page's theme, so on a dark page the figure is a white card with reduced brightness
(settings/custom/custom.css, docs/_static/site.css).
"""

import functools
import io
import re
from collections.abc import Callable
from html import escape
from urllib.parse import quote

from dtlib.lab.foreign import Axis, Figure

# Inches of 96 CSS pixels. This is the width of an output beside JupyterLab's file browser in a window of 1,280 pixels.
WIDTH = 8.6
POINTS = 12  # size of all text; 12 points are 16 CSS pixels
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # shapes, so that colour is not the only difference
STYLE: dict = {
    **{f"{what}.labelsize": POINTS for what in ("axes", "xtick", "ytick")},
    "font.size": POINTS, "axes.titlesize": POINTS, "legend.fontsize": POINTS, "hatch.linewidth": 0.7,
    "font.sans-serif": ["DejaVu Sans", "Verdana"], "svg.fonttype": "none",
    "svg.hashsalt": "dtlib",  # equal figures give equal bytes
    "figure.constrained_layout.use": True, "figure.dpi": 100,
    "savefig.dpi": 192,  # for parts that are drawn as pixels
}  # fmt: skip
LARGER = 1.5  # factor for letters and taller figures on a projector
_COORDINATES = re.compile(r' (?:d|x|y|transform)="[^"]*"')


def projector(on: bool = True) -> None:
    """Draw later figures with larger letters and thicker lines; ``projector(False)`` returns to normal."""
    _projector["on"] = on


_projector = {"on": False}


def _style() -> dict:
    if not _projector["on"]:
        return STYLE
    sizes = {name: LARGER * value for name, value in STYLE.items() if name.endswith(("size", "linewidth"))}
    return {**STYLE, **sizes, "lines.linewidth": 3.5, "lines.markersize": 10, "axes.linewidth": 1.4}


class Picture:
    """A figure with alternative text and its text version: tables and texts."""

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
    """Make a function that returns the arguments of a ``Picture`` display it.

    The function's attribute ``drawn`` is a function that returns the picture instead.
    """

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
    """Show a widget; without a page that can show it, print ``text`` instead."""
    from IPython import get_ipython
    from IPython.display import display

    if getattr(get_ipython(), "kernel", None) is None:
        return print(text)
    data = widget._repr_mimebundle_() if hasattr(widget, "_repr_mimebundle_") else {}
    display({**data, "text/plain": text}, raw=True)


def subplots(rows: int = 1, columns: int = 1, *, height: float, width: float = WIDTH, **other: object) -> tuple:
    """Return a figure and its axes, sized in inches, without registering them in pyplot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * (LARGER**0.5 if _projector["on"] else 1)))
    drawn: Callable = figure.subplots
    return figure, drawn(rows, columns, **other)


def fits(text: object, inches: float) -> bool:
    """Return whether a label fits into a width in inches."""
    return inches > text_width(text) + 0.06


def text_width(text: object) -> float:
    """Return the width of a text in inches."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), str(text), size=POINTS * (LARGER if _projector["on"] else 1)).get_extents().width / 72


def in_short(value: float) -> str:
    """Return a number with two digits and a prefix, such as 1.4 G or 790 k."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter()(float(f"{value:.2g}"))


def units(axis: Axis, unit: str = "") -> None:
    """Label a logarithmic axis with 1 k, 10 k, 1 M and a unit; exponents would be in small print."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    axis.set_major_formatter(EngFormatter(unit))
    axis.set_minor_formatter(NullFormatter())


def _svg(figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    # Remove comments, metadata and surplus digits: notebooks store the SVG, and equal figures must give equal text.
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = _COORDINATES.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found.group()), svg)
    return re.sub(r"\s+", " ", svg)
