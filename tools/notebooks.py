"""Notebooks from their sources: ``python -m tools.notebooks``, which is ``make notebooks``.

A lesson's source becomes two notebooks (their name is in NOTEBOOKS of the lesson's ``__init__.py``). The learner's has
stubs where the source has solutions, and no outputs; the other has the solutions, is executed, and keeps its outputs
for nbval to compare.

    dtlib/lessons/l02/lecture.py    -> lectures/02_pi.ipynb               solutions/02_pi.ipynb
    dtlib/lessons/l02/exercises.py  -> exercises/02_pi_exercises.ipynb    solutions/02_pi_exercises.ipynb

The short tracks (tracks.py) become notebooks of their own, with ``make workshop TRACK=two-hours``:

    notebooks/source/tracks/two-hours/A_ranks.py -> workshop/two-hours/A_ranks.ipynb, solved/A_ranks.ipynb

With ``--words`` stored outputs stay if only text, comments and docstrings have changed. Cells of ``lab.read`` show the
source as it is now, and statements about outputs are checked again. This takes a second, and needs no ranks.

The links at a notebook's head and foot, and the minutes on the start page (its own source is
notebooks/source/start.md), are navigation.py's.

Tags of a cell: ``solution`` and ``stub`` say in which of the two it stands; ``nbval-ignore-output`` marks live figures;
after the error of one with ``raises-exception`` Run All goes on; ``two-hours`` and ``half-day`` name the tracks that a
cell belongs to (without one: the two-day course). A ``claim`` stands in neither: it runs when the solutions are built,
and asserts what the text says of a run. Nor does a ``statement``, which asserts it of the outputs (statements.py). So
no output is stored beside words that it does not bear out.
"""

import ast
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import jupytext
import nbformat
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.checks.questions import quizzes
from dtlib.lab.lesson_files import notebooks
from dtlib.lab.tables import fold
from tools import navigation, statements, tracks
from tools.code_lines import DOCUMENTED
from tools.navigation import name_of
from tools.statements import STATEMENT
from tools.tracks import TRACKS

PREDICTIONS_ARE_RIGHT = "from dtlib.lab.checks import predictions\npredictions.require_all_right()"
CLAIM = "claim"
CHECKED = {CLAIM, STATEMENT}
TAGS = {"solution", "stub", *CHECKED, "nbval-ignore-output", "raises-exception", *TRACKS}
LEFT_OUT = {"learner": "solution", "solved": "stub"}


def sources(root: Path) -> list[Path]:
    """Those of the lessons; those of the tracks are tracks.sources."""
    return [root.joinpath("dtlib", "lessons", *source.parts[-2:]) for source in notebooks().values()]


def _is_of_a_track(source: Path) -> bool:
    return source.parent.name in TRACKS


def target(source: Path, version: str) -> Path:
    """Where the learner's or the solved version of a source stands."""
    if _is_of_a_track(source):
        folder = source.parents[3] / "workshop" / source.parent.name
        return (folder / "solved" if version == "solved" else folder) / f"{source.stem}.ipynb"
    kind = "solutions" if version == "solved" else "lectures" if navigation.is_lecture(source) else "exercises"
    return source.parents[3] / "notebooks" / kind / f"{name_of(source)}.ipynb"


def notebook(source: Path, version: str, claims: bool = False) -> nbformat.NotebookNode:
    """The learner's or the solved version of a source, not executed. The same source gives the same bytes."""
    book = jupytext.read(source)
    cells = tracks.cells(source, version) if _is_of_a_track(source) else book.cells
    left_out = {LEFT_OUT[version]} if claims else {LEFT_OUT[version], *CHECKED}
    book.cells = [cell for cell in cells if not left_out & _tags(cell)]
    number = 0
    for at, cell in enumerate(book.cells):
        if unknown := _tags(cell) - TAGS:
            raise ValueError(
                f"{name_of(source)}, cell {number}: unknown tags {sorted(unknown)}; known are {sorted(TAGS)}."
            )
        is_checked = bool(CHECKED & _tags(cell))
        cell.id = f"{name_of(source)}-{number:02d}" + f"-checked-{at}" * is_checked
        number += not is_checked
    _lead_on(book, source, version)
    book.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return book


def _tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def _lead_on(book, source: Path, version: str) -> None:
    """Links below the title, and once more in a last cell; in a short track, where every line counts, there alone."""
    if _is_of_a_track(source):
        links = navigation.track_links(source, version, sorted(source.parent.glob("*.py")))
        book.cells.append(nbformat.v4.new_markdown_cell(links, id=f"{source.stem}-foot"))
        return
    links, first = navigation.links(source, version, sources(source.parents[3])), book.cells[0]
    title, _, text = first.source.partition("\n")
    tutor = f" · {navigation.TUTOR}" if version == "learner" else ""
    first.source = f"{title}\n\n{links}{tutor}\n{text}"
    anew = f"\n\n{navigation.ANEW}" if version == "learner" else ""
    book.cells.append(nbformat.v4.new_markdown_cell(f"---\n\n{links}{anew}", id=f"{name_of(source)}-foot"))


def start_page(root: Path) -> str:
    """The map of the course, from its template."""
    template = (root / "notebooks" / "source" / "start.md").read_text(encoding="utf-8")
    return navigation.start_page(template, sources(root))


