"""What algorithms.py asks of a link and of an array, for a type checker."""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from dtlib.comm.numbers import Numbers

N = TypeVar("N", np.ndarray, Numbers)
Combine = Callable[[N, N, N], object]
Steps = Iterator[list]  # of requests


class AnyLink(Protocol[N]):
    """Messages under one tag between ranks that have numpy's arrays, or plain numbers."""

    rank: int
    size: int

    def send(self, array: N, dest: int, /) -> object: ...
    def recv(self, array: N, source: int, /) -> object: ...
    def scratch(self, like: N, number: int = 0) -> N: ...
    def nothing(self) -> N: ...
