"""Types for the type checker: the interfaces that algorithms.py and waiting.py need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from dtlib.comm.numbers import Numbers

if TYPE_CHECKING:
    from mpi4py import MPI

Array = TypeVar("Array", np.ndarray, Numbers)
Combine = Callable[[Array, Array, Array], object]
Steps = Iterator[list]  # lists of requests


class Request(Protocol):
    """An MPI request, or an object of ours that stands for several requests or for a delayed one."""

    def Test(self, status: MPI.Status | None = None) -> bool: ...
    def Cancel(self) -> None: ...


class Link(Protocol[Array]):
    """Messages with one tag, between ranks that use numpy arrays or plain numbers."""

    rank: int
    size: int

    def send(self, array: Array, dest: int, /) -> object: ...
    def recv(self, array: Array, source: int, /) -> object: ...
    def scratch(self, like: Array, number: int = 0) -> Array: ...
    def nothing(self) -> Array: ...
