"""The short tracks: notebooks of their own, put together from cells of the lessons.

A source in ``notebooks/source/tracks/two-hours`` has its own opening, set-up and summary. A raw cell in it names a
lesson's notebook, and in its place come the cells of it that carry the track's tag:

    tracks/two-hours/B_average.py       # %% [raw]                    the cells of 04_data_parallel that are
                                        # 04_data_parallel     ->     tagged "two-hours"

``minutes`` says how long a class takes for such a notebook. The track's run-sheet (``run_sheet.toml`` beside the
sources) has the minutes that it is given, one sentence to say, what fails in the room, how one sees that all are with
you, and what is left out if it is late.
"""

import re
import tomllib
from pathlib import Path

import jupytext

from dtlib.lab.lesson_files import notebooks
from tools.navigation import minutes_of
from tools.statements import STATEMENT, prose, quotes

TRACKS = ("two-hours", "half-day")
WORDS_A_MINUTE = 140
LINES_A_MINUTE = 12  # of source
LINES_AT_A_GLANCE = 9  # of a cell, which MINUTES_A_CELL pay for
MINUTES_A_CELL = 0.75
MINUTES_A_PREDICTION = 0.5
_LABELS = {"say": "say", "fails": "what fails", "seen": "checkpoint", "late": "if twenty minutes late"}
_NO_PROSE = re.compile(r"(?ms)^\[Start page\][^\n]*$|^```.*?^```$")
_LINES_SHOWN = re.compile(r"(?:, lines |, )(\d+) to (\d+)")


def sources(root: Path, track: str) -> list[Path]:
    return sorted((root / "notebooks" / "source" / "tracks" / track).glob("*.py"))


def cells(source: Path, version: str) -> list:
    """All cells of a track's notebook, solutions and stubs among them."""
    track, found = source.parent.name, []
    for cell in jupytext.read(source).cells:
        if cell.cell_type == "raw":
            found += _cells_of(notebooks()[cell.source.strip()], track)
        else:
            found.append(cell)
    said = prose(found)
    found = [
        cell
        for cell in found
        if STATEMENT not in cell.metadata.get("tags", []) or all(q in said for q in quotes(cell.source))
    ]
    for cell in found:
        if cell.cell_type == "markdown":
            cell.source = _moved(cell.source, "../../.." if version == "solved" else "../..")
    return found


def _cells_of(lesson: Path, track: str) -> list:
    """Those of a lesson that carry the track's tag, and statements about their outputs."""
    found, before_is_there = [], False
    for cell in jupytext.read(lesson).cells:
        tags = set(cell.metadata.get("tags", []))
        if track in tags or (STATEMENT in tags and before_is_there):
            found.append(cell)
        if cell.cell_type == "code" and not {STATEMENT, "claim", "stub"} & tags:
            before_is_there = track in tags
    return found


def _moved(text: str, top: str) -> str:
    """A link of a lesson leads to the same place from a track's folder, from where ``top`` is ``notebooks``."""
    text = re.sub(r"\]\((?:\.\./)*((?:lectures|exercises|solutions)/[^)]+|start\.md)\)", rf"]({top}/\1)", text)
    return re.sub(r"\]\((\d\d[^/)]*\.ipynb)\)", rf"]({top}/lectures/\1)", text)


def words(cells: list) -> int:
    """Words of prose: what a link leads to, marks and formulas' signs are none, nor are the line of links and code."""
    texts = (_NO_PROSE.sub("", cell.source) for cell in cells if cell.cell_type == "markdown")
    prose = " ".join(re.sub(r"\]\([^)]*\)", "]", text) for text in texts)
    return sum(bool(re.search(r"\w", word)) for word in prose.split())


def code(cells: list) -> list:
    return [cell for cell in cells if cell.cell_type == "code"]


def lines(cells: list) -> int:
    """Lines of code that are read: those of the cells and, where they were run, those that ``lab.read`` has shown."""
    return sum(map(_lines_of, code(cells))) + lines_shown(cells)


def lines_shown(cells: list) -> int:
    shown = " ".join(output.get("data", {}).get("text/plain", "") for cell in code(cells) for output in cell.outputs)
    return sum(int(last) - int(first) + 1 for first, last in _LINES_SHOWN.findall(shown))


def _lines_of(cell) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def minutes(solved: list, cells: list) -> float:
    """How long a class takes: to read prose and code, to run and look at each cell, to predict and to solve.

    An exercise takes the minutes that are stated for it, its text and its cells included. A cell's own lines are read
    where there are more than ``LINES_AT_A_GLANCE``.

    Args:
        solved: the executed cells, whose outputs hold the source that ``lab.read`` has shown.
        cells: those of the learner's notebook.
    """
    read = [cell for cell in cells if cell.id not in _of_exercises(cells)]
    own = [max(0, _lines_of(cell) - LINES_AT_A_GLANCE) for cell in code(read)]
    predictions = sum(cell.source.count("lab.predict(") for cell in code(read))
    exercises = minutes_of(" ".join(cell.source for cell in cells if cell.cell_type == "markdown"))
    return (
        words(read) / WORDS_A_MINUTE
        + (sum(own) + lines_shown(solved)) / LINES_A_MINUTE
        + len(code(read)) * MINUTES_A_CELL
        + predictions * MINUTES_A_PREDICTION
        + exercises
    )


def _of_exercises(cells: list) -> set[str]:
    """The ids of checks, of the cells above each, and of the text above those."""
    found: set[str] = set()
    for at, cell in enumerate(cells):
        if cell.cell_type == "code" and "lab.check(" in cell.source:
            first = max(above for above in range(at) if cells[above].cell_type == "markdown")
            found |= {each.id for each in cells[first : at + 1]}
    return found


def run_sheet(root: Path, track: str) -> list[dict]:
    """Its rows: ``what``, ``minutes``, ``notebook`` (or none), ``say``, ``fails``, ``seen`` and ``late``."""
    file = root / "notebooks" / "source" / "tracks" / track / "run_sheet.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))["row"]


def run_sheet_page(root: Path, track: str) -> str:
    """The run-sheet as a page: a table, with the minute at which each part begins."""
    began, rows = 0, [("at", "part", *_LABELS.values()), ("---",) * (2 + len(_LABELS))]
    for row in run_sheet(root, track):
        name = row.get("notebook")
        what = f"[{row['what']}]({name}.ipynb)" if name else row["what"]
        part = f"{what} ({row['minutes']} minutes)"
        rows.append((f"{began // 60}:{began % 60:02d}", part, *(row.get(key, "") for key in _LABELS)))
        began += row["minutes"]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    return f"# Run-sheet: {track.replace('-', ' ')}\n\n{table}\n\nEnds at {began // 60}:{began % 60:02d}.\n"
