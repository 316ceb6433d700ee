import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from functools import cache

import pytest

from dtlib.lab.lesson_files import notebooks
from dtlib.lab.server import START
from dtlib.lab.tables import WIDEST
from tests.books import made, stored
from tests.cases import for_each
from tests.conftest import ROOT, make_workshop
from tests.kernels import Notebook
from tests.tracks import missing
from tools import notebooks as build
from tools import tracks
from tools.navigation import name_of

SOURCES = build.sources(ROOT)
VERSIONS = ("learner", "solved")
WITHOUT_ENGINES = ("07_schedule_puzzle_exercises",)  # in the first cell: the duel runs on some in the end
# Run before every landing: a hang and a death of four ranks; judges on three; torch's process group; Horovod on two.
ALWAYS = ("00_start_here", "04_data_parallel_exercises", "06_zero", "10_two_models")
MOST = 4  # more of them, which have changed
WIDEST_LINE = 100
LONGEST_CELL = 20  # lines; "mostly": one in ten may be longer


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.lint
@for_each(version=VERSIONS, source=SOURCES)
def test_notebooks_are_what_their_sources_say(source, version):
    found, expected = stored(source, version), made(source, version)
    assert [(c.id, c.cell_type, c.source, c.metadata) for c in found.cells] == [
        (c.id, c.cell_type, c.source, c.metadata) for c in expected.cells
    ], "the source has changed: run `make notebooks`"
    executed = [cell.execution_count is not None for cell in code_cells(found)]
    assert all(executed) if version == "solved" else not any(executed)


@pytest.mark.lint
def test_no_notebook_is_without_a_source():
    expected = {build.target(source, version) for source in SOURCES for version in VERSIONS}
    found = {path for path in (ROOT / "notebooks").glob("*/*.ipynb") if ".ipynb_checkpoints" not in path.parts}
    assert found == expected


@pytest.mark.lint
@for_each(source=SOURCES)
def test_each_notebook_is_in_the_form_that_readers_expect(source):
    book = made(source, "solved")
    assert re.match(r"# \d\d[a-z]? ", book.cells[0].source), "a notebook begins with its number and title"
    first = code_cells(book)[0].source
    assert ("lab.engines(" in first) == (name_of(source) not in WITHOUT_ENGINES)
    assert "\n" not in first and first.startswith("from dtlib import lab"), "the first cell is one line"
    assert first.endswith("  # no dtlib? Kernel > Change Kernel"), "which names the cure where a kernel has no dtlib"
    lines = [cell.source.count("\n") + 1 for cell in code_cells(book)]
    assert sum(length > LONGEST_CELL for length in lines) <= len(lines) / 10
    widest = max((line for cell in code_cells(book) for line in cell.source.splitlines()), key=len)
    assert len(widest) <= WIDEST_LINE, f"this line does not fit beside JupyterLab's file browser: {widest}"
    tagged = [set(cell.metadata.get("tags", [])) & set(build.TRACKS) for cell in book.cells]
    assert all("half-day" in tags for tags in tagged if "two-hours" in tags), "the longer track has all of the shorter"