def execute(book: nbformat.NotebookNode, folder: Path, refuse: bool = False) -> None:
    """Run a notebook in ``folder`` and keep its outputs, cleaned of what is true on this machine only; no claims.

    Raises:
        CellExecutionError: for a cell that fails; with ``refuse`` also where a prediction was not right.
        DtlibError: with ``refuse``, where a statement does not hold.
    """
    from nbclient import NotebookClient

    if refuse:
        book.cells.append(nbformat.v4.new_code_cell(PREDICTIONS_ARE_RIGHT, metadata={"tags": [CLAIM]}))
    every = book.cells
    book.cells = [cell for cell in every if STATEMENT not in _tags(cell)]  # they need no kernel
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    if refuse and (untrue := statements.problems(every)):
        raise DtlibError("\n".join(["Sentences that their outputs do not bear out:", *untrue]))
    book.cells = [cell for cell in book.cells if CLAIM not in _tags(cell)]
    book.metadata.pop("widgets", None)
    book.metadata["language_info"] = {"name": "python"}  # without the version of this machine
    for number, cell in enumerate(tracks.code(book.cells), 1):
        cell.metadata.pop("execution", None)
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            _clean(output)


def keep_outputs(book: nbformat.NotebookNode, stored: nbformat.NotebookNode) -> None:
    """Give a notebook the outputs of its stored version, and check what its text says of them.

    Raises:
        DtlibError: where code differs, or where a statement does not hold.
    """
    every, before = book.cells, tracks.code(stored.cells)
    book.cells = [cell for cell in every if not CHECKED & _tags(cell)]
    if [_without_comments(cell) for cell in tracks.code(book.cells)] != [_without_comments(cell) for cell in before]:
        raise DtlibError("Its code is not that of the stored notebook: build it without --words.")
    shell = InteractiveShell.instance()
    for cell, ran in zip(tracks.code(book.cells), before, strict=True):
        cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
        local = cell.source.removeprefix("%%px --local\n")
        if not local.startswith("%"):
            tree = ast.parse(local)
            imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            shell.run_cell(ast.unparse(ast.Module(imports, [])), silent=True)
            others = [ast.unparse(node) for node in tree.body if node not in imports]
            if others and all(each.startswith("lab.read") for each in others):
                with capture_output() as shown:
                    shell.run_cell(local, silent=True)
                for output, new in zip(cell.outputs, shown.outputs, strict=True):
                    output.data = nbformat.from_dict(new.data)
        if asked := re.fullmatch(r'lab\.quiz\("(.+)"\)', cell.source):
            cell.outputs[-1].data["text/plain"] = quizzes()[asked[1]].text()
    if untrue := statements.problems([cell for cell in every if CLAIM not in _tags(cell)]):
        raise DtlibError("\n".join(["Sentences that their outputs do not bear out:", *untrue]))
    book.metadata["seconds"] = stored.metadata["seconds"]


def _without_comments(cell) -> str:
    """The code of a cell without comments and docstrings; all of it if its output may show it, as tracebacks do."""
    magic, rest = re.fullmatch(r"(%%[^\n]*\n)?(.*)", cell.source, re.S).groups()
    if "raises-exception" not in _tags(cell):
        with suppress(SyntaxError):
            tree = ast.parse(rest)
            for node in ast.walk(tree):
                if isinstance(node, DOCUMENTED[1:]) and ast.get_docstring(node) is not None:
                    node.body[0] = ast.Pass()
            return (magic or "") + ast.unparse(tree)
    return cell.source


def _clean(output) -> None:
    root = str(course.folder())

    def cleaned(text):
        if isinstance(text, str):
            text = text.replace(root, "dtlib")
            if "process id" in text:  # the table of ranks
                text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "localhost", text)
        return text

    if "traceback" in output:
        output["traceback"] = [fold(line) for line in output["traceback"]]
    if "text" in output:
        output["text"] = cleaned(output["text"])
    output.get("metadata", {}).clear()
    output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)  # nothing without its kernel
    for kind, content in output.get("data", {}).items():
        output["data"][kind] = cleaned(content)


def main() -> None:
    """Write all notebooks, or those of the sources and tracks named on the command line."""
    wanted, root = set(sys.argv[1:]) - {"--words"}, course.folder()
    (root / "notebooks" / "start.md").write_text(start_page(root), encoding="utf-8")
    for source in [*sources(root), *(source for track in TRACKS for source in tracks.sources(root, track))]:
        if wanted and not wanted & {name_of(source), source.parent.name}:
            continue
        for version in ("learner", "solved"):
            book, path = notebook(source, version, claims=version == "solved"), target(source, version)
            path.parent.mkdir(parents=True, exist_ok=True)
            if version == "solved" and "--words" in sys.argv:
                keep_outputs(book, nbformat.read(path, 4))
            elif version == "solved":
                began = time.monotonic()
                execute(book, path.parent, refuse=True)
                book.metadata["seconds"] = round(time.monotonic() - began)
            nbformat.write(book, path)
            print(path.relative_to(root))
    for track in TRACKS:
        page = root / "notebooks" / "workshop" / track / "run_sheet.md"
        if page.parent.is_dir():
            page.write_text(tracks.run_sheet_page(root, track), encoding="utf-8")


if __name__ == "__main__":
    main()
