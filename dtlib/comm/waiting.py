"""The one place where a rank waits for others.

A blocking MPI call cannot be interrupted: it does not see Ctrl-C, and it spins on a core until its peers
come. So every verb starts a non-blocking operation and waits for it here, by asking again and again.
"""

import time

from dtlib.errors import WaitTimeout

SPIN_SECONDS = 0.0005  # most collectives finish within this; after it the rank yields its core
LONGEST_NAP = 0.002

# An operation that was interrupted is abandoned, not cancelled: MPI may still write into its buffers, so
# they must outlive it.
_abandoned = []


class Handle:
    """An operation under way: what a verb returns with ``async_op=True``."""

    def __init__(self, request, buffers, finish, description, time_limit):
        self._request = request
        self._buffers = buffers
        self._finish = finish
        self._description = description
        self._time_limit = time_limit
        self._completed = False
        self._value = None

    def done(self) -> bool:
        """True once the operation is complete on this rank. Does not wait."""
        if not self._completed and self._request.Test():
            self._value = self._finish()
            self._completed = True
            self._buffers = None
        return self._completed

    def wait(self):
        """Wait for the end and return what the verb returns.

        Raises ``WaitTimeout`` after the communicator's ``time_limit``; Ctrl-C or Stop ends it at once.
        """
        started = time.monotonic()
        nap = 0.0
        try:
            while not self.done():
                waited = time.monotonic() - started
                if waited < SPIN_SECONDS:
                    continue
                if self._time_limit is not None and waited > self._time_limit:
                    raise WaitTimeout(
                        f"{self._description} waited {self._time_limit:g} s for the other ranks: one of them "
                        "did not call it, or raised an error. Call dtlib.reset() on all ranks to go on."
                    )
                nap = min(LONGEST_NAP, nap + 0.0001)
                time.sleep(nap)
        except BaseException:
            _abandoned.append((self._request, self._buffers))
            raise
        return self._value
