"""The course in a learner's folder: find the folder, copy the course into it, and record the learner's progress.

``dtlib/course`` is the original. In a clone it links to the clone's folders; in a wheel it contains the files. Learners
never work there, but in a copy:

    a clone                              work/ inside the clone, which git ignores
    elsewhere, with a wheel or without   the folder in which `dtlib lab` was called, if it was empty

The file RECORD stores the digest of each copied file, so that a new version of the course replaces only files that the
learner has not changed. The file DONE stores the progress. The start page shows it as ticks, ``lab.progress()`` as a
table (checks/progress.py).
"""

import json
import os
import re
import shutil
from contextlib import suppress
from hashlib import sha256
from importlib.resources import files
from itertools import count
from pathlib import Path

from filelock import FileLock

from dtlib.errors import DtlibError, number
from dtlib.files import read_json, write_atomically, writing

SOURCE = Path(str(files("dtlib"))) / "course"
START_PAGE = Path("notebooks") / "start.md"
RECORD = ".dtlib.json"
DONE = ".progress.json"
LOCK, LOCK_SECONDS = ".progress.lock", 30
PROFILE = Path("cluster_profiles") / "profile_local_mpi"
LEFT_BEHIND = ("db", "log", "pid", "security", "startup", "state", "static")  # files of earlier engines in a profile
FILES = (
    "cluster_profiles/*/*.py", "cluster_profiles/*.py", "cluster_profiles/*.md", "cluster_profiles/site.toml",
    "cluster_profiles/jobs/*.sh", "data/*", "notebooks/LICENSE", "notebooks/configs/*.json", "notebooks/*.md",
    "notebooks/*.R", "notebooks/*.py",
    "notebooks/lectures/*.ipynb", "notebooks/exercises/*.ipynb", "notebooks/solutions/*.ipynb",
    "notebooks/workshop/*/*.ipynb", "notebooks/workshop/*/*.md", "notebooks/workshop/*/solved/*.ipynb",
    "notebooks/slides/*.html",
)  # fmt: skip
_ASKED = re.compile(r'lab\.(check|predict|quiz)\(\\?"([\w-]+)\\?"')  # matches the JSON text of a notebook
_LINK = re.compile(r"\]\(((?:lectures|exercises|workshop/[\w-]+)/[^)]+\.ipynb)\)")


def current_folder() -> Path:
    """Return the current folder.

    Raises:
        DtlibError: if it has been deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise DtlibError("The current folder has been deleted: change to an existing folder.") from None


def is_workshop(folder: Path) -> bool:
    """Return whether a folder contains the workshop's profile."""
    # os.path, because Path.is_file raises an error in a folder that this user may not read.
    return os.path.isfile(folder / PROFILE / "ipcluster_config.py")


def folder() -> Path:
    """Return the workshop folder: the nearest one above this notebook, else the one that contains this package.

    Raises:
        DtlibError: if there is none.
    """
    here = current_folder()
    for candidate in [here, *here.parents, Path(__file__).resolve().parents[2]]:
        if is_workshop(candidate):
            return candidate
    raise DtlibError(
        f"There is no workshop at or above {here}: run `dtlib lab` in an empty folder, to copy the course there, or "
        "change to a clone of the repository."
    )


def working_folder() -> Path:
    """Return the learner's folder for the current folder; it may be empty or missing."""
    here = current_folder()
    for candidate in (here, *here.parents):
        if is_workshop(candidate):
            return candidate / "work" if (candidate / "notebooks" / "source").is_dir() else candidate
    return here


def open_folder() -> tuple[Path, str]:
    """Return the learner's folder after copying the course into it, and a message about new files.

    Raises:
        DtlibError: if the folder has other contents, or cannot be written.
    """
    folder = working_folder()
    if folder == current_folder() and not (folder / PROFILE).exists() and not _is_empty(folder):
        raise DtlibError(
            f"{folder} contains other files, so the course is not copied to it: change to an empty folder (mkdir "
            "course && cd course) or to a clone of the repository."
        )
    return folder, copy_files(folder)


def copy_files(folder: Path) -> str:
    """Copy missing and outdated files to ``folder``, but keep changed ones; return a message, or an empty string."""
    record, copied, newer = _read_record(folder), 0, []
    if not record:
        _close(folder)
    for name, source in sources().items():
        copy, digest, before = folder / name, _digest(source), record.get(name)
        there = _digest(copy) if copy.is_file() else None
        if name == START_PAGE.as_posix() and there and before == digest:
            # Only the learner's ticks differ.
            continue
        # The copy differs from the course's file and from the recorded one, so the learner has changed it.
        if there not in (None, digest, before) and name != START_PAGE.as_posix():
            newer += [name] * (before != digest)
            continue
        if there != digest:
            _copy(source, copy)
            copied += 1
        record[name] = digest
    if record != _read_record(folder):
        _write(folder / RECORD, json.dumps(record, indent=1))
    said = [f"The course is in {folder}: {copied} file{'s are' if copied > 1 else ' is'} new."] * bool(copied)
    if newer:
        said.append(f"You have changed these, so they stay, although newer versions exist: {', '.join(newer)}.")
        if any(name.endswith(".ipynb") for name in newer):
            said.append("`dtlib fresh` with a lesson's number, such as 04, updates it, and keeps a copy of yours.")
    return " ".join(said)


