"""Exercises, each found in its lesson's folder: in ``judge_*.py``, imported when the exercise is asked for.

``lab.check("mine.py")`` takes an exercise from a file of an instructor's own, which has it as ``EXERCISE``.

Plausible wrong answers stand beside the judges (``wrong_*.py``); tests prove that each is rejected for its own reason.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from runpy import run_path

from dtlib.errors import DtlibError
from dtlib.lab import lesson_files
from dtlib.lab.checks.exercise import Exercise


@cache
def homes() -> dict[str, Path]:
    """Name -> the file whose ``EXERCISES`` has it, in the order of lessons: read as text, as imports take longer."""
    found: dict[str, Path] = {}
    for _, file in lesson_files.found("judge_*.py"):
        table = re.search(r"^EXERCISES = \{(.*?)\}$", file.read_text(encoding="utf-8"), re.M | re.S)
        names = re.findall(r'"([\w-]+)": ', table[1]) if table else ()
        assert not found.keys() & set(names), f"two lessons have {sorted(found.keys() & set(names))}"
        found.update(dict.fromkeys(names, file))
    return found


def present(name: str) -> str:
    """The name of today of an exercise that an older notebook calls ``ring-mend``: ``ring-fix``."""
    return re.sub("-mend$", "-fix", str(name))


class Registry(Mapping):
    """Name -> exercise, as the ``EXERCISES`` of its home has it, or a file in the notebook's folder."""

    def __getitem__(self, name: str) -> Exercise:
        if name.endswith(".py"):
            return _of_file(Path(name))
        return _of_lesson(name)

    def __iter__(self) -> Iterator[str]:
        return iter(homes())

    def __len__(self) -> int:
        return len(homes())


@cache
def _of_lesson(name: str) -> Exercise:
    return lesson_files.module_of(homes()[name]).EXERCISES[name]


def _of_file(path: Path) -> Exercise:
    """Read anew each time, so that it can be fixed while a class works."""
    if not path.is_file():
        raise DtlibError(
            f"There is no file {path.name} in {path.absolute().parent}: put the exercise beside the notebook."
        )
    found = run_path(str(path)).get("EXERCISE")
    if not isinstance(found, Exercise):
        raise DtlibError(f"{path.name} has no exercise: let it end in EXERCISE = Exercise(name, observe, judge).")
    return found


EXERCISES = Registry()


def no_exercise(name: str) -> DtlibError:
    """What a name that is no exercise is answered with."""
    near = get_close_matches(str(name), EXERCISES, n=1)
    other = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(sorted(EXERCISES))}."
    return DtlibError(f"There is no exercise {name!r}: {other}")
