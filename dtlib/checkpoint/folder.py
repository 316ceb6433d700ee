"""A checkpoint on disk: one safetensors file per rank, and an index that lists them.

    rank0-<id>.safetensors   written and synced to disk  \\
    rank1-<id>.safetensors   by all ranks in parallel     }  not a checkpoint yet
    .index.json...tmp        written and synced by rank 0 /
    index.json               <- renamed from .tmp: the new checkpoint now replaces the old one
    stale files              deleted: files of the previous checkpoint, and of runs that were killed

Each save has a new ``id``, so files of two checkpoints cannot be confused. If a run is killed at any moment,
``index.json`` lists complete files.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.files import locked, read_json, read_text, write_atomically

INDEX = "index.json"
FORMAT, VERSION = "dtlib checkpoint", 1
CONTENTS = ("id", "files", "tensors", "aliases", "optimizer", "extra")
OURS = re.compile(r"rank\d+-[0-9a-f]+\.safetensors")
# Files that a save may leave behind: ours, and temporary files of safetensors and of ``write_atomically``.
LEFT_OVER = re.compile(rf"{OURS.pattern}|\.tmp\w{{6}}|\.index\.json\.\d+-[0-9a-f]+\.tmp")
TUPLE, PAIRS = "__tuple__", "__pairs__"
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
TYPES = {name: getattr(torch, name) for name in (*FLOATS, *INTEGERS, "complex64", "bool")}


class CheckpointError(DtlibError):
    """A checkpoint cannot be saved or loaded; every rank raises it with the same message."""


def encoded(value: object) -> object:
    """Convert ``value`` to JSON types: tuples, and dictionaries with keys that are not text, become marked lists."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and not value.keys() & {TUPLE, PAIRS}:
        return {key: encoded(entry) for key, entry in value.items()}
    if isinstance(value, dict):
        return {PAIRS: [[encoded(key), encoded(entry)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        entries = [encoded(entry) for entry in value]
        return {TUPLE: entries} if isinstance(value, tuple) else entries
    return value


def decoded(value: object) -> object:
    """Return the value from which ``encoded`` made ``value``."""
    if isinstance(value, list):
        return [decoded(entry) for entry in value]
    if isinstance(value, dict) and TUPLE in value:
        return tuple(decoded(entry) for entry in value[TUPLE])
    if isinstance(value, dict) and PAIRS in value:
        return {decoded(key): decoded(entry) for key, entry in value[PAIRS]}
    return {key: decoded(entry) for key, entry in value.items()} if isinstance(value, dict) else value


V = TypeVar("V")


def raise_on_all(comm: Communicator, work: Callable[[], V]) -> V:
    """Call ``work()`` on every rank of ``comm`` and return its result; if it fails on one rank, raise on all ranks.

    ``work`` must not communicate, because it may fail on some ranks only.

    Raises:
        CheckpointError: on all ranks, with the message of the lowest rank that failed.
    """
    result = problem = cause = None
    try:
        result = work()
    except DtlibError as error:
        problem, cause = str(error), error
    except Exception as error:
        problem, cause = f"Rank {comm.rank} failed: {type(error).__name__}: {error}", error
    for said in comm.all_gather_object(problem):
        if said:
            raise CheckpointError(said) from cause
    return result  # type: ignore[return-value]  # not None, because no rank failed


# Writing


def file_name(rank: int, mark: str) -> str:
    """Return the name of a rank's file; ``mark`` is the id of the save."""
    return f"rank{rank}-{mark}.safetensors"


def write_file(path: Path, tensors: dict, mark: str) -> int:
    """Write one rank's file and sync it to disk; return its size in bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # safetensors creates files that only their owner can read, so restore the mode that the umask gives.
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path, metadata={"checkpoint": mark})
        path.chmod(mode)
        _to_disk(path)
        _to_disk(path.parent)
        return path.stat().st_size
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(
            f"{path} cannot be written ({problem}): free some space, or choose another folder. The previous "
            "checkpoint is unchanged."
        ) from problem


def commit(folder: Path, index: dict) -> None:
    """Write ``index`` to the folder atomically, and delete files of other saves."""
    with locked(folder):  # for two runs that save in the same folder
        for name, size in index["files"].items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                raise CheckpointError(
                    f"Rank 0 does not see {folder / name}: save to a folder that all ranks, and no other run, use."
                )
        contents = {"format": FORMAT, "version": VERSION, **index}
        _replace(folder / INDEX, json.dumps(contents, indent=1))
        for path in folder.iterdir():
            if LEFT_OVER.fullmatch(path.name) and path.name not in index["files"]:
                with suppress(OSError):
                    path.unlink()


def _replace(path: Path, text: str) -> None:
    """Replace a file by ``text`` atomically, and sync it to disk."""
    try:
        write_atomically(path, text)
        _to_disk(path.parent)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be written ({problem}): free some space, and save again.") from problem


def write_latest(path: Path, name: str, comm: Communicator) -> None:
    """Write ``name``, that of the current checkpoint, to the file ``path``. All ranks of ``comm`` call it."""
    raise_on_all(comm, lambda: _replace(path, name) if comm.rank == 0 else None)


def _to_disk(path: Path) -> None:
    """Wait until the system has written a file, or the entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def read_latest(path: Path, comm: Communicator) -> str | None:
    """Return the name that ``write_latest`` wrote; None if the file does not exist. All ranks of ``comm`` call it."""

    def read():
        with corruption_as_checkpoint_error(path):
            return read_text(path, 4096).strip() if comm.rank == 0 and os.path.lexists(path) else None

    return comm.broadcast_object(raise_on_all(comm, read))


def read_index(folder: Path) -> dict:
    """Read and validate the index of the checkpoint in ``folder``.

    Raises:
        CheckpointError: if it cannot be read, is damaged, or has another format or version.
    """
    path = folder / INDEX
    try:
        index = read_json(path, object)
    except OSError as problem:
        raise CheckpointError(
            f"{path} cannot be read ({problem.strerror}): pass the folder that dtlib.checkpoint.save() wrote."
        ) from None
    except ValueError as problem:
        raise CheckpointError(f"{path} is not JSON ({problem}): it is damaged, so use another checkpoint.") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no index of a {FORMAT}: give a folder in which dtlib.checkpoint has saved.")
    if index.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {index.get('version')!r} of the format, but this dtlib reads version {VERSION}: load "
            "it with the dtlib that saved it, or with a newer one."
        )
    if lacking := [name for name in CONTENTS if name not in index]:
        raise CheckpointError(f"{path} lacks {', '.join(lacking)}: it is damaged, so use another checkpoint.")
    # Check all entries now, so that later code can use the index without checks.
    with corruption_as_checkpoint_error(path):
        decoded(index["extra"])
        for name, tensor in index["tensors"].items():
            for role, entry in tensor["roles"].items():
                if unknown := entry["pieces"].keys() - index["files"].keys():
                    raise ValueError(f"{name}/{role} is in {sorted(unknown)[0]}, which is not among its files")
                check_pieces(f"{name}/{role}", tensor["shape"], entry)
    return index


@contextmanager
def corruption_as_checkpoint_error(path: Path, also: type[Exception] = SafetensorError) -> Iterator[None]:
    """Convert errors in the block, which reads the file ``path``, to a ``CheckpointError`` that names the file.

    The block may then use the file's contents without checks: wrong types and missing keys raise such errors.
    ``also`` is one more type of error that a damaged file causes in this block.
    """
    try:
        yield
    except (AttributeError, LookupError, OSError, TypeError, ValueError, SafetensorError, also) as problem:
        raise CheckpointError(f"{path} is damaged ({problem!r}): use another checkpoint.") from None


def bounds(piece: str) -> tuple[int, int]:
    """Return start and stop of a piece: ``"15:30"`` is elements 15 to 29 of the flattened tensor."""
    start, stop = piece.split(":")
    return int(start), int(stop)


def check_pieces(key: str, shape: Sequence[int], entry: dict) -> None:
    """Raise an error unless each element of a tensor is in exactly one file, and its dtype is known."""
    # In sorted order, each piece must begin at the end of the previous one.
    at, follows = 0, True
    for start, stop in sorted(bounds(piece) for piece in entry["pieces"].values()):
        follows &= start == at
        at = stop
    if not follows or at != math.prod(shape) or entry["dtype"] not in TYPES:
        raise CheckpointError(
            f"{key} of shape {tuple(shape)} and type {entry['dtype']} is incomplete: ranks have elements "
            f"{', '.join(entry['pieces'].values()) or 'none'}; save with the communicator of the model's strategy."
        )


def check_file(folder: Path, index: dict, name: str) -> None:
    """Raise an error unless the file exists, is complete and matches the index.

    Size, id, names and lengths are checked from the file's header. The numbers are not read.
    """
    path, size = folder / name, index["files"][name]
    if not OURS.fullmatch(name) or not path.is_file():
        raise CheckpointError(
            f"{path} is missing, so the checkpoint is incomplete: copy this file too, or use another checkpoint."
        )
    with corruption_as_checkpoint_error(path):
        if path.stat().st_size != size:
            raise ValueError(f"{path.stat().st_size} bytes, but the index says {size}")
        with safe_open(path, "pt") as file:
            mark, keys = (file.metadata() or {}).get("checkpoint"), set(file.keys())
            lengths = {key: file.get_slice(key).get_shape() for key in keys}
    if mark != index["id"]:
        raise CheckpointError(
            f"{path} belongs to checkpoint {mark}, but the index belongs to {index['id']}: copy whole folders."
        )
    for tensor, contents in index["tensors"].items():
        for role, entry in contents["roles"].items():
            if name in entry["pieces"]:
                start, stop = bounds(entry["pieces"][name])
                if lengths.get(f"{tensor}/{role}") != [stop - start]:
                    raise CheckpointError(
                        f"{path} lacks elements {start}:{stop} of {tensor}/{role}: it is damaged, so use another "
                        "checkpoint."
                    )


class Reader:
    """A reader of elements of tensors from the files of a checkpoint.

    A file is opened on first use. It is closed when this object is deleted.
    """

    def __init__(self, folder: Path, index: dict):
        self.folder, self.index = folder, index
        self._files: dict = {}

    def file(self, name: str) -> safe_open:
        """Return the open safetensors file ``name``."""
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, "pt")
        return self._files[name]

    def read(self, name: str, role: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` of a tensor, flattened; by default the whole tensor in its shape.

        ``role`` is ``"value"``, ``"master"`` or ``"state/..."``.
        """
        tensor = self.index["tensors"][name]
        if stop is None:
            return self.read(name, role, 0, math.prod(tensor["shape"])).view(tensor["shape"])
        # Copy the intersection of [start, stop) with the piece in each file.
        entry = tensor["roles"][role]
        flat = torch.empty(stop - start, dtype=TYPES[entry["dtype"]])
        for file, piece in entry["pieces"].items():
            first, last = bounds(piece)
            low, high = max(start, first), min(stop, last)
            if low < high:
                flat[low - start : high - start] = self.file(file).get_slice(f"{name}/{role}")[
                    low - first : high - first
                ]
        return flat
