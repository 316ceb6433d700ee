"""Show the library's own source in a notebook with syntax colours, and read published tables."""

import ast
import csv
import inspect
import textwrap
import tokenize
from collections.abc import Callable
from difflib import unified_diff
from io import StringIO
from itertools import groupby, product
from pathlib import Path
from types import ModuleType

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer, TextLexer, get_lexer_for_filename

import dtlib
from dtlib.lab import course
from dtlib.lab.tables import WIDEST, fold

ROOT = Path(dtlib.__file__).parents[1]
# Lines of 120 letters fit beside JupyterLab's file browser in a window of 1,280 pixels; longer lines wrap.
LINES = (
    "white-space: pre-wrap; word-break: normal; overflow-wrap: break-word; "
    "font-size: 11.2px; line-height: 1.4; margin: 0; padding: 6px"
)
# (end of a line, begin of the next) where a long line may be broken: between words of code, or of a string.
JOINTS = [("", ""), *((q + end, kind + q) for end, q, kind in product(("", " \\"), "\"'", ["", *"frb"])), ("\\", "")]


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
    html = highlight("\n\n\n".join(texts), lexer, HtmlFormatter(cssclass="highlight dtlib-code", prestyles=LINES))
    folded = "\n\n\n".join(map(_fold_code if isinstance(lexer, PythonLexer) else fold, texts))
    display({"text/plain": f"{where}\n\n{folded}", "text/html": f"<code>{where}</code>{html}"}, raw=True)


def _fold_code(source: str) -> str:
    """Return the same Python in short lines: long comments move above their line, and long strings are split."""
    lines = source.split("\n")
    tokens = list(tokenize.generate_tokens(StringIO(source).readline))
    for row, column, comment in [(*each.start, each.string) for each in tokens if each.type == tokenize.COMMENT][::-1]:
        if len(line := lines[row - 1]) > WIDEST:
            indent = " " * (len(line) - len(line.lstrip()))
            above = textwrap.wrap(comment, WIDEST, initial_indent=indent, subsequent_indent=f"{indent}# ")
            lines[row - 1 : row] = above + [line[:column].rstrip()] * (column > len(indent))
    meaning = _meaning(source)
    # The loop also visits the lines that it inserts. A break counts only if Python still reads the same code.
    for row, line in enumerate(lines):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        places = range(WIDEST - 2, len(indent) + 1, -1) if len(line) > WIDEST else ()
        for at, (end, begin) in product((at for at in places if line[at] == " "), JOINTS):
            both = [f"{line[:at]} {end}".rstrip(), indent + begin + line[at + 1 :]]
            if len(both[0]) <= WIDEST and _meaning("\n".join([*lines[:row], *both, *lines[row + 1 :]])) == meaning:
                lines[row : row + 1] = both
                break
    return "\n".join(lines)


def _meaning(source: str) -> str | None:
    """Return the syntax tree of a source, with white space in docstrings normalised; None if it is not Python."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = " ".join(node.value.value.split())
    return ast.dump(tree)
