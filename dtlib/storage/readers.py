"""Readers: read samples by number, for each format. A reader is a torch data set: ``reader[7]``, ``reader[[7, 2, 4]]``.

Readers do not depend on ranks, epochs or the order. So any worker of any rank can read any batch, and a reader has no
state to save. ``open_samples(folder)`` (``opening.py``) returns the reader of a folder.
"""

import operator
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from dtlib.errors import DtlibError
from dtlib.storage.files import Files, StorageError
from dtlib.storage.formats import END

CURE = "copy it again, or read with damaged='skip'."
PIECE = 2**18  # bytes of a shard that are read together: one block of the shuffled order
WINDOW = 16  # blocks that the shuffled order mixes


class Samples(Dataset):
    """A data set of numbered samples. A subclass defines ``read`` and a length.

    ``samples[7]`` is a dict of tensors. ``samples[[7, 2, 4]]`` is a batch: its tensors have one more dimension in
    front. If damaged samples are skipped, batches and loops (also torch's ``DataLoader``) leave them out, but
    ``samples[7]`` raises an error.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, numbers: Sequence[int]) -> tuple[dict[str, torch.Tensor], list[StorageError]]:
        """Return a batch of these samples, and an error for each sample that is skipped."""
        raise NotImplementedError

    def __getitem__(self, numbers: int | Sequence[int]) -> dict[str, torch.Tensor]:
        if not isinstance(numbers, int) and getattr(numbers, "ndim", True):
            return self.read(numbers)[0]
        batch, skipped = self.read([numbers])  # type: ignore[list-item]  # or an array of no dimension
        if skipped:
            raise skipped[0]
        return {name: values[0] for name, values in batch.items()}

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return a list of samples, for torch's ``DataLoader``; raise an error if all are skipped, as it needs one."""
        batch, skipped = self.read(numbers)
        if len(skipped) == len(numbers) > 0:
            raise skipped[0]
        return [{name: values[at] for name, values in batch.items()} for at in range(len(numbers) - len(skipped))]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(len(self)):
            batch, skipped = self.read([number])
            if not skipped:
                yield {name: values[0] for name, values in batch.items()}

    def _number(self, number) -> int:
        """Return ``number`` as an int.

        Raises:
            IndexError: if there is no such sample. Negative numbers are not allowed.
        """
        number = operator.index(number)
        if not 0 <= number < len(self):
            raise IndexError(f"there is no sample {number}: the {len(self)} samples are numbered from 0")
        return number


class Reader(Samples):
    """The base class of readers. A subclass defines how to read one record, or a whole batch."""

    block, window = 1, 1  # describe the order in which this format is read fastest; see order.py
    _read_into: Callable  # reads one record into a buffer

    def __init__(
        self,
        folder: Path,
        index: dict,
        damaged: str = "stop",
        columns: Sequence[str] | None = None,
        open_delay: float = 0.0,
    ):
        if damaged not in ("stop", "skip"):
            raise DtlibError(f"damaged={damaged!r} is not known: 'stop' raises an error, 'skip' skips and counts.")
        self.format, self.dtype, self.damaged = index["format"], index["dtype"], damaged
        self.columns = list(columns or self.dtype.names)
        if absent := [name for name in self.columns if name not in self.dtype.names]:
            raise DtlibError(f"{folder} has no column {absent[0]!r}: it has {', '.join(self.dtype.names)}.")
        self.files = Files(folder, open_delay)
        self.names, self.counts = list(index["counts"]), list(index["counts"].values())
        self._starts = list(accumulate(self.counts, initial=0))  # per file, the number of its first sample
        self._prepare(index)

    def _prepare(self, index: dict) -> None:
        """Initialise the attributes of a subclass."""

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def sample_bytes(self) -> int:
        """The size of a sample in bytes, with the chosen columns only."""
        return sum(self.dtype[name].itemsize for name in self.columns)

    @property
    def injected(self) -> str:
        """A note for reports of measurements about an injected delay; "" if there is none."""
        delay = self.files.open_delay
        return f"INJECTED: every open waits {1e3 * delay:g} ms" if delay else ""

    def read(self, numbers: Sequence[int]) -> tuple[dict[str, torch.Tensor], list[StorageError]]:
        """Return a batch of these samples, without skipped ones, and an error for each skipped sample."""
        size, kept, skipped = self.dtype.itemsize, 0, []
        rows = torch.empty(len(numbers) * size, dtype=torch.uint8)
        memory = memoryview(rows.numpy())  # type: ignore[arg-type]  # an array is a buffer; numpy says so from Python 3.12 on
        for number in map(self._number, numbers):
            try:
                self._read_into(memory[kept * size : (kept + 1) * size], number)
                kept += 1
            except StorageError as error:
                error.sample = number
                if self.damaged == "stop":
                    raise
                skipped.append(error)
        self.files.count()
        rows = rows[: kept * size].view(kept, size)
        return {name: _field(rows, self.dtype, name) for name in self.columns}, skipped

    def place(self, number: int) -> tuple[int, int]:
        """Return the index of the file that has this sample, and the sample's position in that file."""
        file = bisect_right(self._starts, number) - 1
        return file, number - self._starts[file]

    def will_need(self, numbers: Sequence[int]) -> None:
        """Ask the system to read these samples ahead; no effect if each sample is a file."""

    def _ends_early(self, name: str, offset: int) -> StorageError:
        path, end, size = self.files.path(name), self.files.size(name), self.dtype.itemsize
        sentence = f"{path} ends at byte {end}, and a record of {size} bytes should begin at byte {offset}: {CURE}"
        return StorageError(path, offset, sentence)


