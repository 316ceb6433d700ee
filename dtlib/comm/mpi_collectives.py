"""MPI's own collectives, for comparison (``algorithm="mpi"``): they cannot be interrupted, and some add wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtlib.comm.waiting import Link
from dtlib.errors import CommunicationError

if TYPE_CHECKING:
    import numpy as np

    from dtlib.comm.link_types import Combine


def all_reduce(link: Link, array: np.ndarray, combine: Combine[np.ndarray]) -> Iterator[list]:
    from mpi4py import MPI

    operation = _mpi_operation(combine, array.dtype)  # refused here, before anything begins
    return _blocking(lambda: link.mpi.Allreduce(MPI.IN_PLACE, array, operation))


def broadcast(link: Link, array: np.ndarray, root: int) -> Iterator[list]:
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
