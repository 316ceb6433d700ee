"""Errors of users, each with one sentence that says what is wrong and what to do; and checks of numbers."""

from contextlib import suppress
from numbers import Real

RESET = "Run %px dtlib.reset() to go on (in a script: dtlib.reset() on all ranks)."


class DtlibError(Exception):
    """An error that the user can fix.

    A notebook shows only the sentence, without a traceback; the command line prints it and exits with status 2.
    """

    def _render_traceback_(self):
        # IPython calls this instead of formatting the stack.
        return [f"{type(self).__name__}: {self}"]


class MissingName(DtlibError, AttributeError):
    """A name of the counterpart library that dtlib does not have."""


class CommunicationError(DtlibError):
    """An operation got arguments that it cannot use, ranks disagree about a call, or the communicator is broken."""


class PeerFailed(DtlibError):
    """A rank waited for a rank that will not arrive.

    That rank's notebook cell has raised an error, or its program has ended.
    """


class WaitTimeout(DtlibError):
    """A rank waited longer than the communicator's ``time_limit``."""


MOST = 10**15  # default upper limit


def number(
    name: str, value: object, least: float = 1, most: float = MOST, whole: bool = True,
    error: type[Exception] = DtlibError, why: str = "",
) -> float:  # fmt: skip
    """Return ``value`` if it is a number in the range; as an int if ``whole``.

    Raises:
        error: a sentence with the name, the value, the range, and ``why`` at its end. Text, lists, true, null, NaN,
            infinity and numbers of 400 digits are refused.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        found: float = value  # type: ignore[assignment]  # mypy does not know that a float is Real
        if least <= found <= most and (not whole or found == int(found)):
            return int(found) if whole else found
    shown = "null" if value is None else f"{value!r:.40}"
    raise error(f"{name} is {shown}: give a {'whole ' * whole}number from {least:,.16g} to {most:,.16g}{why}.")


def read_number(text: str) -> object:
    """Return the number that a user typed, such as 10_000_000 or 1e7; other text is returned unchanged."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
