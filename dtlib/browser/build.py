"""Write the page for ``dtlib browser``: as a folder for any web server, and as one file that opens by a double click.

Python for browsers is the core of npm's package pyodide, without further packages. ``npm pack`` downloads it once, and
the archive stays beside the folder.
"""

import base64
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from contextlib import suppress
from html import escape
from pathlib import Path

import dtlib
from dtlib.browser import pages
from dtlib.errors import DtlibError
from dtlib.files import read_text, write_atomically
from dtlib.lab import lesson_files
from dtlib.lab.checks.questions import as_html
from dtlib.lab.lesson_files import title

PYODIDE = "314.0.7"
SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
OWN = Path("browser/build.py")
SITE = Path(__file__).parent / "site"
# The files of dtlib that the rooms import. A test opens every room in a browser.
CARRIED = (
    "__init__.py", "errors.py", "files.py", "browser/**/*.py", "schedule/*.py", "theory/*.py", "planner/*.py",
    *(f"comm/{name}.py" for name in ("__init__", "algorithms", "call", "numbers", "objects", "selection")),
    "comm/waiting.py", "lessons/l03/steps.py", "lessons/l03/simulated_network.py",
    *(f"comm/watch/{name}.py" for name in ("__init__", "board", "deadlock", "missing_ranks", "recorder")),
    "lab/__init__.py", "lab/engines/__init__.py", "lab/checks/__init__.py", "lab/checks/exercise.py",
    "lab/checks/questions.py", "lessons/__init__.py",
    *(f"lab/{name}.py" for name in ("colours", "decision_chart", "drawing", "foreign", "lesson_files", "tables")),
    "lessons/glossary.toml", "lessons/**/quiz*.toml", "lessons/l*/__init__.py", "lessons/l00/judge_sum.py",
    "lessons/l00/lecture.py", "lessons/l03/lecture.py", "lessons/l05/judge_rates.py", "lessons/l05/exercises.py",
    "lessons/l09/judge_formats.py", "lessons/l09/exercises.py", "lessons/l11/judge_scaling.py",
    "lessons/l11/exercises.py", "lab/checks/equality.py", "lessons/l07/duel.py", "lessons/l07/judge_puzzle.py",
)  # fmt: skip


MARK = '<meta name="generator" content="dtlib browser">'  # must equal the line in site/index.html


