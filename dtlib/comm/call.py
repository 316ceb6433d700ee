"""``Call``: one call of an operation, with its arguments and the line of the program that made it."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch


AnyTensor: TypeAlias = "torch.Tensor | np.ndarray"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
_LONGEST_LINE = 80


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One call of an operation; ``str(call)`` is ``all_reduce(sum) of (4,) float32``, equal on all ranks if they agree.

    ``op``, ``peer``, ``algorithm`` and ``tag`` are as in ``Event`` (recorder.py). ``rank`` is the caller's world rank;
    ``peers`` are the world ranks that must take part before the operation can complete. ``group`` is the communicator's
    name. ``number`` counts its collectives; of a message it is 0, and ``called`` are the collectives called before.
    ``where`` is the caller's line; it is filled in only when needed.
    ``counts`` has shape (2, ranks) and is set for an all_to_all with split sizes: elements sent to, and received from,
    each rank. ``shape`` and ``dtype`` are those of the tensor; None for a barrier.
    """

    operation: str
    shape: Any
    dtype: Any
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
    called: int = 0
    hidden: bool = False  # never shown on the board

    def __str__(self) -> str:
        short = in_short(self.operation, self.op, self.peer, self.algorithm)
        if self.counts is not None:
            return f"{short} with counts of rows of {_shape_and_type(self.shape[1:], dtype_name(self.dtype))}"
        return short if self.shape is None else f"{short} of {shape_and_type(self)}"


@lru_cache(maxsize=1024)
def in_short(operation: str, op: str, peer: int | None, algorithm: str) -> str:
    """Return a readable form without the tensor: ``all_reduce(sum, ring)``, ``reduce(sum to rank 0)``."""
    whom = "" if peer is None else f"{'to' if operation in ('send', 'reduce', 'gather') else 'from'} rank {peer}"
    arguments = ", ".join(filter(None, (f"{op} {whom}".strip(), algorithm)))
    return f"{operation}({arguments})" if arguments else operation


@cache
def dtype_name(dtype: object) -> str:
    """Return ``float32`` for torch's and for numpy's float32."""
    return str(dtype).removeprefix("torch.")


def shape_and_type(tensor: AnyTensor | Call) -> str:
    """Return the shape and dtype as text: ``(4,) float32``."""
    return _shape_and_type(tensor.shape, dtype_name(tensor.dtype))


@lru_cache(maxsize=1024)
def _shape_and_type(shape, name: str) -> str:
    return f"{tuple(shape)} {name}"


def callers_line() -> str:
    """Return the innermost line outside dtlib on the call stack: ``train.py:12: comm.barrier()``."""
    return line_outside(sys._getframe(1))


def line_outside(innermost: FrameType) -> str:
    """Return the innermost line outside dtlib, searching outward from the frame ``innermost``."""
    frame: FrameType | None = innermost
    while frame is not None and _is_not_the_callers(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    # `f_lineno` can be None when another thread reads the frame.
    return line_of(frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno)


@cache
def _is_not_the_callers(file: str) -> bool:
    """Return True for files of dtlib, and for torch and context managers between dtlib and the program."""
    return file.startswith(_PACKAGE) or _TORCH in file or file.endswith(("contextlib.py", "typing_extensions.py"))


@cache
def line_of(file: str, number: int) -> str:
    """Return ``train.py:12: comm.barrier()`` for a file, or ``line 3: x()`` for a notebook cell."""
    text = linecache.getline(file, number).strip()[:_LONGEST_LINE]
    place = f"line {number}" if "ipykernel_" in file or file.startswith("<") else f"{Path(file).name}:{number}"
    return f"{place}: {text}" if text else place
