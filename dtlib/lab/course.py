"""The course in a learner's folder: where that is, the copies that are laid out there, and what is done of them.

``dtlib/course`` links to the folders of a clone; in a wheel it holds them. Either way nobody works there:

    a clone                              work/ in it, which git ignores
    elsewhere, with a wheel or without   the folder that was empty when `dtlib lab` was called in it

A small record says what was laid out, so that a new version of the course replaces what the learner has not touched.
Another one says what was done: the start page has it as ticks, ``lab.progress()`` as a table (checks/progress.py).
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
from typing import Any

from filelock import FileLock

from dtlib.errors import DtlibError, number
from dtlib.files import read_json, write_whole, writing

SOURCE = Path(str(files("dtlib"))) / "course"
START_PAGE = Path("notebooks") / "start.md"
RECORD = ".dtlib.json"
DONE = ".progress.json"
LOCK, LOCK_SECONDS = ".progress.lock", 10
PROFILE = Path("cluster_profiles") / "profile_local_mpi"
LEFT_BEHIND = ("db", "log", "pid", "security", "startup", "state", "static")  # by engines that ran in a profile
FILES = (
    "cluster_profiles/*/*.py", "cluster_profiles/*.py", "cluster_profiles/*.md", "cluster_profiles/site.toml",
    "cluster_profiles/jobs/*.sh", "data/*", "notebooks/LICENSE", "notebooks/configs/*.json", "notebooks/*.md",
    "notebooks/*.R", "notebooks/*.py",
    "notebooks/lectures/*.ipynb", "notebooks/exercises/*.ipynb", "notebooks/solutions/*.ipynb",
    "notebooks/workshop/*/*.ipynb", "notebooks/workshop/*/*.md", "notebooks/workshop/*/solved/*.ipynb",
    "notebooks/slides/*.html",
)  # fmt: skip
_ASKED = re.compile(r'lab\.(check|predict|quiz)\(\\?"([\w-]+)\\?"')  # in the text of a notebook's file
_LINK = re.compile(r"\]\(((?:lectures|exercises|workshop/[\w-]+)/[^)]+\.ipynb)\)")


def current_folder() -> Path:
    """The folder that this process works in, if it is still there."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise DtlibError("The current folder has been deleted: change to an existing folder.") from None


def is_workshop(folder: Path) -> bool:
    # os.path: where a folder is closed to this user, Path.is_file raises an error.
    return os.path.isfile(folder / PROFILE / "ipcluster_config.py")


def folder() -> Path:
    """The workshop folder: the nearest one above this notebook, else the one that holds this package."""
    here = current_folder()
    for candidate in [here, *here.parents, Path(__file__).resolve().parents[2]]:
        if is_workshop(candidate):
            return candidate
    raise DtlibError(
        f"There is no workshop at or above {here}: run `dtlib lab` in an empty folder, to copy the course there, or "
        "change to a clone of the repository."
    )


def working_folder() -> Path:
    """Where a learner who is here works: there may be nothing in it yet."""
    here = current_folder()
    for candidate in (here, *here.parents):
        if is_workshop(candidate):
            return candidate / "work" if (candidate / "notebooks" / "source").is_dir() else candidate
    return here


def open_folder() -> tuple[Path, str]:
    """The folder in which a learner who is here works, with the course in it, and a sentence about what is new there.

    Raises:
        DtlibError: where there are other things, or where nothing can be written.
    """
    folder = working_folder()
    if folder == current_folder() and not (folder / PROFILE).exists() and not _is_empty(folder):
        raise DtlibError(
            f"{folder} has other things in it, so the course is not laid out here: change to an empty folder (mkdir "
            "course && cd course) or to a clone of the repository."
        )
    return folder, lay_out(folder)


