"""lab.certificate(): a page that lists a learner's results in this folder."""

from datetime import date
from html import escape

from dtlib.errors import DtlibError
from dtlib.files import writing
from dtlib.lab import course
from dtlib.lab.checks import progress
from dtlib.lab.tables import Table

FILE = "certificate.html"
STYLE = """body{font:17px/1.5 Georgia,serif;max-width:46em;margin:3em auto;padding:0 1em;color:#222}
h1{font-weight:normal;border-bottom:3px solid #0072b2;padding-bottom:.3em}
table{border-collapse:collapse;width:100%;margin:1em 0 2em}td,th{border-bottom:1px solid #ccc;padding:.35em .6em;
text-align:left;vertical-align:top}small{color:#555}@media print{body{margin:0 auto}}"""


def certificate(name: str = "") -> None:
    """Write ``certificate.html`` into the workshop folder.

    It lists predictions, passed exercises, quizzes, best scores, and the plan that was run in lesson 14. It is one file
    and needs no network.

    Args:
        name: the learner's name.

    Raises:
        DtlibError: without a record or without results, or if the file cannot be written.
    """
    if name == "your name":
        print("Put your own name in its place, and run this cell again.")
        return
    text = page(course.read_record(), progress.lessons(), name, date.today())
    path = course.folder() / FILE
    with writing(path, "free some space there, and try again"):
        path.write_text(text, encoding="utf-8")
    print(f"{path.name} is in {path.parent}: open it in a browser, and print it from there.")


def page(record: dict, lessons: list[tuple[str, dict]], name: str, day: date) -> str:
    """Return the page for a record (progress.py), without lessons that have no results."""
    rows = [row for title, asked in lessons if (row := _row(title, asked, record["done"]))]
    if not rows and not record["scores"] and "capstone" not in record:
        raise DtlibError("There is no result in this folder: predict, check or answer something first.")
    parts = [f"<h1>Distributed deep learning, with dtlib</h1><p>{escape(name)} {day.isoformat()}</p>"]
    headers = ("lesson", "predictions", "exercises passed", "quiz, first try")
    parts += [Table(rows, headers)._repr_html_()] if rows else []
    best = sorted(record["scores"].items())
    scores = [(name, f"{score['value']:,g} {score['unit']}", f"{score['par']:,g}") for name, score in best]
    parts += [Table(scores, ("score", "best", "par"))._repr_html_()] if scores else []
    if capstone := record.get("capstone"):
        run = f"Planned and run in lesson 14, on four ranks, {capstone['steps']} steps: {capstone['plan']}"
        parts.append(f"<p>{escape(run)}</p>")
        parts.append(Table(capstone["rows"], ("", "predicted", "found"))._repr_html_())
    parts.append(
        "<p><small>Written by lab.certificate() from the record in the learner's own folder. It lists what was done "
        "there, on the honour of whoever did it: nobody has supervised it.</small></p>"
    )
    head = f'<meta charset="utf-8"><title>What was done</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _row(title: str, asked: dict, done: dict) -> tuple | None:
    names = [(kind, each) for found in asked.values() for kind, each in found]
    predictions = [each for kind, each in names if kind == "predict"]
    compared = sum(each in done for each in predictions)
    passed = [each for kind, each in names if kind == "check" and each in done]
    quizzes = ["{} of {}".format(*done[each]) for kind, each in names if kind == "quiz" and each in done]
    if not (compared or passed or quizzes):
        return None
    said = f"{compared} of {len(predictions)}" if predictions else ""
    return title, said, ", ".join(passed), ", ".join(quizzes)