@pytest.mark.lint
@for_each(source=SOURCES)
def test_a_notebook_is_no_longer_than_a_lecture(source):
    book = made(source, "learner")
    found = len(code_cells(book)), tracks.words(book.cells)
    assert found[0] <= 40 and found[1] <= 1500, found


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A copy, with its notebooks: whoever has notebooks open in the workshop itself is left alone."""
    folder = make_workshop(tmp_path_factory.mktemp("workshop"))
    shutil.copytree(ROOT / "data", folder / "data")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def workshop_with_ranks(workshop):
    """Its ranks outlive each notebook, as another one has them too: the next takes them over."""
    holder = Notebook(workshop / "notebooks", "holder.ipynb")
    holder.run("from dtlib import lab; lab.engines(4)")
    yield workshop
    holder.close()


def not_as_stored(stems, folder) -> dict[str, list[str]]:
    """Strict nbval, one process for all of them; what it says of each notebook that prints something else."""
    solved = [build.target(source, "solved").relative_to(ROOT) for source in SOURCES if name_of(source) in stems]
    # What is shown of the library is compared, where it stands in its file is not.
    rules = folder / "lines.cfg"
    rules.write_text("[lines]\nregex: , lines [0-9, to]+\nreplace: , lines\n")
    command = [sys.executable, "-c", START, "pytest", "-q", "-rfE", "--disable-plugin-autoload", "-p", "nbval.plugin"]
    command += ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=600", f"--nbval-sanitize-with={rules}"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(folder), *map(str, solved)],
        capture_output=True, text=True, cwd=folder, timeout=600 * len(stems),
    )  # fmt: skip
    assert ran.returncode in (0, 1), ran.stdout[-6000:] + ran.stderr[-2000:]
    said = {}
    for line, stem in re.findall(r"^((?:FAILED|ERROR) .*?(\w+)\.ipynb.*)$", ran.stdout, re.MULTILINE):
        said.setdefault(stem, [ran.stdout[-20000:]]).append(line)
    assert bool(said) == bool(ran.returncode), ran.stdout[-6000:]
    return said


def a_day_ago() -> dict[str, bytes] | None:
    """Lessons and solved notebooks by their paths, before the last day's commits: the nightly ran those. None where git
    does not say, as in a clone without them."""

    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True).stdout

    try:
        yesterday = int(git("log", "-1", "--format=%ct")) - 24 * 3600
        commit = git("rev-list", "-1", "--first-parent", f"--before={yesterday}", "HEAD").decode().strip()
        archive = git("archive", commit, "dtlib/lessons", "notebooks/solutions")
    except (OSError, subprocess.CalledProcessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        return {each.name: files.extractfile(each).read() for each in files if each.isfile()}


@cache
def what_runs(book: bytes):
    """A notebook's code cells, and what nbval compares."""
    cells = [cell for cell in json.loads(book)["cells"] if cell["cell_type"] == "code"]
    tags = [set(cell["metadata"].get("tags", ())) - set(build.TRACKS) for cell in cells]
    outputs = ["nbval-ignore-output" in some or cell["outputs"] for cell, some in zip(cells, tags, strict=True)]
    return [cell["source"] for cell in cells], tags, outputs


def runs_otherwise(source, before) -> bool:
    """Whether cells or outputs of a notebook are others than ``before``, or what its lesson's folder has beside it."""
    solved = build.target(source, "solved")
    beside = [path for path in source.parent.glob("*.py") if path not in SOURCES]
    now = {str(path.relative_to(ROOT)): path.read_bytes() for path in (solved, *beside)}
    then = {name: before.get(name) for name in now}
    book = str(solved.relative_to(ROOT))
    if then[book] and what_runs(then[book]) == what_runs(now[book]):
        then[book] = now[book]
    return now != then


