"""``lab.solution("ring-build")``: an exercise solved, as the solved notebooks of the course have it."""

import json
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.checks.exercise import known


def solution(name: str) -> None:
    """Show a solution of exercise ``name``. There are others, and ``lab.check`` takes them too.

    Raises:
        DtlibError: for a name that is no exercise.
    """
    from IPython.display import Code, display

    display(Code(source_of(name), language="python"))


def source_of(name: str) -> str:
    """The cells of the solved notebook that answer an exercise."""
    return "\n\n".join(cells_of(name)[1])


def cells_of(name: str) -> tuple[str, list[str]]:
    """The cell of the solved notebook that imports on the ranks, and those that answer an exercise: they stand between
    its check and the one before."""
    name = known(name)
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
