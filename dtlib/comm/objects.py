"""Argument checks and object collectives (pickled), for communicators of all kinds.

The page in the browser has no numpy, and uses the checks.
"""

import pickle
from collections.abc import Callable, Sequence
from math import prod
from operator import index
from typing import NoReturn, TypeVar

from dtlib.comm.call import dtype_name, shape_and_type
from dtlib.errors import CommunicationError

V = TypeVar("V")


class ArgumentChecks:
    """A base class for communicators of all kinds, also the page's; each check raises CommunicationError."""

    rank: int
    size: int

    def _check_whole(self, whole, count, chunk, chunk_count, operation):
        if dtype_name(whole.dtype) != dtype_name(chunk.dtype) or count != self.size * chunk_count:
            raise CommunicationError(
                f"{operation} on {self.size} ranks needs two tensors of one dtype, one with {self.size} times as many "
                f"elements as the other: they are {shape_and_type(whole)} and {shape_and_type(chunk)}."
            )

    def _pieces(self, out, tensor, received, sent) -> tuple[list[int], list[int], bool]:
        """Return elements to receive from each rank, elements to send to each rank, and whether split sizes were given.

        ``received`` and ``sent`` are output_split_sizes and input_split_sizes: rows per rank, or None for equal chunks.
        """
        if dtype_name(out.dtype) != dtype_name(tensor.dtype):
            raise CommunicationError(
                f"all_to_all needs equal dtypes: out is {shape_and_type(out)}, tensor is {shape_and_type(tensor)}."
            )
        if received is None and sent is None:
            count = prod(tensor.shape)
            if prod(out.shape) != count or count % self.size:
                raise CommunicationError(
                    f"all_to_all on {self.size} ranks needs equal sizes of out and tensor, in {self.size} equal "
                    f"chunks, or split sizes: out is {shape_and_type(out)}, tensor is {shape_and_type(tensor)}."
                )
            return [count // self.size] * self.size, [count // self.size] * self.size, False
        if not len(out.shape) or tuple(out.shape[1:]) != tuple(tensor.shape[1:]):
            raise CommunicationError(
                "all_to_all with split sizes needs rows of the same shape in out and tensor: out is "
                f"{shape_and_type(out)}, tensor is {shape_and_type(tensor)}."
            )
        row, sizes = prod(tensor.shape[1:]), []
        for name, rows, counts in (("output", len(out), received), ("input", len(tensor), sent)):
            counts = [rows // self.size] * self.size if counts is None else [index(count) for count in counts]
            if len(counts) != self.size or sum(counts) != rows or min(counts) < 0:
                raise CommunicationError(
                    f"all_to_all: {name}_split_sizes={counts} must be {self.size} numbers from 0 on with the sum "
                    f"{rows}, the rows of {'out' if name == 'output' else 'tensor'}; without lists, pieces are equal."
                )
            sizes.append([row * count for count in counts])
        if sizes[0][self.rank] != sizes[1][self.rank]:
            raise CommunicationError(
                f"all_to_all: on rank {self.rank}, input_split_sizes[{self.rank}] and output_split_sizes[{self.rank}] "
                "differ: both are the rows for the rank itself, so pass the same number."
            )
        return sizes[0], sizes[1], True

    def _check_rank(self, rank, operation, name):
        if not (isinstance(rank, int) or hasattr(rank, "__index__")) or not 0 <= rank < self.size:
            raise CommunicationError(
                f"{operation}({name}={rank!r}): the ranks of this communicator are 0 to {self.size - 1}."
            )


class ObjectOperations(ArgumentChecks):
    """A base class for communicators with ``all_gather`` and ``broadcast``."""

    name: str
    time_limit: float | None
    members: Sequence[int]  # world ranks
    all_gather: Callable
    broadcast: Callable

    def all_gather_object(self, obj: V) -> list[V]:
        """Return a list of every rank's ``obj`` (any object that pickles), in rank order, on every rank."""
        import numpy as np

        mine = np.frombuffer(_pickled(obj), dtype=np.uint8)
        sizes = self.all_gather(np.zeros(self.size, dtype=np.int64), np.array([mine.size]))
        # Pad every chunk to the longest, so that a single all_gather of equal chunks is enough.
        padded = np.zeros(sizes.max(), dtype=np.uint8)
        padded[: mine.size] = mine
        chunks = self.all_gather(np.zeros((self.size, padded.size), dtype=np.uint8), padded)
        return [_unpickled(chunk[:size], rank) for rank, (chunk, size) in enumerate(zip(chunks, sizes, strict=True))]

    def broadcast_object(self, obj: V | None, root: int = 0) -> V:
        """Return the ``obj`` of rank ``root`` (any object that pickles), on every rank."""
        import numpy as np

        self._check_rank(root, "broadcast_object", "root")
        mine = np.frombuffer(_pickled(obj) if self.rank == root else b"", dtype=np.uint8)
        size = self.broadcast(np.array([mine.size]), root)
        data = mine.copy() if self.rank == root else np.zeros(size[0], dtype=np.uint8)
        return _unpickled(self.broadcast(data, root), root)

    def __reduce__(self) -> NoReturn:
        raise CommunicationError(
            "A communicator cannot be copied or pickled, because all ranks would have to do it together: copy the "
            "wrapped module, or save a state_dict()."
        )


class _Unpicklable(str):
    """Why a rank's object could not be pickled; it is sent in place of the object, so that no rank waits for ever."""


def _pickled(obj) -> bytes:
    try:
        return pickle.dumps(obj)
    except Exception as error:
        return pickle.dumps(_Unpicklable(f"{obj!r:.60} does not pickle ({error})"))


def _unpickled(data, rank: int):
    obj = pickle.loads(data)
    if isinstance(obj, _Unpicklable):
        raise CommunicationError(f"Rank {rank}'s {obj}: send plain data, tensors, or functions of a module.")
    return obj
