"""The library's own source in a notebook, in the colours of code; and tables that papers have published."""

import csv
import inspect
from difflib import unified_diff
from itertools import groupby
from pathlib import Path

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer, TextLexer, get_lexer_for_filename

import dtlib
from dtlib.lab.engines import workshop
from dtlib.lab.tables import fold

ROOT = Path(dtlib.__file__).parents[1]
# Of 120 letters beside JupyterLab's file browser, at 1,280 pixels; a longer line goes on below.
LINES = (
    "white-space: pre-wrap; word-break: normal; overflow-wrap: break-word; "
    "font-size: 11.2px; line-height: 1.4; margin: 0; padding: 6px"
)


def read(*things) -> None:
    """Show the source of classes and functions, one below the other; of a module its docstring; of a path all of it."""
    for file, some in groupby(things, key=_file):
        texts: list[str] = []
        lines: list[str] = []
        lexer = PythonLexer()
        for thing in some:
            if isinstance(thing, Path):
                texts, lines, lexer = [thing.read_text()], [], get_lexer_for_filename(thing.name)
            elif inspect.ismodule(thing):
                texts, lexer = [inspect.getdoc(thing) or ""], TextLexer()
            else:
                source, first = inspect.getsourcelines(thing)
                texts.append("".join(source))
                lines.append(f"{first} to {first + len(source) - 1}")
        where = f", lines {', '.join(lines)}" if lines else ""
        _show(file + where, "\n\n\n".join(text.strip("\n") for text in texts), lexer)


def read_end(module) -> None:
    """Show the comment at the end of a module: what its full form adds, and where."""
    lines = inspect.getsource(module).splitlines()
    first = max(number for number, line in enumerate(lines) if not line.startswith("#")) + 1
    where = f"{_file(module)}, lines {first + 1} to {len(lines)}"
    _show(where, "\n".join(line.removeprefix("# ") for line in lines[first:]), TextLexer())


def read_changes(before: Path, after: Path) -> None:
    """Show the lines in which two files differ, below their first ones."""
    old, new = (path.read_text().splitlines()[1:] for path in (before, after))
    changes = [line for line in unified_diff(old, new, n=0, lineterm="") if not line.startswith(("---", "+++", "@@"))]
    _show(f"{before.name} (-), {after.name} (+)", "\n".join(changes), DiffLexer())


def published(name: str) -> list[dict[str, str]]:
    """The rows of a table in the course's folder ``data``, as its paper printed them."""
    with open(workshop.folder() / "data" / name, newline="") as file:
        return list(csv.DictReader(file))


def _file(thing) -> str:
    if isinstance(thing, Path):  # of the course, wherever it is laid out
        file, root = thing, workshop.folder()
    else:
        file, root = Path(inspect.getsourcefile(inspect.unwrap(thing)) or ""), ROOT  # not a decorator's
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name


def _show(where: str, text: str, lexer) -> None:
    # Classes, not colours: those of the page's theme (settings/custom/custom.css; in the book, Sphinx's).
    html = highlight(text, lexer, HtmlFormatter(cssclass="highlight dtlib-code", prestyles=LINES))
    display({"text/plain": f"{where}\n\n{fold(text)}", "text/html": f"<code>{where}</code>{html}"}, raw=True)
