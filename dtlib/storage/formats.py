"""One set of samples in five forms. A sample is a record: a numpy structured dtype, the same length for all.

    files      a file a sample             sample-0000007.bin
    one-file   all in one file             samples.bin             raw records, one after the other
    shards     many in each of some files  shard-00003.bin         raw records, one after the other
    tar        the same as tar files       shard-00003.tar         a member a sample; webdataset reads them
    parquet    the same by columns         shard-00003.parquet     row groups, in each all values of a column together

``index.json`` beside them says which form it is, what a record is made of, and how many each file has. After the
last record of a raw file stands ``END``: who cuts such a file off takes it away, so that a file which is too short
and one that has a record of another length can be told apart.
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
from dtlib.files import is_plain_name, locked, read_json, write_whole, writing

FORMATS = ("files", "one-file", "shards", "tar", "parquet")
END = b"\ndtlib.\n"  # 8 bytes
INDEX = "index.json"


def write(
    folder: str | PathLike[str], records: Iterable, dtype: np.dtype | list | str, form: str, per_shard: int = 1024,
    row_group: int = 64,
) -> Path:  # fmt: skip
    """Write ``records`` (arrays of no dimension, or anything of ``dtype.itemsize`` bytes) as ``form``; the folder.

    ``per_shard``: samples in a shard, a tar file or a Parquet file. ``row_group``: rows that Parquet reads together.

    Raises:
        DtlibError: for a form that there is not, a dtype that no reader reads, a folder that has samples already, or a
            record of another length or with other fields.
    """
    folder, dtype = Path(folder), np.dtype(dtype)
    if form not in FORMATS:
        raise DtlibError(f"There is no format {form!r}: choose one of {', '.join(FORMATS)}.")
    number("per_shard", per_shard)
    number("row_group", row_group)
    _check_dtype(dtype, form)
    if form == "parquet" and per_shard % row_group:
        raise DtlibError(f"per_shard={per_shard} is no multiple of row_group={row_group}: files have whole row groups.")
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
                raise DtlibError(f"{folder} has samples already: name a new folder, or delete it first.")
            try:
                for name, piece in named:
                    with open(folder / name, "xb") as file:  # others' files stay
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
    """As a whole, or not at all."""
    described = {**index, "dtype": np.lib.format.dtype_to_descr(index["dtype"])}
    write_whole(folder / INDEX, json.dumps(described))


def read_index(folder: Path) -> dict:
    """What ``write`` wrote beside samples, with its ``dtype``.

    Raises:
        DtlibError: for a folder without an index, or one that is cut off or of something else.
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
        raise DtlibError(f"{folder / INDEX} is cut off, or not by dtlib.storage.write: copy the samples anew.")
    return {**index, "dtype": dtype}


def _check_dtype(dtype: np.dtype, form: str) -> None:
    """Has it fields, each a number or an array of numbers that torch knows?"""
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
                f"Field {name!r} is {dtype[name]}, which no reader of {form} reads: choose numbers in this machine's "
                "byte order, or bool, or arrays of at least one of them, and fields one behind the other."
            ) from None


def _bytes_of(record, dtype: np.dtype) -> bytes:
    fields = getattr(record, "dtype", None)
    if isinstance(record, int) or (getattr(fields, "names", None) and fields != dtype):
        raise DtlibError(f"A record is {record!r:.60} (dtype {fields}), and the samples are to be {dtype}: convert it.")
    data = record.tobytes() if hasattr(record, "tobytes") else bytes(record)
    if len(data) != dtype.itemsize:
        raise DtlibError(f"A record has {len(data)} bytes, and its dtype {dtype.itemsize}: all have the same length.")
    return data


def _write_file(file, records: Iterable[bytes], dtype: np.dtype, form: str, first: int, row_group: int) -> int:
    """How many records were written; the first of them is sample number ``first``."""
    count = 0
    if form == "parquet":
        count = _write_parquet(file, records, dtype, row_group)
    elif form == "tar":
        # In the oldest form a header is one block of 512 bytes, so that where a record lies can be computed.
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
    # As bytes are in memory: what is measured is reading, and random bytes cannot be compressed.
    parquet.write_table(table, file, row_group_size=row_group, compression="none", use_dictionary=False)
    return len(rows)


def _column(values: np.ndarray):
    """Numbers as numbers; arrays as that many bytes a row."""
    import pyarrow as pa

    if values.ndim == 1:
        return pa.array(values)
    width = values[0].nbytes
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(values.tobytes())])
