"""MPI's own collectives (``algorithm="mpi"``), for comparison: they cannot be interrupted, and some give wrong sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtlib.comm.waiting import Link
from dtlib.errors import CommunicationError

if TYPE_CHECKING:
    import numpy as np

    from dtlib.comm.link_types import Combine


def all_reduce(link: Link, array: np.ndarray, combine: Combine[np.ndarray]) -> Iterator[list]:
    """Return the steps of MPI's Allreduce; raise CommunicationError if MPI may reduce this dtype wrongly."""
    from mpi4py import MPI

    # Not inside the generator: an unsuitable dtype must be refused before anything is sent.
    operation = _mpi_operation(combine, array.dtype)
    return _blocking(lambda: link.mpi.Allreduce(MPI.IN_PLACE, array, operation))


def broadcast(link: Link, array: np.ndarray, root: int) -> Iterator[list]:
    """Return the steps of MPI's Bcast."""
    return _blocking(lambda: link.mpi.Bcast(array, root))


def _blocking(call):
    call()
    yield from ()


def _mpi_operation(combine, dtype):
    import numpy as np
    from mpi4py import MPI

    from dtlib.comm.types import maximum, minimum

    known = {np.add: MPI.SUM, np.multiply: MPI.PROD, maximum: MPI.MAX, minimum: MPI.MIN}
    if combine not in known:
        raise CommunicationError("MPI's own collectives add 16-bit floats wrongly: leave algorithm= out.")
    if combine in (np.add, np.multiply) and dtype.itemsize < 4:
        raise CommunicationError(f"MPI's own sums and products of {dtype} may not wrap around: leave algorithm= out.")
    if combine in (maximum, minimum) and dtype.kind == "f":
        raise CommunicationError("MPI's own max and min may lose a NaN: leave algorithm= out.")
    return known[combine]
