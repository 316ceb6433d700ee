"""One use of a verb: what was called, with what, and in which line of whose code."""

import linecache
import os
import sys
from pathlib import Path

from dtlib.comm.types import type_name

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
_LONGEST_LINE = 80
_lines = {}  # the text of each line that has called a verb


class Call:
    """``str(call)`` is ``all_reduce(sum) of (4,) float32``, the same on all ranks if they agree.

    ``rank`` is the caller's, and ``peers`` are the ranks without which the verb cannot end, as the world counts them;
    ``number`` counts the collectives of a communicator (``group`` is its name); ``where`` is the caller's line, if
    somebody wants to know it.
    """

    __slots__ = ("detail", "group", "number", "peers", "rank", "tensor", "verb", "watched", "where")

    def __init__(self, verb: str, detail: str, tensor, rank: int, peers=(), group: str = "", number: int = 0):
        self.verb, self.detail, self.tensor = verb, detail, tensor
        self.rank, self.peers, self.group, self.number = rank, peers, group, number
        self.where = ""
        self.watched = False  # whether it shows on the board

    def __str__(self):
        verb = f"{self.verb}({self.detail})" if self.detail else self.verb
        return verb if self.tensor is None else f"{verb} of {shape_and_type(self.tensor)}"


def shape_and_type(tensor) -> str:
    return f"{tuple(tensor.shape)} {type_name(tensor)}"


def callers_line() -> str:
    """The innermost line outside dtlib that led here: ``train.py:12: comm.barrier()``, ``line 3: x()`` in a cell."""
    frame = innermost = sys._getframe(1)
    while frame is not None and _is_not_the_callers(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    key = frame.f_code.co_filename, frame.f_lineno
    text = _lines.get(key)
    if text is None:
        text = _lines[key] = _line(*key)
    return text


def _is_not_the_callers(file: str) -> bool:
    """dtlib's own files, and what calls it in between: torch's hooks and modules, and context managers."""
    return file.startswith(_PACKAGE) or _TORCH in file or file.endswith(("contextlib.py", "typing_extensions.py"))


def _line(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()[:_LONGEST_LINE]
    place = f"line {number}" if "ipykernel_" in file or file.startswith("<") else f"{Path(file).name}:{number}"
    return f"{place}: {text}" if text else place
