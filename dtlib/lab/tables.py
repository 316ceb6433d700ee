"""Tables as HTML, with sentences that wrap, and as text that fits on a page.

    lab.table(rows, ("rank", "bytes sent"))        display a table, also on a rank in a %%px cell
    Table(rows, headers)                           a part of a picture's text version (pictures.py)

In both forms ``rows`` may be any iterable.
"""

import re
import textwrap
from collections.abc import Iterable
from html import escape

from dtlib.lab.colours import rank_badge

WIDEST = 95  # columns of a text output, which a terminal or a narrow window can show
LONGEST = 10_000  # longer lines are not folded
NARROWEST = 14  # least width of a wrapped column
GAP = 2  # spaces between two columns
PADDING = 2  # tabulate pads a header by two columns
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ?(%|[a-zA-Zµ]{1,2}))?")


def fold(text: object, width: int = WIDEST) -> str:
    """Return a text with long lines broken between words; continuation lines are indented."""
    return "\n".join(part for line in str(text).split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width or len(line) > LONGEST:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + "    "
    return _wrap(line, width, subsequent_indent=indent)


def _wrap(text: str, width: int, **other) -> list[str]:
    """Break between words only, so that numbers stay whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, **other) or [""]


def table(rows: Iterable, headers: Iterable = (), title: str = "", floats: str = "g", align: str = "") -> None:
    """Display a table; arguments as for ``Table``."""
    from IPython.display import display

    display(Table(rows, headers, title, floats, align))


class Table:
    """Rows of cells, with HTML and text forms.

    Integers get thousands separators, floats the format ``floats``; other cells are shown as they are. ``align`` has
    one letter per column, l or r; by default numbers are aligned to the right. A column with the header "rank" shows
    the colour of each rank beside its number.
    """

    def __init__(self, rows: Iterable, headers: Iterable = (), title: str = "", floats: str = "g", align: str = ""):
        self.title = title
        self.cells = [[_text(cell, floats) for cell in row] for row in rows]
        self.headers = [str(header) for header in headers] or [""] * len(self.cells[0])
        columns = zip(*self.cells, strict=True) if self.cells else self.headers
        self.align = align or "".join("r" if self.cells and _is_numeric(column) else "l" for column in columns)

    def __str__(self) -> str:
        """Return text of at most ``WIDEST`` columns: long cells wrap, and surplus columns continue in a block below."""
        from tabulate import tabulate

        blocks = []
        for columns, widths in self._blocks():
            headers, *cells = (
                ["\n".join(_wrap(row[i], max(1, width - padding))) for i, width in zip(columns, widths, strict=True)]
                for row, padding in ((self.headers, PADDING), *((row, 0) for row in self.cells))
            )
            sides = ["right" if self.align[i] == "r" else "left" for i in columns]
            blocks.append(tabulate(cells, headers if any(headers) else (), disable_numparse=True, colalign=sides))
        return "\n\n".join([*[fold(self.title)] * bool(self.title), *blocks])

    __repr__ = __str__

    def _repr_html_(self):
        lines = [f'<caption style="text-align:left">{escape(self.title)}</caption>'] if self.title else []
        if any(self.headers):
            lines.append(f"<thead>{self._html_row('th', self.headers)}</thead>")
        lines += ["<tbody>", *(self._html_row("td", row) for row in self.cells), "</tbody>"]
        return "<table>" + "\n".join(lines) + "</table>"

    def _html_row(self, tag: str, row: list[str]) -> str:
        cells = []
        for cell, header, side in zip(row, self.headers, self.align, strict=True):
            style = "text-align:right" if side == "r" else "text-align:left"
            if tag == "td" and _NUMBER.fullmatch(cell):
                style += ";white-space:nowrap"
            inner = rank_badge(int(cell)) if header == "rank" and cell.isdigit() else escape(cell)
            cells.append(f'<{tag} style="{style}">{inner}</{tag}>')
        return f"<tr>{''.join(cells)}</tr>"

    def _blocks(self):
        """Yield which columns stand side by side, and their widths; the first column is in every block."""
        columns = [[header, *cells] for header, *cells in zip(self.headers, *self.cells, strict=True)]
        for column in columns:
            column[0] += " " * PADDING if column[0] else ""
        natural = [max(map(len, column)) for column in columns]
        # No word is broken.
        least = [
            max([
                min(width, NARROWEST) if side == "l" else 0,
                *(len(word) + PADDING for word in column[0].split()),
                *(len(word) for cell in column[1:] for word in cell.split()),
            ])
            for column, width, side in zip(columns, natural, self.align, strict=True)
        ]  # fmt: skip
        # Each block takes as many further columns as fit, by their least widths.
        begin, last = (1 if len(columns) > 1 else 0), len(columns)
        while begin < last:
            end = last
            while end > begin + 1 and sum(least[i] + GAP for i in (0, *range(begin, end))) - GAP > WIDEST:
                end -= 1
            chosen = list(dict.fromkeys([0, *range(begin, end)]))
            yield chosen, _narrowed([natural[i] for i in chosen], [least[i] for i in chosen])
            begin = end


def _narrowed(widths: list[int], least: list[int]) -> list[int]:
    """Reduce the widest columns until the row fits."""
    while sum(widths) + GAP * (len(widths) - 1) > WIDEST:
        wide = [i for i, width in enumerate(widths) if width > least[i]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _text(cell, floats: str) -> str:
    if isinstance(cell, bool) or not hasattr(cell, "__index__"):
        return format(cell, floats) if isinstance(cell, float) else "" if cell is None else str(cell)
    return f"{int(cell):,}"


def _is_numeric(column) -> bool:
    return any(column) and all(not cell or _NUMBER.fullmatch(cell) for cell in column)
