"""A flat array of numbers in plain Python, with the part of numpy's interface that algorithms.py needs."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Iterator
from types import EllipsisType, SimpleNamespace
from typing import overload

CODES = {"float32": "f", "float64": "d", "int32": "i", "int64": "q"}  # type codes of Python's array module


class Numbers:
    """A flat array: ``numbers[2:5]`` is a view, and ``numbers[...] = others`` writes in place, rounded to the dtype."""

    __slots__ = ("dtype", "view")

    def __init__(self, values: Iterable[float] | memoryview, dtype: str = "float32"):
        self.dtype = dtype
        self.view = values if isinstance(values, memoryview) else memoryview(_stored(values, dtype))

    size = property(lambda self: len(self.view))
    nbytes = property(lambda self: self.view.nbytes)
    ctypes = property(lambda self: SimpleNamespace(data=_address(self.view)))

    def __len__(self) -> int:
        return len(self.view)

    def __iter__(self) -> Iterator[float]:
        return iter(self.view)

    @overload
    def __getitem__(self, at: int) -> float: ...
    @overload
    def __getitem__(self, at: slice) -> Numbers: ...

    def __getitem__(self, at: int | slice) -> float | Numbers:
        return Numbers(self.view[at], self.dtype) if isinstance(at, slice) else self.view[at]

    def __setitem__(self, at: int | slice | EllipsisType, values: Iterable[float] | float) -> None:
        place = slice(None) if at is Ellipsis else at if isinstance(at, slice) else slice(at, at + 1 or None)
        count = len(self.view[place])
        values = list(values) if hasattr(values, "__iter__") else [values] * count
        if len(values) != count:
            raise ValueError(f"{len(values)} numbers do not fit into memory for {count}.")
        self.view[place] = _stored(values, self.dtype)

    def __repr__(self) -> str:
        return f"Numbers({list(self)}, {self.dtype!r})"

    def copy(self) -> Numbers:
        """Return a copy with its own memory."""
        return Numbers(memoryview(array(CODES[self.dtype], self.view)), self.dtype)


COMBINE: dict[str, Callable] = {"sum": operator.add, "mean": operator.add, "prod": operator.mul, "max": max, "min": min}


def combiner(op: str) -> Callable[[Numbers, Numbers, Numbers], None]:
    """Return ``combine(a, b, out)`` for ``Numbers``, element by element; ``op`` is a key of ``COMBINE``."""
    combine = COMBINE[op]

    def combined(a, b, out):
        out.view[:] = _stored(map(combine, a.view, b.view), out.dtype)

    return combined


def _stored(values, dtype: str) -> array:
    if dtype.startswith("float"):
        return array(CODES[dtype], values)
    bits = 8 * array(CODES[dtype]).itemsize
    half, whole = 1 << bits - 1, 1 << bits
    # Integers wrap around on overflow, as in torch.
    return array(CODES[dtype], [(int(value) + half) % whole - half for value in values])


def _address(view: memoryview) -> int:
    """Return the address of the first number, or 0 for an empty array."""
    from ctypes import addressof, c_char

    return addressof(c_char.from_buffer(view.cast("B"))) if view.nbytes else 0
