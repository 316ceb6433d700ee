"""What a learner has done: a small file in the folder of the course, and ticks from it on the start page there."""

import json
import re
from contextlib import suppress
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.engines import workshop

FILE = ".progress.json"
_ASKED = re.compile(r'lab\.(?:check|predict)\(\\?"([\w-]+)\\?"')  # in the text of a notebook's file
_LINK = re.compile(r"\]\(((lectures|exercises)/[^)]+\.ipynb)\)")


def done(name: str) -> None:
    """Note an exercise that passed or a prediction that was compared: in a learner's folder, and in no other."""
    with suppress(DtlibError, OSError):  # a record of what was done must not spoil it
        folder = workshop.folder()
        if (folder / course.RECORD).is_file() and name not in (known := _read(folder)):
            (folder / FILE).write_text(json.dumps(sorted({*known, name})))
            write_start_page(folder)


def write_start_page(folder: Path) -> None:
    """The start page in a learner's folder, with what is done there."""
    known, written = _read(folder), []
    for line in (course.SOURCE / course.START_PAGE).read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            cells = line.split("|")
            said = {"| lesson": " done ", "|---": "---"}
            cell = next((word for begin, word in said.items() if line.startswith(begin)), None)
            line = "|".join([*cells[:2], cell or f" {_of_row(line, known)} ", *cells[2:]])
        written.append(line)
    (folder / course.START_PAGE).write_text("\n".join(written) + "\n", encoding="utf-8")


def _of_row(line: str, known: set[str]) -> str:
    """``lecture 3 of 8, exercises ✓``: of the predictions and checks that a row's notebooks ask for."""
    asked = {"lectures": set(), "exercises": set()}
    for name, kind in _LINK.findall(line):
        asked[kind] |= set(_ASKED.findall((course.SOURCE / "notebooks" / name).read_text(encoding="utf-8")))
    words = {"lectures": "lecture", "exercises": "exercises"}
    return ", ".join(
        f"{words[kind]} {'✓' if names <= known else f'{len(names & known)} of {len(names)}'}"
        for kind, names in asked.items() if names & known
    )  # fmt: skip


def _read(folder: Path) -> set[str]:
    with suppress(OSError, ValueError):
        return set(json.loads((folder / FILE).read_text()))
    return set()
