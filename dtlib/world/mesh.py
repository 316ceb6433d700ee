"""``Mesh``: ranks on a grid with named axes, and a communicator along each axis."""

from __future__ import annotations

import math

from dtlib.comm import Communicator
from dtlib.errors import DtlibError


class Mesh:
    """All ranks of ``comm`` on a grid; every rank creates it, with the same axes.

    Args:
        comm: a communicator with ``split``.
        axes: the number of ranks along each axis; one number may be -1, to be computed from the others.

    The last axis varies fastest. Neighbours on it are adjacent ranks, which mostly share a machine:

        data=2, tensor=3        tensor   0  1  2
                          data=0         0  1  2       rank 4 is data=1, tensor=1;
                          data=1         3  4  5       mesh["data"] there joins 1 and 4, mesh["tensor"] 3, 4 and 5

    ``shape`` and ``coordinates`` (of this rank) are dictionaries by axis. ``mesh["data"]`` is the communicator of the
    ranks that differ in this axis only, in the order of their coordinate. ``mesh["data", "tensor"]`` joins the ranks
    that differ in both axes, in rank order; all ranks ask for it together. After ``dtlib.reset()`` create a new mesh.
    Counterpart: ``torch.distributed.device_mesh.init_device_mesh``.

    Raises:
        DtlibError: on every rank, if the product of the axes is not the number of ranks (before anything is sent), or
            if ranks pass different axes.
    """

    def __init__(self, comm: Communicator, axes: dict[str, int]):
        self.shape = shape_of(axes, comm.size)
        asked = comm.all_gather_object(list(self.shape.items()))
        for rank, others in enumerate(asked):
            if others != asked[0]:
                raise DtlibError(
                    f"Rank 0 creates a mesh of {dict(asked[0])} and rank {rank} one of {dict(others)}: pass the same "
                    "axes in the same order on all ranks."
                )
        self.coordinates = coordinates_of(comm.rank, self.shape)
        self._comm = comm
        self._communicators: dict = {}
        # A split needs all ranks, so create the communicators of single axes now: later, one rank may ask alone.
        for axis in self.shape:
            self[axis]

    def __getitem__(self, axis: str | tuple[str, ...]) -> Communicator:
        axes = (axis,) if isinstance(axis, str) else axis
        if unknown := [axis for axis in axes if axis not in self.shape]:
            raise DtlibError(f"This mesh has no axis {unknown[0]!r}: choose one of {', '.join(self.shape)}.")
        if axes not in self._communicators:
            # The first rank on a line of the grid is the color of this line's communicator.
            line = rank_of({**self.coordinates, **dict.fromkeys(axes, 0)}, self.shape)
            self._communicators[axes] = self._comm.split(line, key=self._comm.rank)
        return self._communicators[axes]

    def __repr__(self) -> str:
        shape = ", ".join(f"{axis}={size}" for axis, size in self.shape.items())
        here = ", ".join(f"{axis}={place}" for axis, place in self.coordinates.items())
        return f"Mesh({shape}; this rank is {here})"


def shape_of(axes: dict[str, int], ranks: int) -> dict[str, int]:
    """Return the axes with -1 replaced; raise DtlibError if they do not match the number of ranks."""
    asked = f"mesh({', '.join(f'{axis}={size!r}' for axis, size in axes.items())})"
    if not axes:
        raise DtlibError(f"mesh() has no axes: pass them with their sizes, as in mesh(data={ranks}).")
    for axis, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise DtlibError(f"{asked}: {axis} must be a whole number from 1 on, or -1 for the remaining ranks.")
    if list(axes.values()).count(-1) > 1:
        raise DtlibError(f"{asked}: only one axis can be -1, because the rest cannot be divided between two.")
    known = math.prod(size for size in axes.values() if size != -1)
    left, rest = divmod(ranks, known)
    if rest or not left or (left > 1 and -1 not in axes.values()):
        raise DtlibError(
            f"{asked} does not fit {ranks} ranks, because its numbers give {known}: choose axes whose product is "
            f"{ranks}, or divides it beside an axis of -1."
        )
    return {axis: left if size == -1 else size for axis, size in axes.items()}


def coordinates_of(rank: int, shape: dict[str, int]) -> dict[str, int]:
    """Return the coordinates of a rank on the grid; the last axis varies fastest."""
    places = {}
    for axis, size in reversed(shape.items()):
        rank, places[axis] = divmod(rank, size)
    return {axis: places[axis] for axis in shape}


def rank_of(coordinates: dict[str, int], shape: dict[str, int]) -> int:
    """Return the rank at these coordinates: the inverse of ``coordinates_of``."""
    rank = 0
    for axis, size in shape.items():
        rank = rank * size + coordinates[axis]
    return rank
