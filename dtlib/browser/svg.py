"""Draw SVG pictures, each with one sentence and a folded text for readers who cannot see it."""

from html import escape
from zlib import crc32

from dtlib.lab.colours import rank_colour

SIZE = 14  # size of letters in pixels, if the picture is shown at full width
WIDTH = 900


class Picture:
    """A picture to which shapes are added; ``html()`` returns the figure.

    Text and thin lines use the page's own text colour.
    """

    def __init__(self, height: float, alt: str, text: str = "", width: float = WIDTH):
        self.height, self.width, self.alt, self.text = height, width, alt, text
        self._parts: list[str] = []
        # Unique names: a pattern that another picture defines is not drawn while that picture is hidden.
        self._own = crc32(alt.encode())

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none", opacity: float = 1.0,
        frame: bool = False, hatch: bool = False, title: str = "",
    ) -> None:  # fmt: skip
        """Add a rectangle; coordinates are pixels from the top left corner."""
        stroke = ' stroke="currentColor" stroke-width="2.5"' if frame else ' stroke="currentColor" stroke-width=".4"'
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(0, width):.1f}" height="{height:.1f}"'
        said = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f'<rect {shape} fill="{fill}" fill-opacity="{opacity:g}"{stroke}>{said}</rect>')
        if hatch:
            self._parts.append(f'<rect {shape} fill="url(#hatch-{self._own})"/>')

    def words(
        self, x: float, y: float, text: object, anchor: str = "start", fill: str = "currentColor", bold: bool = False
    ) -> None:
        """Add a line of text; ``y`` is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(str(text))}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = "currentColor", width: float = 1.5,
        dashed: bool = False, arrow: bool = False,
    ) -> None:  # fmt: skip
        """Add a line, dashed or with an arrow at its end if asked."""
        more = ' stroke-dasharray="5 4"' if dashed else ""
        more += f' marker-end="url(#arrow-{self._own})"' if arrow else ""
        at = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {at} stroke="{colour}" stroke-width="{width:g}"{more}/>')

    def html(self) -> str:
        """Return the picture as an HTML figure."""
        folded = f"<details><summary>as text</summary><pre>{escape(self.text)}</pre></details>" if self.text else ""
        return (
            f'<figure><svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" role="img" '
            f'aria-label="{escape(self.alt)}" font-size="{SIZE}" font-family="Verdana, DejaVu Sans, sans-serif">'
            f'<defs><pattern id="hatch-{self._own}" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" stroke="#fff" stroke-width="1.6"/>'
            f'</pattern><marker id="arrow-{self._own}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
            'markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
            f"{''.join(self._parts)}</svg><figcaption>{escape(self.alt)}</figcaption>{folded}</figure>"
        )


def letters_on(colour: str) -> str:
    """Return black or white, whichever is readable on a colour such as #0072B2."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def rank_label(picture: Picture, rank: int, y: float) -> None:
    """Add a rank's colour and number at the left margin."""
    picture.box(0, y - 11, 11, 11, rank_colour(rank))
    picture.words(16, y, f"rank {rank}")


def sentence(text: object, right: bool | None = None) -> str:
    """Return a block that screen readers announce: as right (True), as not yet right (False), or neither (None)."""
    kind, sign = {True: ("right", "✓ "), False: ("not-yet", "↻ "), None: ("said", "")}[right]
    return f'<div role="status" class="{kind}">{sign}{escape(str(text))}</div>'
