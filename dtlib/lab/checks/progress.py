"""A learner's progress: ``lab.progress()`` shows what is done and open, ``lab.scores()`` the best scores."""

from dtlib.lab import course
from dtlib.lab.tables import fold, table


def progress() -> None:
    """Show what is done and what is open in each lesson, and what to do next.

    Raises:
        DtlibError: if this folder has no record.
    """
    known, rows = course.read_record()["done"], []
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
    if following := [*begun[-1:], *untouched, *begun[:-1]]:  # first the last lesson that was started
        title, left = following[0]
        name, (kind, book) = next(iter(left.items()))
        what = f"the quiz of {title}" if kind == "quiz" else f"{'predict' if kind == 'predict' else 'solve'} {name!r}"
        print(fold(f"Next: {what}, in {book}."))
    else:
        print("All is done.")


def scores() -> None:
    """Show the best scores in this folder beside par, and a line to paste to the class.

    Raises:
        DtlibError: if this folder has no record.
    """
    record = course.read_record()
    results = [(name, result) for name, result in record["done"].items() if isinstance(result, list)]
    quizzes = {name.removeprefix("quiz "): "{} of {}".format(*result) for name, result in results}
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


def lessons() -> list[tuple[str, dict]]:
    """Return (title, tasks of its notebooks) for each lesson on the start page that has tasks.

    In a notebook of a short track, the track's notebooks take the lessons' place.
    """
    page = (course.SOURCE / course.START_PAGE).read_text(encoding="utf-8")
    found = [(line.split("]")[0][3:], course.asked_in(line)) for line in page.splitlines() if line.startswith("| [")]
    here, root = course.current_folder(), course.folder() / "notebooks"
    if here.is_relative_to(root / "workshop") and here != root / "workshop":
        track = "/".join(here.relative_to(root).parts[:2])
        books = sorted((course.SOURCE / "notebooks" / track).glob("*.ipynb"))
        found = [(book.stem.replace("_", " "), course.asked_in(f"]({track}/{book.name})")) for book in books]
    return [(title, asked) for title, asked in found if any(asked.values())]


def _in_words(left: dict) -> str:
    predictions = sum(kind == "predict" for kind, _ in left.values())
    said = [f"{predictions} prediction{'s' * (predictions > 1)}"] * bool(predictions)
    others = ["quiz" if kind == "quiz" else name for name, (kind, _) in left.items() if kind != "predict"]
    return ", ".join(said + others)
