"""The library's own source in a notebook, in the colours of code: what is read is what then runs."""

import inspect
from pathlib import Path

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, TextLexer

import dtlib

# Whole lines beside JupyterLab's file browser, at 1,280 pixels; one that is longer scrolls.
LINES = "white-space: pre; overflow-x: auto; font-size: 11.5px; line-height: 1.4; margin: 0; padding: 6px"


def read(*things) -> None:
    """Show the source of classes and functions, one below the other; of a module its docstring."""
    first = things[0]
    texts = [inspect.getdoc(thing) if inspect.ismodule(thing) else inspect.getsource(thing) for thing in things]
    _show(first, "\n\n\n".join(text.strip("\n") for text in texts), "" if inspect.ismodule(first) else "python")


def read_end(module) -> None:
    """Show the comment at the end of a module: what its full form adds, and where."""
    lines = inspect.getsource(module).splitlines()
    first = max(number for number, line in enumerate(lines) if not line.startswith("#")) + 1
    _show(module, "\n".join(line.removeprefix("# ") for line in lines[first:]), "")


def _show(thing, text: str, language: str) -> None:
    root = Path(dtlib.__file__).parents[1]
    file = Path(inspect.getsourcefile(thing)).relative_to(root).as_posix()
    lexer = PythonLexer() if language else TextLexer()
    html = highlight(text, lexer, HtmlFormatter(noclasses=True, style="default", prestyles=LINES))
    display({"text/plain": f"{file}\n\n{text}", "text/html": f"<code>{file}</code>{html}"}, raw=True)
