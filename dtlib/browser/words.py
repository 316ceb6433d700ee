"""The room with the glossary."""

import tomllib
from html import escape

from dtlib.lab import lesson_files

TITLE, LESSON = "Glossary", "start"
SAYS = "The words of the course, each with the number of the lesson that explains it."
FORM = ()


def show() -> str:
    """Return the glossary as HTML."""
    words = tomllib.loads((lesson_files.FOLDER / "glossary.toml").read_text(encoding="utf-8"))
    rows = "".join(
        f"<dt>{escape(word)}</dt><dd>{escape(meaning)} <small>{lesson}</small></dd>"
        for word, (meaning, lesson) in sorted(words.items(), key=lambda item: item[0].lower())
    )
    return f"<dl>{rows}</dl>"