def restore(lesson: str) -> list[str]:
    """Replace a lesson's notebooks by the course's originals; keep each old one under another name.

    Args:
        lesson: its number, such as 04, or the name of one notebook, such as 04_data_parallel_exercises, with or without
            its folder.

    Returns:
        One message for each notebook.
    """
    books = {name: path for name, path in sources().items() if path.suffix == ".ipynb"}
    wanted = Path(lesson.removesuffix(".ipynb"))
    names = [
        name for name in books
        if (Path(name).stem == wanted.name and wanted.parent.name in ("", Path(name).parent.name))
        or _number(name) == lesson.zfill(2)
    ]  # fmt: skip
    if not names:
        known = ", ".join(sorted({_number(name) for name in books}))
        raise DtlibError(f"There is no lesson {lesson!r}: choose one of {known}, or one of its notebooks.")
    folder, _ = open_folder()
    record, said = _read_record(folder), []
    for name in names:
        copy, digest = folder / name, _digest(books[name])
        if _digest(copy) == digest:
            said.append(f"{name} is unchanged.")
            continue
        kept = _free_name(copy)
        _copy(copy, kept)
        _copy(books[name], copy)
        record[name] = digest
        said.append(f"{name} is restored; your copy is {kept.name}, in the same folder.")
    _write(folder / RECORD, json.dumps(record, indent=1))
    return said


def fresh() -> None:
    """Replace the notebook in which this is called by the course's original: ``lab.fresh()`` in a cell.

    The notebook as it was last saved is kept beside the new one.

    Raises:
        DtlibError: for a notebook that does not belong to the course.
    """
    name = os.environ.get("JPY_SESSION_NAME", "")
    if not name.endswith(".ipynb"):
        raise DtlibError("lab.fresh() belongs in a notebook in JupyterLab. Elsewhere, run `dtlib fresh 04`.")
    said = restore(name)
    print(*said, sep="\n")
    if any("your copy is" in each for each in said):
        print("To see it: File > Reload Notebook from Disk. If JupyterLab asks whether to overwrite it, choose Revert.")
        print("Variables in the notebook and on the ranks remain until you restart the kernel.")


def sources() -> dict[str, Path]:
    """Return the files of the course, by their relative paths in a learner's folder."""
    found = {path.relative_to(SOURCE).as_posix(): path for pattern in FILES for path in sorted(SOURCE.glob(pattern))}
    if not found:
        raise DtlibError(f"{SOURCE} has no course: install dtlib again, from a wheel or a complete clone.")
    # AI assistants read the nearest AGENTS.md, so the course's top folder gets a copy.
    return {"AGENTS.md": found["notebooks/AGENTS.md"], **found}


def _number(name: str) -> str:
    return Path(name).stem.partition("_")[0]


def _is_empty(folder: Path) -> bool:
    """Return whether a folder has only files of an installation: hidden files, virtual environments, wheels."""
    return all(
        path.name.startswith(".") or path.suffix == ".whl" or os.path.exists(path / "pyvenv.cfg")
        for path in folder.iterdir()
    )


