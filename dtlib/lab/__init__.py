"""The JupyterLab side: engines, pictures and checks. ``lab.engines(4)`` is the first cell of every notebook."""

from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points

_LAZY = {
    "engines": "dtlib.lab.engines.engine_set", "panel": "dtlib.lab.engines.panel",
    "certificate": "dtlib.lab.checks.certificate", "check": "dtlib.lab.checks.judging",
    "last": "dtlib.lab.last_outputs", "mpiexec": "dtlib.lab.programs", "fresh": "dtlib.lab.course",
    "chart": "dtlib.lab.decision_chart", "plan": "dtlib.lab.planning", "predict": "dtlib.lab.checks.predictions",
    "projector": "dtlib.lab.drawing", "fold": "dtlib.lab.tables", "published": "dtlib.lab.source_view",
    "push": "dtlib.lab.engines.names", "progress": "dtlib.lab.checks.progress", "quiz": "dtlib.lab.checks.quiz",
    "read": "dtlib.lab.source_view", "read_changes": "dtlib.lab.source_view", "read_end": "dtlib.lab.source_view",
    "scores": "dtlib.lab.checks.progress", "solution": "dtlib.lab.checks.solutions", "table": "dtlib.lab.tables",
    "values": "dtlib.lab.engines.names",
}  # fmt: skip

# Modules that notebooks reach as lab.NAME, although two of them belong to a lesson.
_MODULES = {"explorer": "lessons.l07.explorer", "pictures": "lab.pictures", "ring": "lessons.l03.ring"}

# The package dtlib.lab.engines and the function lab.engines share a name. Importing the package now and deleting its
# name makes sure that a later import does not replace the function.
import_module("dtlib.lab.engines")
del globals()["engines"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"dtlib.{_MODULES[name]}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    # Other packages add names through an entry point; dtlib.wall adds join and leave.
    for found in entry_points(group="dtlib.lab", name=name):
        return found.load()
    near = "".join(f" Did you mean: {each!r}?" for each in get_close_matches(name, __dir__(), 1))
    raise AttributeError(f"module 'dtlib.lab' has no attribute {name!r}.{near}")


def __dir__() -> list[str]:
    added = entry_points(group="dtlib.lab").names
    return sorted([*globals(), *_LAZY, *_MODULES, *added])
