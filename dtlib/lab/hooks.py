"""What happens in a notebook (a verdict, a guess, a quiz answer, a wait), told to those who listen: dtlib/wall does."""

from collections.abc import Callable
from contextlib import suppress

listeners: list[Callable] = []  # called with the kind of what has happened, and its facts by name


def report(kind: str, **facts: object) -> None:
    """Tell all listeners; it never fails."""
    for tell in listeners:
        with suppress(Exception):
            tell(kind, **facts)
