"""The words of the course, each with the lesson that explains it (``dtlib/lessons/glossary.toml``):
``python -m tools.glossary`` writes the page."""

import re
import tomllib
from pathlib import Path

from dtlib.lab import lesson_files
from dtlib.lab.lesson_files import notebooks
from tools.navigation import is_lecture, name_of

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "reference" / "glossary.md"
TERMS = tomllib.loads((lesson_files.FOLDER / "glossary.toml").read_text(encoding="utf-8"))  # [meaning, lesson]


def lecture(number: str) -> Path:
    """The source of a lesson's lecture."""
    return next(path for name, path in notebooks().items() if name.startswith(f"{number}_") and is_lecture(path))


def title(source: Path) -> str:
    return re.search(r"^# # (.+)$", source.read_text(encoding="utf-8"), re.M)[1]


def page() -> str:
    """The glossary as Markdown."""
    rows = []
    for term, (meaning, number) in sorted(TERMS.items(), key=lambda item: item[0].lower()):
        source = lecture(number)
        rows.append(f"| **{term}** | {meaning} | [{title(source)}](../../notebooks/lectures/{name_of(source)}.ipynb) |")
    head = (
        "# Glossary\n\nThis page lists the terms of the course, and the lesson that explains each term.\n"
        "`python -m tools.glossary` writes this page.\n\n"
    )
    return head + "| term | meaning | lesson |\n|---|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
