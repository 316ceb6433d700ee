"""Find the lessons' files. Each lesson is a folder in ``dtlib/lessons``.

    judge_*.py      defines EXERCISES, a dictionary whose keys are the names of exercises
    __init__.py     defines NOTEBOOKS, which maps each source to the name of its notebook

For example, dtlib/lessons/l04/exercises.py is the source of 04_data_parallel_exercises.
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
    """Yield (lesson, file) for each matching file in the lessons' folders, in the lessons' order.

    A lesson is a name such as ``11b``.
    """
    return ((file.parent.name[1:], file) for file in sorted(FOLDER.glob(f"l*/{pattern}")))


@cache
def module_of(file: Path) -> ModuleType:
    """Import the module of a lesson's file."""
    return import_module(f"dtlib.lessons.{file.parent.name}.{file.stem}".removesuffix(".__init__"))


@cache
def notebooks() -> dict[str, Path]:
    """Map the name of each notebook to its source, in the notebooks' order."""
    of_all = {
        name: file.with_name(f"{source}.py")
        for _, file in found("__init__.py")
        for source, name in module_of(file).NOTEBOOKS.items()
    }
    return dict(sorted(of_all.items()))


def title(source: Path) -> str:
    """Return the title of a source, such as ``03 Collectives``."""
    (first, *_) = re.findall(r"^# # (.+)$", source.read_text(encoding="utf-8"), re.M)
    return first
