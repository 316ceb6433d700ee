import shutil
import subprocess
import sys

import nbformat
import pytest

from dtlib.lab import build
from tests.conftest import ROOT

SOURCES = build.sources(ROOT)
VERSIONS = ("learner", "solved")
WITHOUT_ENGINES = ("07_schedule_puzzle_exercises",)
# The fast tier runs the first lesson and what needs no engines; the others are slow, and run with them in CI.
QUICK = ("00_start_here", *WITHOUT_ENGINES)
WIDEST_LINE = 100
LONGEST_CELL = 20  # lines; "mostly": one in ten may be longer


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_notebooks_are_what_their_sources_say(source, version):
    stored = nbformat.read(build.target(source, version), as_version=4)
    expected = build.notebook(source, version)
    assert [(c.id, c.cell_type, c.source, c.metadata) for c in stored.cells] == [
        (c.id, c.cell_type, c.source, c.metadata) for c in expected.cells
    ], "the source has changed: run `make notebooks`"
    executed = [cell.execution_count is not None for cell in code_cells(stored)]
    assert all(executed) if version == "solved" else not any(executed)


def test_no_notebook_is_without_a_source():
    expected = {build.target(source, version) for source in SOURCES for version in VERSIONS}
    found = {path for path in (ROOT / "notebooks").glob("*/*.ipynb") if ".ipynb_checkpoints" not in path.parts}
    assert found == expected


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_each_notebook_is_in_the_form_that_readers_expect(source):
    book = build.notebook(source, "solved")
    assert book.cells[0].source.startswith("# 0"), "a notebook begins with its number and title"
    first = code_cells(book)[0].source
    assert ("lab.engines(" in first) == (source.stem not in WITHOUT_ENGINES)
    assert "\n" not in first and first.startswith("from dtlib import lab"), "the first cell is one line"
    assert first.endswith("  # no dtlib? Kernel > Change Kernel"), "which names the cure where a kernel has no dtlib"
    lines = [cell.source.count("\n") + 1 for cell in code_cells(book)]
    assert sum(length > LONGEST_CELL for length in lines) <= len(lines) / 10
    widest = max((line for cell in code_cells(book) for line in cell.source.splitlines()), key=len)
    assert len(widest) <= WIDEST_LINE, f"this line does not fit beside JupyterLab's file browser: {widest}"
    tagged = [set(cell.metadata.get("tags", [])) & set(build.TRACKS) for cell in book.cells]
    assert all("half-day" in tags for tags in tagged if "two-hours" in tags), "the longer track has all of the shorter"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, marks=() if source.stem in QUICK else pytest.mark.slow, id=source.stem)
        for source in SOURCES
    ],
)
def test_solutions_print_what_is_stored(source, workshop_folder):
    """Strict nbval, in a copy of the workshop: whoever has notebooks open in this one is left alone."""
    shutil.copytree(ROOT / "data", workshop_folder / "data")
    shutil.copytree(ROOT / "notebooks", workshop_folder / "notebooks", dirs_exist_ok=True)
    notebook = workshop_folder / build.target(source, "solved").relative_to(ROOT)
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=100"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(workshop_folder), str(notebook)],
        capture_output=True, text=True, cwd=workshop_folder, timeout=170,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("track", build.TRACKS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_cells_of_a_track_run_without_the_others(source, track, workshop_folder, monkeypatch):
    shutil.copytree(ROOT / "data", workshop_folder / "data")
    book = build.notebook(source, "solved")
    book.cells = [cell for cell in book.cells if track in cell.metadata.get("tags", [])]
    monkeypatch.chdir(workshop_folder)
    build.execute(book, workshop_folder / "notebooks")
