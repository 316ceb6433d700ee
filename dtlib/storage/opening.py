"""Which reader a folder of samples has."""

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
    """The reader of what ``write`` has written to ``folder``.

    ``damaged="skip"``: what cannot be read is left out, and told beside each batch; else it is an error.
    ``columns``: the names of some fields; from Parquet no others are read. ``open_delay``: seconds, INJECTED.

    Raises:
        DtlibError: for a folder without samples, with a broken index, or without a column that is asked for.
    """
    folder = Path(folder)
    index = read_index(folder)
    return READERS[index["format"]](folder, index, damaged, columns, open_delay)
