"""The rooms of the page: find a room's module, and compute its answer to a form."""

from html import escape
from importlib import import_module
from types import ModuleType

from dtlib.errors import DtlibError

NAMES = ("schedule", "puzzle", "duel", "steps", "ranks", "exercise", "memory", "plan", "chart", "quiz", "words")


def room(name: str) -> ModuleType:
    """Return the module of a room, which defines TITLE, SAYS, LESSON, FORM and ``show``.

    Raises:
        DtlibError: for an unknown name.
    """
    if name not in NAMES:
        raise DtlibError(f"There is no room {name!r}: choose one of {', '.join(NAMES)}.")
    return import_module(f"dtlib.browser.{name}")


def answer(name: str, asked: dict[str, str]) -> str:
    """Return a room's answer to the values ``asked`` as HTML; errors become an HTML message."""
    try:
        where = room(name)
        values = {
            field.name: field.read(asked[field.name]) if field.name in asked else field.value
            for field in where.FORM
            if hasattr(field, "read")
        }
        if pressed := asked.get("pressed"):
            values["pressed"] = pressed
        return where.show(**values)
    except (DtlibError, ValueError) as problem:
        return f'<div role="alert" class="not-yet">{escape(str(problem))}</div>'
    except Exception as problem:
        said = f"{type(problem).__name__}: {problem}. This is a mistake of the page's; another setting may work."
        return f'<div role="alert" class="not-yet">{escape(said)}</div>'
