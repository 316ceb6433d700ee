"""Checks of arguments that communicators of all kinds make, also those of the page in the browser (pure Python)."""

from math import prod
from operator import index

from dtlib.comm.call import dtype_name, shape_and_type
from dtlib.errors import CommunicationError


class ArgumentChecks:
    """A base class for communicators; each check raises CommunicationError."""

    rank: int
    size: int

    def _check_whole(self, whole, count, chunk, chunk_count, operation):
        if dtype_name(whole.dtype) != dtype_name(chunk.dtype) or count != self.size * chunk_count:
            raise CommunicationError(
                f"{operation} on {self.size} ranks needs one tensor of {self.size} times the elements of the other and "
                f"of its dtype: they are {shape_and_type(whole)} and {shape_and_type(chunk)}."
            )

    def _pieces(self, out, tensor, received, sent) -> tuple[list[int], list[int], bool]:
        """Return elements to receive from each rank, elements to send to each rank, and whether split sizes were given.

        ``received`` and ``sent`` are output_split_sizes and input_split_sizes: rows per rank, or None for equal chunks.
        """
        if dtype_name(out.dtype) != dtype_name(tensor.dtype):
            raise CommunicationError(
                f"all_to_all needs an out of tensor's dtype: out is {shape_and_type(out)}, tensor is "
                f"{shape_and_type(tensor)}."
            )
        if received is None and sent is None:
            count = prod(tensor.shape)
            if prod(out.shape) != count or count % self.size:
                raise CommunicationError(
                    f"all_to_all on {self.size} ranks needs an out of the shape of tensor, in {self.size} equal "
                    f"chunks, or counts: out is {shape_and_type(out)}, tensor is {shape_and_type(tensor)}."
                )
            return [count // self.size] * self.size, [count // self.size] * self.size, False
        if not len(out.shape) or tuple(out.shape[1:]) != tuple(tensor.shape[1:]):
            raise CommunicationError(
                "all_to_all with counts moves rows, which must have the same shape in out and tensor: out is "
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