class FileReader(Reader):
    """A reader of one file per sample: each sample needs an open, a read and a close."""

    def _read_into(self, memory, number: int) -> None:
        name = self.names[self.place(number)[0]]
        got, size = self.files.read_into([memory], name, 0), self.files.size(name)
        if got < len(memory):
            raise self._ends_early(name, 0)
        if size != got:
            path = self.files.path(name)
            raise StorageError(path, got, f"{path} has {size} bytes, and a record {got}, where it should end: {CURE}")


class _Pieces(Reader):
    """A reader of files with many samples, at distances of ``stride`` bytes."""

    _stride: Callable[[], int]

    def _prepare(self, index: dict) -> None:
        self.stride, self._checked = self._stride(), set[int]()
        self.block, self.window = max(1, PIECE // self.stride), WINDOW

    def will_need(self, numbers) -> None:
        """Ask the system to read ahead: one request for each run of consecutive samples in a file."""
        numbers = np.sort(numbers)
        ends = (np.diff(numbers) != 1) | np.isin(numbers[1:], self._starts)
        for run in np.split(numbers, 1 + np.flatnonzero(ends)):
            file, at = self.place(int(run[0]))
            with suppress(StorageError):  # ``read`` will raise it
                self.files.will_need(self.names[file], at * self.stride, len(run) * self.stride)


class RawReader(_Pieces):
    """A reader of consecutive raw records: the offset of a record is its position times its size."""

    def _stride(self) -> int:
        return self.dtype.itemsize

    def _read_into(self, memory, number: int) -> None:
        file, at = self.place(number)
        if file not in self._checked:
            self._check(file)
        if self.files.read_into([memory], self.names[file], at * self.stride) < self.stride:
            raise self._ends_early(self.names[file], at * self.stride)

    def _check(self, file: int) -> None:
        """Raise an error if a record may have the wrong length: then all later records are at wrong offsets.

        A truncated file is accepted here, because records before its end can still be read.
        """
        name, count = self.names[file], self.counts[file]
        size, wanted = self.files.size(name), count * self.stride + len(END)
        if size == wanted:
            self._checked.add(file)
            return
        end = bytearray(len(END))
        self.files.read_into([memoryview(end)], name, max(0, size - len(END)))
        if size > wanted or end == END:
            path = self.files.path(name)
            raise StorageError(
                path, min(size, wanted),
                f"{path} has {size} bytes, but {count} records of {self.stride} need {wanted}: one has another "
                f"length, so none of its samples are reliable; {CURE}",
            )  # fmt: skip


class TarReader(_Pieces):
    """A reader of tar files: before each record there is a header of 512 bytes with its name and length."""

    def _stride(self) -> int:
        return 512 + -(-self.dtype.itemsize // 512) * 512

    def _read_into(self, memory, number: int) -> None:
        file, at = self.place(number)
        name, offset, header = self.names[file], at * self.stride, bytearray(512)
        if self.files.read_into([memoryview(header), memory], name, offset) < 512 + len(memory):
            raise self._ends_early(name, offset)
        known = header[124:135] == b"%011o" % len(memory) and header.startswith(b"%07d.bin\0" % number)
        if not (known and self._is_followed(file, at, number)):
            path = self.files.path(name)
            raise StorageError(
                path, offset,
                f"{path} has no record {number:07} of {len(memory)} bytes at byte {offset}: this or an earlier record "
                f"has another length; {CURE}",
            )  # fmt: skip

    def _is_followed(self, file: int, at: int, number: int) -> bool:
        """Return whether the data after a record is at its place, which shows that the record has the right length.

        If the file's size is right, there is nothing to check. Otherwise the next bytes must be the next record's name,
        or zeros at the end of the archive, or missing, in a truncated file.
        """
        name, count = self.names[file], self.counts[file]
        blocks = -(-(count * self.stride + 2 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE)
        if self.files.size(name) == blocks * tarfile.RECORDSIZE:
            return True
        after = b"%07d.bin\0" % (number + 1) if at + 1 < count else bytes(12)
        read = bytearray(len(after))
        got = self.files.read_into([memoryview(read)], name, (at + 1) * self.stride)
        return after.startswith(read[:got])


def _field(rows: torch.Tensor, dtype: np.dtype, name: str) -> torch.Tensor:
    """Return one field of all records in ``rows``, which are bytes; a view if the field is aligned, else a copy."""
    assert dtype.fields is not None
    kind, offset = dtype.fields[name][:2]
    base, shape = kind.subdtype or (kind, ())
    bytes_of_field = rows[:, offset : offset + kind.itemsize]
    if offset % base.itemsize or dtype.itemsize % base.itemsize:
        # Not contiguous(): it does not copy a single row, whatever its stride.
        bytes_of_field = bytes_of_field.clone(memory_format=torch.contiguous_format)
    values = bytes_of_field.view(torch.from_numpy(np.empty(0, base)).dtype)
    return values.view(len(rows), *shape)
