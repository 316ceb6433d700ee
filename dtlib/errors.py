"""Errors for people: one sentence that says what is wrong and what to do."""

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
    """A rank waited for one that raised an error in this cell of the notebook, and so does not arrive."""


class WaitTimeout(DtlibError):
    """A rank waited longer than the communicator's ``time_limit``."""