def before_the_night(before) -> set[str]:
    """Notebooks of the slow tier: one with each kind of ranks, and of the others that run otherwise than ``before`` at
    most ``MOST``, spread evenly over the course. The nightly tier runs the rest: all others where nobody knows what was
    before, as in a clone without history."""
    if before is None:
        return set(ALWAYS)
    others = {name: source for name, source in notebooks().items() if name not in ALWAYS}
    changed = [name for name, source in others.items() if runs_otherwise(source, before)]
    count = min(len(changed), MOST)
    return {*ALWAYS, *(changed[at * len(changed) // count] for at in range(count))}


def test_only_what_runs_otherwise_is_run_before_the_night():
    source, solved = notebooks()["04_data_parallel"], "notebooks/solutions/04_data_parallel.ipynb"
    files = [*ROOT.glob("dtlib/lessons/l*/*.py"), *ROOT.glob("notebooks/solutions/*.ipynb")]
    now = {str(path.relative_to(ROOT)): path.read_bytes() for path in files}

    def with_cell(which, **there):
        book = json.loads(now[solved])
        next(cell for cell in book["cells"] if which(cell)).update(there)
        return runs_otherwise(source, {**now, solved: json.dumps(book).encode()})

    def is_code(cell):
        return cell["cell_type"] == "code"

    def is_live(cell):
        return "nbval-ignore-output" in cell["metadata"].get("tags", ())

    assert not runs_otherwise(source, now)
    assert not with_cell(lambda cell: not is_code(cell), source="prose") and not with_cell(is_live, outputs=[])
    assert with_cell(is_code, source="1") and with_cell(is_live, metadata={})
    assert with_cell(lambda cell: is_code(cell) and cell["outputs"] and not is_live(cell), outputs=[])
    for name in ("l04/lecture", "l04/exercises", "l05/figures"):
        assert not runs_otherwise(source, {**now, f"dtlib/lessons/{name}.py": b"other"})
    assert runs_otherwise(source, {**now, "dtlib/lessons/l04/judge_averaging.py": b"other"})
    one = {**now, solved: b'{"cells": []}'}
    assert before_the_night(now) == set(ALWAYS) and before_the_night(one) == {*ALWAYS, "04_data_parallel"}
    assert before_the_night(None) == set(ALWAYS) and len(before_the_night({})) == len(ALWAYS) + MOST


@pytest.mark.lint
def test_every_stored_verdict_on_a_solution_is_that_it_passed():
    for notebook in sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb")):
        assert "Not yet:" not in notebook.read_text(), f"{notebook.name}: build it again"


def texts_of(output):
    """What a terminal would show of an output."""
    if output.output_type == "error":
        return output.traceback
    return [output.text if output.output_type == "stream" else output.data.get("text/plain", "")]


@pytest.mark.lint
@for_each(source=SOURCES)
def test_no_stored_output_is_wider_than_a_page(source):
    cells = code_cells(stored(source, "solved"))
    for cell in cells:
        others = [output for output in cell.outputs if "dtlib-code" not in html_of(output)]  # listings keep their lines
        lines = [line for output in others for text in texts_of(output) for line in text.splitlines()]
        wide = [line for line in lines if len(re.sub(r"\x1b\[[0-9;]*m", "", line)) > WIDEST]
        assert not wide, (cell.source, wide)
    outputs = [output for cell in cells for output in cell.outputs]
    figures = [html for html in map(html_of, outputs) if "<img" in html]
    assert all("<figure" in html and re.search(r'<img alt="[^"]{20,}"', html) for html in figures)
    assert all("<details><summary>as text</summary><" in html for html in figures)
    assert not any("image/png" in output.get("data", {}) for output in outputs)


def html_of(output) -> str:
    return output.get("data", {}).get("text/html", "")


@pytest.fixture(scope="module")
def differences(workshop_with_ranks, request):
    """Of all notebooks that this session is to run."""
    tests = [item for item in request.session.items if item.originalname == "test_solutions_print_what_is_stored"]
    return not_as_stored([item.callspec.params["stem"] for item in tests], workshop_with_ranks)


SOON = before_the_night(a_day_ago())


@pytest.mark.timeout(func_only=True)
@pytest.mark.parametrize(
    "stem",
    [pytest.param(name, marks=pytest.mark.slow if name in SOON else pytest.mark.nightly) for name in notebooks()],
)
def test_solutions_print_what_is_stored(differences, stem):
    assert not differences.get(stem), "\n".join(differences[stem])


def test_a_cell_that_a_track_lacks_is_noticed():
    setup, here, there = "import dtlib\nfrom dtlib import lab", "x = 1", "%%px\ny = 2\ndef f(): return y"
    answer = "%%px\nexplained = {}"
    uses = ["lab.values('y')", "print([x for _ in [1]])", "%%px\nf()", "%px y += 1", "lambda: x", "lab.check('hangs')"]
    assert not missing([setup, here, there, answer, *uses], [there])
    without_there = ["cell 3: y in the ranks", "cell 5: f in the ranks", "cell 6: y in the ranks"]
    assert missing([setup, here, answer, *uses], [there]) == without_there
    without_here = ["cell 4: x in the notebook", "cell 7: x in the notebook"]
    assert missing([setup, there, answer, *uses], [there]) == without_here
    assert missing([setup, here, there, *uses], [there]) == ["cell 8: explained in the ranks"]
    assert missing([setup, "x = x + 1", there, answer, *uses], [there]) == ["cell 1: x in the notebook"]
    assert not missing([setup, "lab.push(z=1)", "%%px\nfor i in range(3): z"], [])
    assert missing(["%%px --local\nq = z"], []) == ["cell 0: z in the notebook", "cell 0: z in the ranks"]


@pytest.mark.parametrize(
    "stem",
    [
        pytest.param("06_zero_exercises", marks=pytest.mark.slow),
        *(pytest.param(stem, marks=pytest.mark.nightly) for stem in ("02_pi", "04_data_parallel_exercises")),
    ],
)
def test_a_learners_notebook_passes_under_run_all_and_reveals_nothing(workshop_with_ranks, stem, monkeypatch):
    """Nobody has guessed, and nobody has written an answer: checks say "Not yet", and no prediction is compared."""
    book = build.notebook(notebooks()[stem], "learner")
    monkeypatch.chdir(workshop_with_ranks)
    build.execute(book, workshop_with_ranks / "notebooks")
    outputs = [str(output) for cell in code_cells(book) for output in cell.outputs]
    assert any("Predict first" in output for output in outputs)
    assert not [output for output in outputs if "it came out as" in output or "Passed:" in output]
