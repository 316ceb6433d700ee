"""``open_samples``: open a folder of samples with the reader of its format."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from dtlib.storage.formats import read_index
from dtlib.storage.parquet import ColumnReader
from dtlib.storage.readers import FileReader, RawReader, Reader, TarReader

READERS = {
    "files": FileReader, "one-file": RawReader, "shards": RawReader, "tar": TarReader, "parquet": ColumnReader,
}  # fmt: skip


def open_samples(
    folder: str | PathLike[str], damaged: str = "stop", columns: Sequence[str] | None = None, open_delay: float = 0.0
) -> Reader:
    """Return a reader of the samples that ``write`` has written to ``folder``.

    Args:
        folder: has the samples and their index.
        damaged: ``"stop"`` raises an error if a sample cannot be read. ``"skip"`` leaves such samples out, and returns
            their errors with each batch.
        columns: names of fields to return; by default all. With Parquet, other columns are not read from disk.
        open_delay: seconds that each open of a file waits (INJECTED).

    Raises:
        DtlibError: if the folder has no samples, a damaged index, or no such column.
    """
    folder = Path(folder)
    index = read_index(folder)
    return READERS[index["format"]](folder, index, damaged, columns, open_delay)
