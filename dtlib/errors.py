"""Errors for people: one sentence that says what is wrong and what to do. Numbers that make no sense are the same."""

from contextlib import suppress
from numbers import Real

RESET = "Call dtlib.reset() on all ranks to go on."


class DtlibError(Exception):
    """A mistake that its maker can fix.

    In a notebook only the sentence is shown, without a traceback; the command line prints it and
    exits with status 2.
    """

    def _render_traceback_(self):
        # IPython calls this instead of formatting the stack.
        return [f"{type(self).__name__}: {self}"]


class MissingName(DtlibError, AttributeError):
    """A name of the counterpart that is not here."""


class CommunicationError(DtlibError):
    """An operation of the communicator was called with something that it cannot carry."""


class PeerFailed(DtlibError):
    """A rank waited for one that will not arrive: it raised an error in this cell of the notebook, or its program has
    ended."""


class WaitTimeout(DtlibError):
    """A rank waited longer than the communicator's ``time_limit``."""


MOST = 10**15  # of any number, unless told otherwise


def number(
    name: str, value: object, least: float = 1, most: float = MOST, whole: bool = True,
    error: type[Exception] = DtlibError, why: str = "",
) -> float:  # fmt: skip
    """Return a number if it is in a range, and whole unless told otherwise: then it is an int.

    Raises:
        error: one sentence with the name, the value and the range, and ``why`` that is its end. Text, a list, true,
            null, NaN, infinity and a number of 400 digits are in no range.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        found: float = value  # type: ignore[assignment]  # mypy does not know that a float is Real
        if least <= found <= most and (not whole or found == int(found)):
            return int(found) if whole else found
    shown = "null" if value is None else f"{value!r:.40}"
    raise error(f"{name} is {shown}: give a {'whole ' * whole}number from {least:,.16g} to {most:,.16g}{why}.")


def read_number(text: str) -> object:
    """The number that somebody has typed, such as 10_000_000 or 1e7; text that is none stays text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
