"""Messages that are too long for MPI's 31-bit counts, sent in pieces."""

from collections.abc import Callable

import numpy as np
from mpi4py import MPI


class Pieces:
    """One message as several pieces of ``largest`` bytes and a last, shorter piece, which marks the end.

    The last piece may be empty.
    """

    def __init__(self, start: Callable, array: np.ndarray, largest: int):
        flat = array.reshape(-1).view("u1")
        # `+ 1`: if the length is a multiple of `largest`, an empty last piece marks the end.
        self._requests = [start(flat[at : at + largest]) for at in range(0, flat.size + 1, largest)]
        self._largest = largest
        self.nbytes = 0  # bytes of the complete pieces, except the last

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return True once all pieces are complete. Does not wait.

        A receive passes ``status`` and also ends after a shorter piece.
        """
        while self._requests[0].Test(status):
            if len(self._requests) == 1:
                return True
            # A shorter piece is the sender's last. Cancel the receives of pieces that will not be sent.
            if status is not None and status.count < self._largest:
                self.Cancel()
                return True
            del self._requests[0]
            self.nbytes += self._largest
        return False

    def Cancel(self) -> None:
        """Cancel the pieces that are still pending."""
        for request in self._requests:
            if request:
                request.Cancel()
