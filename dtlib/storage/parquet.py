"""A reader of Parquet files. A row group stores the values of each column together, so other columns are not read."""

import io
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from dtlib.storage.files import StorageError
from dtlib.storage.readers import CURE, Reader

CACHED_ROW_GROUPS = 4  # row groups that stay in memory, and that the shuffled order mixes


class ColumnReader(Reader):
    """A reader of whole row groups, the smallest unit of a read; ``CACHED_ROW_GROUPS`` stay in memory.

    If several ranks or workers need samples of one row group, each one reads it. The counters include these reads.
    """

    def _prepare(self, index: dict) -> None:
        self.block, self.window = index["row_group"], CACHED_ROW_GROUPS
        self._groups: OrderedDict = OrderedDict()  # (file, row group) -> its columns, as arrays
        self._tables: dict = {}  # file -> its open pyarrow ParquetFile

    def read(self, numbers: Sequence[int]) -> tuple[dict[str, torch.Tensor], list[StorageError]]:
        """Return a batch of these samples, and an error for each sample that is skipped."""
        places, skipped = [], []
        for number in map(self._number, numbers):
            file, at = self.place(number)
            try:
                self._group(file, at // self.block)
                places.append((file, at // self.block, at % self.block))
            except StorageError as error:
                error.sample = number
                if self.damaged == "stop":
                    raise
                skipped.append(error)
        self.files.count()
        places = np.array(places, dtype=np.int64).reshape(-1, 3)
        batch = {}
        for name in self.columns:
            base, shape = self.dtype[name].subdtype or (self.dtype[name], ())
            batch[name] = np.empty((len(places), *shape), base)
        for file, group in {(file, group) for file, group, _ in places.tolist()}:
            of_it = (places[:, 0] == file) & (places[:, 1] == group)
            for name, values in self._group(file, group).items():
                batch[name][of_it] = values[places[of_it, 2]]
        # Drop row groups only now, because one batch may need more than ``CACHED_ROW_GROUPS`` row groups.
        while len(self._groups) > CACHED_ROW_GROUPS:
            self._groups.popitem(last=False)
        return {name: torch.from_numpy(values) for name, values in batch.items()}, skipped

    def will_need(self, numbers: Sequence[int]) -> None:
        """Ask the system to read ahead the columns of the row groups of these samples."""
        for first in np.unique(np.asarray(numbers) // self.block) * self.block:
            file, at = self.place(int(first))
            with suppress(StorageError):  # ``read`` will raise it
                group = self._table(file).metadata.row_group(at // self.block)
                for column in map(group.column, range(group.num_columns)):
                    if column.path_in_schema in self.columns:
                        begin = column.dictionary_page_offset or column.data_page_offset
                        self.files.will_need(self.names[file], begin, column.total_compressed_size)

    def _group(self, file: int, group: int) -> dict[str, np.ndarray]:
        if (file, group) not in self._groups:
            name = self.names[file]
            table = self._table(file)
            try:
                columns = table.read_row_group(group, self.columns, use_threads=False)
            except Exception as problem:  # pyarrow's decoders raise errors of many types
                offset = table.metadata.row_group(group).column(0).data_page_offset
                raise self._damaged(name, offset, problem) from None
            if empty := [name for name in self.columns if columns[name].null_count]:
                offset = table.metadata.row_group(group).column(0).data_page_offset
                raise self._damaged(name, offset, f"column {empty[0]!r} has rows without a value")
            self._groups[file, group] = {column: self._values(columns[column], column) for column in self.columns}
        self._groups.move_to_end((file, group))
        return self._groups[file, group]

    def _values(self, column, name: str) -> np.ndarray:
        base, shape = self.dtype[name].subdtype or (self.dtype[name], ())
        chunk = column.combine_chunks()
        if not shape:
            return chunk.to_numpy(zero_copy_only=False)
        width = self.dtype[name].itemsize
        memory = memoryview(chunk.buffers()[1])[chunk.offset * width : (chunk.offset + len(chunk)) * width]
        return np.frombuffer(memory, base).reshape(len(chunk), *shape)

    def _table(self, file: int):
        """Return the open Parquet file; read its footer and compare it with the index on first use."""
        if file not in self._tables:
            import pyarrow as pa
            from pyarrow import parquet

            name = self.names[file]
            source = pa.PythonFile(_Counted(self.files, name), mode="r")
            try:
                table = parquet.ParquetFile(source, pre_buffer=False)
            except Exception as problem:
                raise self._damaged(name, self.files.size(name), problem) from None
            self._compare(name, table)
            self._tables[file] = table
        return self._tables[file]

    def _compare(self, name: str, table) -> None:
        """Raise an error unless rows, row groups, columns and file size match the index."""
        import pyarrow as pa

        rows, schema = table.metadata.num_rows, table.schema_arrow
        wanted = self.counts[self.names.index(name)]
        if rows != wanted:
            raise self._damaged(name, 0, f"{rows} rows instead of {wanted}")
        groups = [table.metadata.row_group(at).num_rows for at in range(table.num_row_groups)]
        if groups != [min(self.block, rows - first) for first in range(0, rows, self.block)]:
            raise self._damaged(name, 0, f"row groups of up to {max(groups)} rows instead of {self.block}")
        # If bytes were inserted into or removed from a column, its values would be read from wrong offsets.
        chunks = [table.metadata.row_group(at).column(c) for at in range(len(groups)) for c in range(len(schema))]
        pages = max(
            ((c.dictionary_page_offset or c.data_page_offset) + c.total_compressed_size for c in chunks), default=4
        )
        if (size := self.files.size(name)) != (wanted := pages + table.metadata.serialized_size + 8):
            raise self._damaged(name, size, f"{size} bytes instead of {wanted}")
        for column in self.columns:
            kind = self.dtype[column]
            wanted = pa.binary(kind.itemsize) if kind.subdtype else pa.from_numpy_dtype(kind)
            if column not in schema.names:
                raise self._damaged(
                    name, self.files.size(name), f"no column {column!r}, only {', '.join(schema.names)}"
                )
            if schema.field(column).type != wanted:
                got = schema.field(column).type
                raise self._damaged(name, self.files.size(name), f"column {column!r} as {got} instead of {wanted}")

    def _damaged(self, name: str, offset: int, problem) -> StorageError:
        path = self.files.path(name)
        what = str(problem).splitlines()[0].rstrip(". ")
        return StorageError(path, offset, f"{path} cannot be read as Parquet at byte {offset} ({what}): {CURE}")

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_groups": OrderedDict(), "_tables": {}}


class _Counted(io.RawIOBase):
    """A file object for pyarrow that reads through ``Files``, so that reads are counted."""

    def __init__(self, files, name: str):
        self._files, self._name, self._at = files, name, 0

    def read(self, size: int = -1) -> bytes:
        size = self._files.size(self._name) - self._at if size < 0 else size
        memory = bytearray(size)
        got = self._files.read_into([memoryview(memory)], self._name, self._at) if size else 0
        self._at += got
        return memory if got == size else memory[:got]  # type: ignore[return-value]  # bytes would need another copy

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._files.size(self._name)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True
