"""Five file formats for samples. A sample is a record: a numpy structured dtype, so all samples have the same length.

    files      one file per sample         sample-0000007.bin
    one-file   all samples in one file     samples.bin             consecutive raw records
    shards     many samples per file       shard-00003.bin         consecutive raw records
    tar        many samples per tar file   shard-00003.tar         one member per sample; webdataset can read it
    parquet    many samples per file       shard-00003.parquet     row groups; each stores a column's values together

``index.json`` in the same folder has the format, the dtype, and the number of samples in each file. After the last
record of a raw file there is the marker ``END``. A truncated file has no marker. So a reader can distinguish a
truncated file from a file in which a record has the wrong length.
"""

import io
import json
import math
import tarfile
from collections.abc import Iterable
from itertools import islice
from os import PathLike
from pathlib import Path

import numpy as np
import torch

from dtlib.errors import MOST, DtlibError, number
from dtlib.files import is_plain_name, locked, read_json, write_atomically, writing

FORMATS = ("files", "one-file", "shards", "tar", "parquet")
END = b"\ndtlib.\n"  # 8 bytes
INDEX = "index.json"


def write(
    folder: str | PathLike[str], records: Iterable, dtype: np.dtype | list | str, form: str, per_shard: int = 1024,
    row_group: int = 64,
) -> Path:  # fmt: skip
    """Write ``records`` to ``folder`` in format ``form``; return the folder.

    Args:
        folder: created if it does not exist.
        records: arrays without dimensions, or other objects of ``dtype.itemsize`` bytes.
        dtype: the structured dtype of all records.
        form: one of ``FORMATS``.
        per_shard: samples per shard, tar file or Parquet file.
        row_group: rows per row group, which Parquet reads as a whole.

    Raises:
        DtlibError: for an unknown format, an unsupported dtype, a folder that already has samples, or a record with
            the wrong length or fields.
    """
    folder, dtype = Path(folder), np.dtype(dtype)
    if form not in FORMATS:
        raise DtlibError(f"There is no format {form!r}: choose one of {', '.join(FORMATS)}.")
    number("per_shard", per_shard)
    number("row_group", row_group)
    _check_dtype(dtype, form)
    if form == "parquet" and per_shard % row_group:
        raise DtlibError(f"per_shard={per_shard} must be a multiple of row_group={row_group}: row groups are whole.")
    records = (_bytes_of(record, dtype) for record in records)
    named: Iterable[tuple[str, Iterable[bytes]]]
    if form == "files":
        named = ((f"sample-{number:07}.bin", (record,)) for number, record in enumerate(records))
    elif form == "one-file":
        named = [("samples.bin", records)]
    else:
        suffix = {"shards": "bin"}.get(form, form)
        pieces = iter(lambda: list(islice(records, per_shard)), [])
        named = ((f"shard-{at:05}.{suffix}", piece) for at, piece in enumerate(pieces))
    counts, first = {}, 0
    with writing(folder, "free some space, or choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if (folder / INDEX).exists():
                raise DtlibError(f"{folder} already has samples: choose a new folder, or delete it first.")
            try:
                for name, piece in named:
                    with open(folder / name, "xb") as file:  # "x": do not overwrite a file that we did not write
                        counts[name] = 0
                        counts[name] = _write_file(file, piece, dtype, form, first, row_group)
                    first += counts[name]
                write_index(folder, {"format": form, "dtype": dtype, "counts": counts, "row_group": row_group})
            except BaseException:
                for name in counts:
                    (folder / name).unlink(missing_ok=True)
                raise
    return folder


def write_index(folder: Path, index: dict) -> None:
    """Write the index atomically."""
    described = {**index, "dtype": np.lib.format.dtype_to_descr(index["dtype"])}
    write_atomically(folder / INDEX, json.dumps(described))


def read_index(folder: Path) -> dict:
    """Read and check the index that ``write`` wrote; its ``dtype`` is converted to a numpy dtype.

    Raises:
        DtlibError: if the folder has no index, or the index is truncated or from another program.
    """
    try:
        index = read_json(folder / INDEX, dict)
        lists = [tuple(tuple(x) if isinstance(x, list) else x for x in field) for field in index["dtype"]]
        dtype = np.lib.format.descr_to_dtype(lists)  # type: ignore[arg-type]  # numpy checks it, too
        _check_dtype(dtype, index["format"])
        named = all(is_plain_name(name) and type(n) is int and 0 <= n <= MOST for name, n in index["counts"].items())
        whole = named and index["format"] in FORMATS and number("row_group", index["row_group"]) > 0
    except FileNotFoundError:
        raise DtlibError(f"{folder} has no {INDEX}: write samples there first, with dtlib.storage.write.") from None
    except (ValueError, KeyError, TypeError, AttributeError, DtlibError):
        whole = False
    if not whole:
        raise DtlibError(f"{folder / INDEX} is cut off, or not made by dtlib.storage.write: copy the samples again.")
    return {**index, "dtype": dtype}


def _check_dtype(dtype: np.dtype, form: str) -> None:
    """Raise an error unless the dtype has fields, each a number or an array of numbers that torch supports."""
    if not dtype.names:
        raise DtlibError(f"dtype {dtype} has no fields: name it, as in np.dtype([('x', {str(dtype)!r})]).")
    for name in dtype.names:
        base, shape = dtype[name].subdtype or (dtype[name], ())
        try:
            if not math.prod(shape):
                raise TypeError
            torch.from_numpy(np.empty(0, base))
            if form == "parquet" and not shape:
                _column(np.empty(0, base))
            np.lib.format.dtype_to_descr(dtype)
        except (TypeError, ValueError, NotImplementedError):
            raise DtlibError(
                f"Field {name!r} is {dtype[name]}, which readers of {form} do not support: use numbers in this "
                "byte order, or bool, or arrays of these that are not empty, and fields in order, without overlap."
            ) from None


def _bytes_of(record, dtype: np.dtype) -> bytes:
    fields = getattr(record, "dtype", None)
    if isinstance(record, int) or (getattr(fields, "names", None) and fields != dtype):
        raise DtlibError(f"A record is {record!r:.60} (dtype {fields}), but the samples must be {dtype}: convert it.")
    data = record.tobytes() if hasattr(record, "tobytes") else bytes(record)
    if len(data) != dtype.itemsize:
        raise DtlibError(f"A record has {len(data)} bytes, but the dtype {dtype.itemsize}: all must have this length.")
    return data


def _write_file(file, records: Iterable[bytes], dtype: np.dtype, form: str, first: int, row_group: int) -> int:
    """Write records to an open file and return their number; ``first`` is the sample number of the first record."""
    count = 0
    if form == "parquet":
        count = _write_parquet(file, records, dtype, row_group)
    elif form == "tar":
        # In the ustar format each header is one block of 512 bytes, so a reader can compute the offset of a record.
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for count, record in enumerate(records, start=1):
                member = tarfile.TarInfo(f"{first + count - 1:07}.bin")
                member.size = len(record)
                tar.addfile(member, io.BytesIO(record))
    else:
        for record in records:
            file.write(record)
            count += 1
        if form != "files":
            file.write(END)
    return count


def _write_parquet(file, records: Iterable[bytes], dtype: np.dtype, row_group: int) -> int:
    import pyarrow as pa
    from pyarrow import parquet

    rows = np.frombuffer(b"".join(records), dtype)
    table = pa.table({name: _column(np.ascontiguousarray(rows[name])) for name in dtype.names or ()})
    # No compression and no dictionaries: we measure reading, and random bytes cannot be compressed anyway.
    parquet.write_table(table, file, row_group_size=row_group, compression="none", use_dictionary=False)
    return len(rows)


def _column(values: np.ndarray):
    """Convert a field to a pyarrow array: numbers stay numbers, arrays become binary values of fixed size."""
    import pyarrow as pa

    if values.ndim == 1:
        return pa.array(values)
    width = values[0].nbytes
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(values.tobytes())])