def run(folder: Path) -> int:
    """Write the page, print paths and sizes, and return exit status 0."""
    folder, single = write(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB, for a web server: python -m http.server --directory {folder}")
    print(f"{single}: {single.stat().st_size / 1e6:.1f} MB, opens by a double click")
    return 0


def write(folder: Path, course: str = "") -> tuple[Path, Path]:
    """Write the page to ``folder`` and, beside the folder, to one HTML file; return both paths.

    ``course`` is the relative address of the book's pages, such as ``../``. With it, rooms link to their lessons.

    Raises:
        DtlibError: if the folder or the file has other contents than an earlier page, if npm is missing, or if the
            download fails.
    """
    folder = Path(os.path.abspath(folder))
    single = folder.with_name(f"{folder.name}.html")
    for taken, page in ((folder, folder / "index.html"), (single, single)):
        if os.path.lexists(taken) and not _is_replaceable(taken, page):
            raise DtlibError(
                f"{taken} is not empty and not made by dtlib browser, so it is not changed: name a new folder."
            )
    package = _package(folder.parent)
    (folder / "pyodide").mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as archive:
        for name in RUNTIME:
            opened = archive.extractfile(f"package/{name}")
            assert opened is not None  # a regular file, so not None
            (folder / "pyodide" / name).write_bytes(opened.read())
    (folder / "dtlib.zip").write_bytes(_own_files())
    for name in ("page.css", "page.js", "worker.js"):
        shutil.copy(SITE / name, folder / name)
    (folder / "index.html").write_text(_page(course), encoding="utf-8")
    write_atomically(single, _as_one_file(folder))
    return folder, single


def _is_replaceable(taken: Path, page: Path) -> bool:
    """Return whether ``taken`` is an empty folder, or a page that this module wrote earlier."""
    if taken.is_dir() and not any(taken.iterdir()):
        return True
    with suppress(OSError, ValueError):
        return MARK in read_text(page)
    return False


def _package(folder: Path) -> Path:
    """Return the path of npm's archive; download it if it is missing.

    Raises:
        DtlibError: if npm is missing or fails, or if the archive has another SHA-256 than expected.
    """
    file = folder / f"pyodide-{PYODIDE}.tgz"
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise DtlibError(
                f"npm is missing, which fetches Python for browsers: install Node.js, or put {file.name}, "
                f"`npm pack pyodide@{PYODIDE}` of another computer, into {folder}."
            )
        done = subprocess.run([npm, "pack", f"pyodide@{PYODIDE}"], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "code" in line or "reason" in line] or [""]
            raise DtlibError(
                f"npm does not give pyodide {PYODIDE} ({lines[0].strip()}): is there a network? Or put {file.name} "
                f"into {folder}."
            )
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != SHA256:
        raise DtlibError(f"{file} is not pyodide {PYODIDE} as it was published (SHA-256 {found:.12}...): remove it.")
    return file


def carried() -> list[Path]:
    """Return the files of dtlib that the page contains, relative to the package's folder."""
    root = Path(dtlib.__file__).parent
    return sorted({path.relative_to(root) for pattern in CARRIED for path in root.glob(pattern)} - {OWN})


def _own_files() -> bytes:
    made, root = io.BytesIO(), Path(dtlib.__file__).parent
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in carried():
            # A fixed date, so that equal files give equal bytes.
            entry = zipfile.ZipInfo(f"dtlib/{path.as_posix()}")
            archive.writestr(entry, (root / path).read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return made.getvalue()


def _page(course: str) -> str:
    """Return the HTML page with every room's first answer, so that readers see something before Python is loaded."""
    links = "\n".join(f'<a href="#{name}">{escape(pages.room(name).TITLE)}</a>' for name in pages.NAMES)
    page = (SITE / "index.html").read_text(encoding="utf-8")
    page = page.replace("<!-- links -->", links)
    page = page.replace("<!-- rooms -->", "\n".join(_room(name, course) for name in pages.NAMES))
    return page.replace('id="home" hidden', f'href="{course}start.html"') if course else page


def _room(name: str, course: str) -> str:
    where = pages.room(name)
    fields = "\n".join(field.html(name) for field in where.FORM)
    return (
        f'<form class="room" id="{name}"{" hidden" * (name != pages.NAMES[0])}>\n<h2>{escape(where.TITLE)}</h2>\n'
        f"<p>{as_html(where.SAYS)} {_lesson(where.LESSON, course)}</p>\n"
        f'<div class="fields">{fields}</div>\n<div class="answer" aria-live="polite">{pages.answer(name, {})}</div>\n'
        "</form>"
    )


def _lesson(notebook: str, course: str) -> str:
    """Return a link to the room's lesson, or, without ``course``, the lesson's title and file."""
    if notebook == "start":
        return ""
    kind = "exercises" if notebook.endswith("_exercises") else "lectures"
    words = escape(title(lesson_files.notebooks()[notebook]))
    if course:
        return f'<a href="{course}{kind}/{notebook}.html">{words}</a>'
    return f"In the course: {words} (notebooks/{kind}/{notebook}.ipynb)."


def _as_one_file(folder: Path) -> str:
    """Return the page with all files that it loads: compressed, and encoded as base64."""
    page = (folder / "index.html").read_text(encoding="utf-8")
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    # A page from file:// may not fetch files, so they are embedded.
    loaded = ["worker.js", "dtlib.zip", *(f"pyodide/{name}" for name in RUNTIME if not name.endswith(".json"))]
    parts = "\n".join(
        f'<script type="text/plain" data-part="{Path(name).name}">'
        f"{base64.b64encode(gzip.compress((folder / name).read_bytes(), 9, mtime=0)).decode()}</script>"
        for name in loaded
    )
    page = page.replace('<link rel="stylesheet" href="page.css">', f"<style>\n{style}</style>")
    page = page.replace("<!-- parts -->", parts)
    return page.replace('<script src="page.js"></script>', f"<script>\n{script}</script>")
