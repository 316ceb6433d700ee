"""Report events in a notebook (verdicts, guesses, quiz answers, waits) to listeners such as dtlib/wall.

A listener is an entry point in ``dtlib.lab.listeners``: a module that adds itself to ``listeners`` when imported.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points

listeners: list[Callable] = []  # called with the kind of an event, and its facts as keyword arguments


def report(kind: str, **facts: object) -> None:
    """Call all listeners with an event; errors in listeners are ignored."""
    _import_listeners()
    for listener in listeners:
        with suppress(Exception):
            listener(kind, **facts)


@cache
def _import_listeners() -> None:
    for found in entry_points(group="dtlib.lab.listeners"):
        with suppress(Exception):
            found.load()
