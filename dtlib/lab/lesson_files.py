"""Where the lessons are: a folder each in ``dtlib/lessons``, a floor above, found by what lies in it.

judge_*.py      has EXERCISES: their names in the first column of a table that begins a line
__init__.py     has NOTEBOOKS: of each source of a notebook, the notebook's name

dtlib/lessons/l04/exercises.py  ->  04_data_parallel_exercises
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType

FOLDER = Path(str(files("dtlib"))) / "lessons"


def found(pattern: str) -> Iterator[tuple[str, Path]]:
    """(lesson, file) for each file of that name in a lesson's folder, in the lessons' order; ``11b`` is a lesson."""
    return ((file.parent.name[1:], file) for file in sorted(FOLDER.glob(f"l*/{pattern}")))


def module_of(file: Path) -> ModuleType:
    """What a file of a lesson defines."""
    package = f"dtlib.lessons.{file.parent.name}"
    return import_module(package if file.stem == "__init__" else f"{package}.{file.stem}")


@cache
def notebooks() -> dict[str, Path]:
    """The name of each notebook of the lessons -> its source, in the notebooks' order."""
    of_all = {
        name: file.with_name(f"{source}.py")
        for _, file in found("__init__.py")
        for source, name in module_of(file).NOTEBOOKS.items()
    }
    return dict(sorted(of_all.items()))


def title(source: Path) -> str:
    """``03 Collectives``, from the first lines of a source."""
    (first, *_) = re.findall(r"^# # (.+)$", source.read_text(encoding="utf-8"), re.M)
    return first
