"""``lab.solution("ring-build")``: show a solution of an exercise, from the course's solved notebooks."""

import json
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.checks.exercise import exercise_name


def solution(name: str) -> None:
    """Show a solution of exercise ``name``. Others exist, and ``lab.check`` accepts them too.

    Raises:
        DtlibError: for a name that is no exercise.
    """
    from IPython.display import Code, display

    display(Code(source_of(name), language="python"))


def source_of(name: str) -> str:
    """Return the cells of the solved notebook that answer an exercise, as one text."""
    return "\n\n".join(cells_of(name)[1])


def cells_of(name: str) -> tuple[str, list[str]]:
    """Return the solved notebook's cell with imports on the ranks, and the cells that answer an exercise.

    The answer is between the exercise's check and the previous check.
    """
    name = exercise_name(name)
    for path in sorted(Path(course.SOURCE).glob("notebooks/solutions/*.ipynb")):
        imports = ""
        answer: list[str] = []
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if f'lab.check("{name}")' in source:
                return imports, answer
            if "lab.check(" in source:
                answer = []
            elif "solution" in cell["metadata"].get("tags", ()) and "lab.predict(" not in source:
                answer.append(source)
            elif not imports and source.startswith("%%px") and "import dtlib" in source:
                imports = source
    raise DtlibError(f"The solved notebooks of this course do not have {name!r}: see solutions/ in the file browser.")
