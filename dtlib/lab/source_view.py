"""Show the library's own source in a notebook with syntax colours, and read published tables."""

import csv
import inspect
from collections.abc import Callable
from difflib import unified_diff
from itertools import groupby
from pathlib import Path
from types import ModuleType

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer, TextLexer, get_lexer_for_filename

import dtlib
from dtlib.lab import course

ROOT = Path(dtlib.__file__).parents[1]
# Lines of 120 letters fit beside JupyterLab's file browser in a window of 1,280 pixels; longer lines wrap.
LINES = (
    "white-space: pre-wrap; word-break: normal; overflow-wrap: break-word; "
    "font-size: 11.2px; line-height: 1.4; margin: 0; padding: 6px"
)


def read(*things: Callable | ModuleType | Path) -> None:
    """Show the source of classes and functions, the docstring of a module, or the whole text of a path."""
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
        _show(file + where, [text.strip("\n") for text in texts], lexer)


def read_end(module: ModuleType) -> None:
    """Show the comment at the end of a module, which says what its full version adds."""
    lines = inspect.getsource(module).splitlines()
    first = max(number for number, line in enumerate(lines) if not line.startswith("#")) + 1
    where = f"{_file(module)}, lines {first + 1} to {len(lines)}"
    _show(where, ["\n".join(line.removeprefix("# ") for line in lines[first:])], TextLexer())


def read_changes(before: Path, after: Path) -> None:
    """Show the lines in which two files differ, except their first lines."""
    old, new = (path.read_text().splitlines()[1:] for path in (before, after))
    changes = [line for line in unified_diff(old, new, n=0, lineterm="") if not line.startswith(("---", "+++", "@@"))]
    _show(f"{before.name} (-), {after.name} (+)", ["\n".join(changes)], DiffLexer())


def published(name: str) -> list[dict[str, str]]:
    """Return the rows of a table in the course's folder ``data``, as the paper printed them."""
    return list(csv.DictReader((course.folder() / "data" / name).read_text().splitlines()))


def _file(thing) -> str:
    if isinstance(thing, Path):  # a file of the course
        file, root = thing, course.folder()
    else:
        # Without unwrap, this would be the file of a decorator.
        file, root = Path(inspect.getsourcefile(inspect.unwrap(thing)) or ""), ROOT
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name


def _show(where: str, texts: list[str], lexer) -> None:
    # CSS classes instead of colours, so that the page's theme applies (settings/custom/custom.css; in the book,
    # Sphinx's).
    text = "\n\n\n".join(texts)
    html = highlight(text, lexer, HtmlFormatter(cssclass="highlight dtlib-code", prestyles=LINES))
    display({"text/plain": f"{where}\n\n{text}", "text/html": f"<code>{where}</code>{html}"}, raw=True)
