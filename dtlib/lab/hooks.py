"""What happens in a notebook (a verdict, a guess, a quiz answer, a wait), told to those who listen: dtlib/wall does.

Who listens is an entry point ``dtlib.lab.listeners``: a module that adds itself to ``listeners`` when it is imported.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points

listeners: list[Callable] = []  # called with the kind of what has happened, and its facts by name


def report(kind: str, **facts: object) -> None:
    """Tell all listeners; it never fails."""
    _import_listeners()
    for tell in listeners:
        with suppress(Exception):
            tell(kind, **facts)


@cache
def _import_listeners() -> None:
    for found in entry_points(group="dtlib.lab.listeners"):
        with suppress(Exception):
            found.load()
