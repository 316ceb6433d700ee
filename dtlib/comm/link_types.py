"""What algorithms.py asks of a link and of an array, and who waits of a request, for a type checker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from dtlib.comm.numbers import Numbers

if TYPE_CHECKING:
    from mpi4py import MPI

Array = TypeVar("Array", np.ndarray, Numbers)
Combine = Callable[[Array, Array, Array], object]
Steps = Iterator[list]  # of requests


class Request(Protocol):
    """MPI's, or one of ours that stands for several or for one that has not left yet."""

    def Test(self, status: MPI.Status | None = None) -> bool: ...
    def Cancel(self) -> None: ...


class Link(Protocol[Array]):
    """Messages under one tag between ranks that have numpy's arrays, or plain numbers."""

    rank: int
    size: int

    def send(self, array: Array, dest: int, /) -> object: ...
    def recv(self, array: Array, source: int, /) -> object: ...
    def scratch(self, like: Array, number: int = 0) -> Array: ...
    def nothing(self) -> Array: ...
