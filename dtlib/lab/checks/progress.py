"""What a learner has done: a small file in the folder of the course, and what is told from it.

The start page there has ticks, ``lab.progress()`` a table of what is done and open, ``lab.scores()`` the best scores.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.engines import workshop
from dtlib.lab.tables import fold, table

FILE = ".progress.json"
_ASKED = re.compile(r'lab\.(check|predict|quiz)\(\\?"([\w-]+)\\?"')  # in the text of a notebook's file
_LINK = re.compile(r"\]\(((?:lectures|exercises|workshop/[\w-]+)/[^)]+\.ipynb)\)")
_NO_RECORD = "{} keeps no record of what is done: a folder does in which `dtlib lab` has laid out the course."


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


def keep(name: str, value) -> None:
    """Note something else that JSON can hold, for the certificate."""
    _note(lambda record: record.update({name: value}))


def progress() -> None:
    """Show what is done and what is open in each lesson, and what to do next.

    Raises:
        DtlibError: where no record is kept.
    """
    known, rows = kept()["done"], []
    begun: list[tuple[str, dict]] = []
    untouched: list[tuple[str, dict]] = []
    for title, asked in lessons():
        names = {name: (kind, book) for book, found in asked.items() for kind, name in found}
        left = {name: names[name] for name in names if name not in known}
        if left:
            (begun if len(left) < len(names) else untouched).append((title, left))
        said = "all of it" if len(left) == len(names) else _in_words(left)
        rows.append((title, f"{len(names) - len(left)} of {len(names)}", said))
    table(rows, ("lesson", "done", "open"), align="lrl")
    if following := [*begun[-1:], *untouched, *begun[:-1]]:  # the furthest that is begun
        title, left = following[0]
        name, (kind, book) = next(iter(left.items()))
        what = f"the quiz of {title}" if kind == "quiz" else f"{'predict' if kind == 'predict' else 'solve'} {name!r}"
        print(fold(f"Next: {what}, in {book}."))
    else:
        print("All is done.")


def scores() -> None:
    """Show the best scores in this folder beside par, and a line with them to paste to the class.

    Raises:
        DtlibError: where no record is kept.
    """
    record = kept()
    quizzes = {
        name.removeprefix("quiz "): "{} of {}".format(*result)
        for name, result in record["done"].items()
        if isinstance(result, list)
    }
    if not record["scores"] and not quizzes:
        print("No score yet: byte golf (lesson 04), the schedule puzzle (07), the plan (14) and the quizzes give one.")
        return
    rows, said = [], []
    for exercise, best in sorted(record["scores"].items()):
        on_ranks = f" on {best['ranks']} ranks" if best["ranks"] else ""
        rows.append((exercise, f"{best['value']:,g} {best['unit']}{on_ranks}", f"{best['par']:,g}"))
        said.append(f"{exercise} {best['value']:g}/{best['par']:g}{on_ranks}")
    rows += [(f"quiz {name}", result, "") for name, result in sorted(quizzes.items())]
    said += [f"quiz {name} {quizzes[name]}" for name in ("before", "after") if name in quizzes]
    table(rows, ("", "best", "par"), align="lrr")
    if said:
        print(fold(f"To paste: {'; '.join(said)}"))


def write_start_page(folder: Path) -> None:
    """The start page in a learner's folder, with what is done there."""
    known, page = _read(folder)["done"], (course.SOURCE / course.START_PAGE).read_text(encoding="utf-8")
    rows = {line: _of_row(line, known) for line in page.splitlines() if line.startswith("| [")}
    column = {**rows, "| lesson": "done", "|---": "---"} if any(rows.values()) else {}
    written = []
    for line in page.splitlines():
        cell = next((word for begin, word in column.items() if line.startswith(begin)), None)
        before, lesson, *others = line.split("|") if cell is not None else (line, "")
        written.append("|".join([before, lesson, f" {cell} ", *others]) if cell is not None else line)
    (folder / course.START_PAGE).write_text("\n".join(written) + "\n", encoding="utf-8")


def _of_row(line: str, known: dict) -> str:
    """``lecture 3 of 8, exercises ✓``: of what a row's notebooks ask for, predictions, checks and quizzes."""
    asked: dict[str, set[str]] = {"lectures": set(), "exercises": set()}
    for book, found in _asked(line).items():
        asked[book.partition("/")[0]] |= {name for _, name in found}
    words = {"lectures": "lecture", "exercises": "exercises"}
    return ", ".join(
        f"{words[kind]} {'✓' if names <= known.keys() else f'{len(names & known.keys())} of {len(names)}'}"
        for kind, names in asked.items() if names & known.keys()
    )  # fmt: skip


def lessons() -> list[tuple[str, dict]]:
    """Of each row of the start page its lesson's title, and what its notebooks ask for; in a notebook of a short track,
    of each of that track's. Those that ask for nothing are left out."""
    page = (course.SOURCE / course.START_PAGE).read_text(encoding="utf-8")
    found = [(line.split("]")[0][3:], _asked(line)) for line in page.splitlines() if line.startswith("| [")]
    here, root = workshop.current_folder(), workshop.folder() / "notebooks"
    if here.is_relative_to(root / "workshop") and here != root / "workshop":
        track = "/".join(here.relative_to(root).parts[:2])
        books = sorted((course.SOURCE / "notebooks" / track).glob("*.ipynb"))
        found = [(book.stem.replace("_", " "), _asked(f"]({track}/{book.name})")) for book in books]
    return [(title, asked) for title, asked in found if any(asked.values())]


def _asked(line: str) -> dict[str, list[tuple[str, str]]]:
    """Notebook -> what it asks for, in its order, as (check, predict or quiz; name in the record)."""
    found = {}
    for book in _LINK.findall(line):
        text = (course.SOURCE / "notebooks" / book).read_text(encoding="utf-8")
        found[book] = [(kind, _of_quiz(name) if kind == "quiz" else name) for kind, name in _ASKED.findall(text)]
    return found


def _in_words(left: dict) -> str:
    predictions = sum(kind == "predict" for kind, _ in left.values())
    said = [f"{predictions} prediction{'s' * (predictions > 1)}"] * bool(predictions)
    others = ["quiz" if kind == "quiz" else name for name, (kind, _) in left.items() if kind != "predict"]
    return ", ".join(said + others)


def _of_quiz(name: str) -> str:
    return f"quiz {name}"


def _note(change) -> None:
    with suppress(DtlibError, OSError):  # a record of what was done must not spoil it
        folder = workshop.folder()
        if (folder / course.RECORD).is_file():
            before, record = _read(folder), _read(folder)
            change(record)
            if record != before:
                (folder / FILE).write_text(json.dumps(record, sort_keys=True))
                write_start_page(folder)


def kept() -> dict:
    folder = workshop.folder()
    if not (folder / course.RECORD).is_file():
        raise DtlibError(_NO_RECORD.format(folder))
    return _read(folder)


def _read(folder: Path) -> dict:
    """``done``: name -> True, or [right, of] for a quiz; ``scores``: exercise -> value, par, unit, ranks; what was kept
    by name (``keep``)."""
    record = {}
    with suppress(OSError, ValueError):
        record = json.loads((folder / FILE).read_text().replace('-mend"', '-fix"'))  # names of an earlier version, too
    if isinstance(record, list):  # names alone, as an earlier version of the course wrote them
        record = {"done": dict.fromkeys(record, True)}
    return {"done": {}, "scores": {}, **record}