def lay_out(folder: Path) -> str:
    """Copy to ``folder`` what is missing there and what is old and untouched; returns a sentence about it, or ''."""
    record, copied, newer = _read_record(folder), 0, []
    if not record:
        _close(folder)
    for name, source in sources().items():
        copy, digest, before = folder / name, _digest(source), record.get(name)
        there = _digest(copy) if copy.is_file() else None
        if name == START_PAGE.as_posix() and there and before == digest:
            continue  # it differs by the learner's ticks alone
        if there not in (None, digest, before) and name != START_PAGE.as_posix():  # the learner's work
            newer += [name] * (before != digest)
            continue
        if there != digest:
            _copy(source, copy)
            copied += 1
        record[name] = digest
    if record != _read_record(folder):
        _write_record(folder, record)
    said = [f"The course is in {folder}: {copied} file{'s are' if copied > 1 else ' is'} new."] * bool(copied)
    if newer:
        said.append(f"You have changed these, so they stay, although newer versions exist: {', '.join(newer)}.")
        if any(name.endswith(".ipynb") for name in newer):
            said.append("`dtlib fresh` and the number of a lesson, such as 04, renews it, and keeps yours beside it.")
    return " ".join(said)


def fresh(lesson: str) -> list[str]:
    """Give each notebook of a lesson anew, and keep the one that was there under another name; a sentence for each.

    Args:
        lesson: its number, such as 04, or the name of one notebook, such as 04_data_parallel_exercises, with its folder
            or without.
    """
    books = {name: path for name, path in sources().items() if path.suffix == ".ipynb"}
    wanted = Path(lesson.removesuffix(".ipynb"))
    kinds = [wanted.parent.name] if wanted.parent.name in ("lectures", "exercises", "solutions") else None
    names = [
        name for name in books
        if (Path(name).stem == wanted.name and (kinds is None or Path(name).parent.name in kinds))
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
        said.append(f"{name} is new; yours is {kept.name} beside it.")
    _write_record(folder, record)
    return said


def fresh_here() -> None:
    """Give the notebook in which this is called anew, as the course has it; the one that was there, as it was last
    saved, is kept beside it. ``lab.fresh()`` in a cell.

    Raises:
        DtlibError: for a notebook that is none of the course.
    """
    name = os.environ.get("JPY_SESSION_NAME", "")
    if not name.endswith(".ipynb"):
        raise DtlibError("lab.fresh() belongs in a notebook in JupyterLab. Elsewhere, run `dtlib fresh 04`.")
    said = fresh(name)
    print(*said, sep="\n")
    if any("yours is" in each for each in said):
        print("To see it: File > Reload Notebook from Disk. If JupyterLab asks whether to overwrite it, choose Revert.")
        print("Variables in the notebook and on the ranks remain until you restart the kernel.")


def sources() -> dict[str, Path]:
    """The files of the course by their names in a folder where it is laid out."""
    found = {path.relative_to(SOURCE).as_posix(): path for pattern in FILES for path in sorted(SOURCE.glob(pattern))}
    if not found:
        raise DtlibError(f"{SOURCE} has no course: install dtlib again, from a wheel or a complete clone.")
    return {"AGENTS.md": found["notebooks/AGENTS.md"], **found}  # an AI reads the one that is nearest


def _number(name: str) -> str:
    return Path(name).stem.partition("_")[0]


def _is_empty(folder: Path) -> bool:
    """But for what belongs to the installation: hidden files, virtual environments, wheels."""
    return all(
        path.name.startswith(".") or path.suffix == ".whl" or os.path.exists(path / "pyvenv.cfg")
        for path in folder.iterdir()
    )


def _close(folder: Path) -> None:
    """Cells, outputs and predictions are their owner's: where a disk has no modes, `dtlib doctor` says so."""
    with suppress(OSError):  # who copies to it says what is wrong
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def _free_name(path: Path) -> Path:
    names = (path.with_stem(f"yours{'' if n == 1 else n}_{path.stem}") for n in range(1, 10_000))
    return next(name for name in names if not name.exists())


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _copy(source: Path, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")  # whoever stops this in the middle has the old file or the new one
    with writing(target, "free some space and make it writable, or choose another folder for the course"):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, part)  # without its mode: a package may be closed to writing
        part.replace(target)


def _read_record(folder: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        return read_json(folder / RECORD, dict)
    return {}  # then every file that differs counts as the learner's


def _write_record(folder: Path, record: dict[str, str]) -> None:
    _write(folder / RECORD, json.dumps(record, indent=1))


def _write(path: Path, text: str) -> None:
    with writing(path, "free some space and make it writable"):
        write_whole(path, text)


def done(name: str) -> None:
    """Note an exercise that passed or a prediction that was compared: in a learner's folder, and in no other."""
    _note(lambda record: record["done"].setdefault(name, True))


def answered(quiz: str, right: int, of: int) -> None:
    """Note a quiz of which all questions were answered. The first time counts."""
    _note(lambda record: record["done"].setdefault(_of_quiz(quiz), [right, of]))


def scored(exercise: str, value: float, par: float, unit: str, ranks: int) -> None:
    """Note a score, if it is better (a smaller fraction of its par) than the one that is there."""

    def keep(record):
        best = record["scores"].get(exercise)
        if best is None or value / par < best["value"] / best["par"]:
            record["scores"][exercise] = {"value": value, "par": par, "unit": unit, "ranks": ranks}

    _note(keep)


def keep(name: str, value: object) -> None:
    """Note something else that JSON can hold, for the certificate."""
    _note(lambda record: record.update({name: value}))


def write_start_page(folder: Path) -> None:
    """The start page in a learner's folder, with what is done there."""
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
    """``lecture 3 of 8, exercises ✓``: of what a row's notebooks ask for, predictions, checks and quizzes."""
    asked: dict[str, set[str]] = {"lectures": set(), "exercises": set()}
    for book, found in asked_in(line).items():
        asked[book.partition("/")[0]] |= {name for _, name in found}
    words = {"lectures": "lecture", "exercises": "exercises"}
    return ", ".join(
        f"{words[kind]} {'✓' if names <= known.keys() else f'{len(names & known.keys())} of {len(names)}'}"
        for kind, names in asked.items() if names & known.keys()
    )  # fmt: skip


def asked_in(line: str) -> dict[str, list[tuple[str, str]]]:
    """Notebook -> what it asks for, in its order, as (check, predict or quiz; name in the record)."""
    found = {}
    for book in _LINK.findall(line):
        text = (SOURCE / "notebooks" / book).read_text(encoding="utf-8")
        found[book] = [(kind, _of_quiz(name) if kind == "quiz" else name) for kind, name in _ASKED.findall(text)]
    return found


def _of_quiz(name: str) -> str:
    return f"quiz {name}"


def _note(change) -> None:
    """Change the record of what was done, one notebook at a time. What cannot be noted must not spoil what was done."""
    here = None
    with suppress(DtlibError):  # no workshop here
        here = folder()
    if here is None or not (here / RECORD).is_file():
        return
    try:
        with FileLock(here / LOCK, timeout=LOCK_SECONDS):
            record = _read_done(here)
            before = json.dumps(record, sort_keys=True)
            change(record)
            if (text := json.dumps(record, sort_keys=True)) != before:
                _write(here / DONE, text)
                write_start_page(here)
    except (DtlibError, OSError) as problem:
        print(f"This is not noted in your progress: {problem}")


def kept() -> dict:
    """``done``: name -> True, or [right, of] for a quiz; ``scores``: exercise -> value, par, unit, ranks; what was kept
    by name (``keep``).

    Raises:
        DtlibError: where no record is kept.
    """
    here = folder()
    if not (here / RECORD).is_file():
        raise DtlibError(
            f"{here} keeps no record of what is done: a folder does in which `dtlib lab` has laid out the course."
        )
    return _read_done(here)


def _read_done(folder: Path) -> dict:
    """The record of what was done; a damaged one is kept under another name."""
    path = folder / DONE
    record: dict = {"done": {}, "scores": {}}
    try:
        found: Any = read_json(path, object)
        if isinstance(found, list):  # names alone, as an earlier version of the course wrote them
            found = {"done": dict.fromkeys(found, True)}
        kinds = [*(isinstance(each, dict) for each in (found, found.get("done", {}), found.get("scores", {})))]
        if not all(kinds) or not all(isinstance(name, str) for name in found.get("done", {})):
            raise ValueError("its entries are not names")
        record |= found
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
