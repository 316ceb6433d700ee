"""The library's own source in a notebook, in the colours of code: what is read is what then runs."""

import inspect
from pathlib import Path

from IPython.display import Markdown, display

import dtlib


def read(*parts) -> None:
    """Show the source of classes and functions, one below the other; of a module its docstring."""
    for part in parts:
        _show(part, inspect.getdoc(part) if inspect.ismodule(part) else inspect.getsource(part))


def read_end(module) -> None:
    """Show the comment at the end of a module: what its full form adds, and where."""
    lines = inspect.getsource(module).splitlines()
    first = max(number for number, line in enumerate(lines) if not line.startswith("#")) + 1
    _show(module, "\n".join(lines[first:]))


def _show(part, text: str) -> None:
    """Markdown, as notebooks, GitHub and slides all know how to draw it; long lines scroll."""
    root = Path(dtlib.__file__).parents[1]
    file = Path(inspect.getsourcefile(part)).relative_to(root).as_posix()
    language = "text" if inspect.ismodule(part) else "python"
    display(Markdown(f"`{file}`\n\n```{language}\n{text.strip()}\n```"))
