"""Messages that are longer than MPI can count."""

from collections.abc import Callable

import numpy as np
from mpi4py import MPI


class Pieces:
    """One message as several of ``largest`` bytes and a shorter one, perhaps of none, by which its end is known."""

    def __init__(self, start: Callable, array: np.ndarray, largest: int):
        flat = array.reshape(-1).view("u1")
        self._requests = [start(flat[at : at + largest]) for at in range(0, flat.size + 1, largest)]
        self._largest = largest
        self.come = 0  # bytes of those that are complete, but for the last

    def Test(self, status: MPI.Status | None = None) -> bool:
        """True once all are complete; of a receive, whose ``status`` is given, also after a shorter one."""
        while self._requests[0].Test(status):
            if len(self._requests) == 1:
                return True
            if status is not None and status.count < self._largest:
                self.Cancel()
                return True
            del self._requests[0]
            self.come += self._largest
        return False

    def Cancel(self) -> None:
        for request in self._requests:
            if request:
                request.Cancel()
