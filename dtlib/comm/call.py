"""One use of an operation: what was called, with what, and in which line of whose code."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch


AnyTensor: TypeAlias = "torch.Tensor | np.ndarray"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
_LONGEST_LINE = 80
_lines: dict[tuple[str, int], str] = {}  # the text of each line that has called an operation


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """``str(call)`` is ``all_reduce(sum) of (4,) float32``, the same on all ranks if they agree.

    ``op``, ``peer``, ``algorithm`` and ``tag`` are as in an event (recorder.py). ``rank`` is the caller's, and
    ``peers`` are the ranks without which the operation cannot end, as the world counts them; ``number`` counts the
    collectives of a communicator (``group`` is its name); ``where`` is the caller's line, if somebody wants to know it.
    ``counts`` are elements, of shape (2, ranks): an all_to_all with counts sends and expects so many.
    """

    operation: str
    tensor: Any  # AnyTensor, or None for a barrier
    rank: int
    peers: Sequence[int] = ()
    group: str = ""
    number: int = 0
    _: KW_ONLY
    op: str = ""
    peer: int | None = None
    algorithm: str = ""
    tag: int | None = None
    counts: Any = None
    where: str = ""
    watched: bool = False  # whether it shows on the board from its start
    hidden: bool = False  # whether it never shows there

    def __str__(self) -> str:
        short = in_short(self.operation, self.op, self.peer, self.algorithm)
        if self.counts is not None:
            row = _shape_and_type(self.tensor.shape[1:], dtype_name(self.tensor.dtype))
            return f"{short} with counts of rows of {row}"
        return short if self.tensor is None else f"{short} of {shape_and_type(self.tensor)}"


@lru_cache(maxsize=1024)
def in_short(operation: str, op: str, peer: int | None, algorithm: str) -> str:
    """A use of an operation for people, without the tensor: ``all_reduce(sum, ring)``, ``reduce(sum to rank 0)``."""
    whom = "" if peer is None else f"{'to' if operation in ('send', 'reduce', 'gather') else 'from'} rank {peer}"
    arguments = ", ".join(filter(None, (f"{op} {whom}".strip(), algorithm)))
    return f"{operation}({arguments})" if arguments else operation


@cache
def dtype_name(dtype: object) -> str:
    """``float32`` for torch's and for numpy's."""
    return str(dtype).removeprefix("torch.")


class Shaped(Protocol):
    """A tensor of torch, numpy or the page's stand-in for torch."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...


def shape_and_type(tensor: Shaped) -> str:
    return _shape_and_type(tensor.shape, dtype_name(tensor.dtype))


@lru_cache(maxsize=1024)
def _shape_and_type(shape, name: str) -> str:
    return f"{tuple(shape)} {name}"


def callers_line() -> str:
    """The innermost line outside dtlib that led here: ``train.py:12: comm.barrier()``, ``line 3: x()`` in a cell."""
    return line_outside(sys._getframe(1))


def line_outside(innermost: FrameType) -> str:
    """The same for whoever is in this frame."""
    frame: FrameType | None = innermost
    while frame is not None and _is_not_the_callers(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    key = frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno  # another thread may not know it
    text = _lines.get(key)
    if text is None:
        text = _lines[key] = line_of(*key)
    return text


@cache
def _is_not_the_callers(file: str) -> bool:
    """dtlib's own files, and what calls it in between: torch's hooks and modules, and context managers."""
    return file.startswith(_PACKAGE) or _TORCH in file or file.endswith(("contextlib.py", "typing_extensions.py"))


def line_of(file: str, number: int) -> str:
    """``train.py:12: comm.barrier()``, or ``line 3: x()`` of a cell."""
    text = linecache.getline(file, number).strip()[:_LONGEST_LINE]
    place = f"line {number}" if "ipykernel_" in file or file.startswith("<") else f"{Path(file).name}:{number}"
    return f"{place}: {text}" if text else place