def _close(folder: Path) -> None:
    """Make a folder private to its owner; `dtlib doctor` reports file systems without permissions."""
    with suppress(OSError):  # a later copy reports the problem
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def _free_name(path: Path) -> Path:
    names = (path.with_stem(f"yours{'' if n == 1 else n}_{path.stem}") for n in range(1, 10_000))
    return next(name for name in names if not name.exists())


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _copy(source: Path, target: Path) -> None:
    # A temporary file and a rename: an interruption leaves the old file or the new one, never a part.
    part = target.with_name(f".{target.name}.part")
    with writing(target, "free some space and make it writable, or choose another folder for the course"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Copy without permissions: files of an installed package may be read-only.
        shutil.copyfile(source, part)
        part.replace(target)


def _read_record(folder: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        return read_json(folder / RECORD, dict)
    # Without a record, every file that differs counts as changed by the learner.
    return {}


def _write(path: Path, text: str) -> None:
    with writing(path, "free some space and make it writable"):
        write_atomically(path, text)


def done(name: str, result: object = True) -> None:
    """Record an exercise that passed, or a prediction that was compared, if this is a learner's folder.

    A quiz has the name ``quiz 03`` and the result [right, of]. Later results do not replace the first.
    """
    _note(lambda record: record["done"].setdefault(name, result))


def scored(exercise: str, value: float, par: float, unit: str, ranks: int) -> None:
    """Record a score if it is better than the recorded one, as a smaller fraction of its par."""

    def keep(record):
        best = record["scores"].get(exercise)
        if best is None or value / par < best["value"] / best["par"]:
            record["scores"][exercise] = {"value": value, "par": par, "unit": unit, "ranks": ranks}

    _note(keep)


def keep(name: str, value: object) -> None:
    """Record another JSON value under ``name``, for the certificate."""
    _note(lambda record: record.update({name: value}))


def write_start_page(folder: Path) -> None:
    """Write the start page with the learner's progress to ``folder``."""
    known, page = _read_done(folder)["done"], (SOURCE / START_PAGE).read_text(encoding="utf-8")
    rows = {line: _of_row(line, known) for line in page.splitlines() if line.startswith("| [")}
    column = {**rows, "| lesson": "done", "|---": "---"} if any(rows.values()) else {}
    written = []
    for line in page.splitlines():
        cell = next((word for begin, word in column.items() if line.startswith(begin)), None)
        before, lesson, *others = line.split("|") if cell is not None else (line, "")
        written.append("|".join([before, lesson, f" {cell} ", *others]) if cell is not None else line)
    _write(folder / START_PAGE, "\n".join(written) + "\n")


def _of_row(line: str, known: dict) -> str:
    """Return ``lecture 3 of 8, exercises ✓`` for a row: how many of its predictions, checks and quizzes are done."""
    asked: dict[str, set[str]] = {"lectures": set(), "exercises": set()}
    for book, found in asked_in(line).items():
        asked[book.partition("/")[0]] |= {name for _, name in found}
    words = {"lectures": "lecture", "exercises": "exercises"}
    return ", ".join(
        f"{words[kind]} {'✓' if names <= known.keys() else f'{len(names & known.keys())} of {len(names)}'}"
        for kind, names in asked.items() if names & known.keys()
    )  # fmt: skip


def asked_in(line: str) -> dict[str, list[tuple[str, str]]]:
    """Map each notebook in ``line`` to its tasks in order: (check, predict or quiz; name in the record)."""
    found = {}
    for book in _LINK.findall(line):
        text = (SOURCE / "notebooks" / book).read_text(encoding="utf-8")
        found[book] = [(kind, f"quiz {name}" if kind == "quiz" else name) for kind, name in _ASKED.findall(text)]
    return found


def _note(change) -> None:
    """Change the record, protected by a lock. A failure prints a message, and does not stop the learner's cell."""
    here = None
    with suppress(DtlibError):  # outside a workshop
        here = folder()
    if here is None or not (here / RECORD).is_file():
        return
    try:
        # Ask often: a process that asks seldom may never find the lock free.
        with FileLock(here / LOCK, timeout=LOCK_SECONDS, poll_interval=0.005):
            record = _read_done(here)
            before = json.dumps(record, sort_keys=True)
            change(record)
            if (text := json.dumps(record, sort_keys=True)) != before:
                _write(here / DONE, text)
                write_start_page(here)
    except (DtlibError, OSError) as problem:
        print(f"Your progress cannot be saved: {problem}")


def read_record() -> dict:
    """Return the record of this folder.

    It has ``done``: name -> True, or [right, of] for a quiz; ``scores``: exercise -> value, par, unit, ranks; and the
    values that ``keep`` recorded.

    Raises:
        DtlibError: if this folder has no record.
    """
    here = folder()
    if not (here / RECORD).is_file():
        raise DtlibError(f"{here} stores no progress: use a folder in which `dtlib lab` has copied the course.")
    return _read_done(here)


def _read_done(folder: Path) -> dict:
    """Return the record of a folder; rename a damaged one and start again."""
    path = folder / DONE
    record: dict = {"done": {}, "scores": {}}
    try:
        record |= read_json(path, dict)
        for value in record["done"].values():
            _, _ = value if value is not True else (0, 0)
        for best in record["scores"].values():
            str(best["unit"]), str(best["ranks"])
            number("value", best["value"], 0, whole=False, error=ValueError)
            number("par", best["par"], 1e-9, whole=False, error=ValueError)
    except FileNotFoundError:
        pass
    except OSError as problem:
        raise DtlibError(f"{path} cannot be read ({problem.strerror}): make it readable.") from None
    except (AttributeError, LookupError, TypeError, ValueError) as problem:
        record = {"done": {}, "scores": {}}
        kept = next(name for n in count(1) if not (name := path.with_name(f"{DONE}.damaged{n}")).exists())
        with suppress(OSError):
            path.rename(kept)
        print(f"{path} is damaged ({problem}). It is kept as {kept.name}, and your progress starts again.")
    return record
