"""Closer to the accelerator: samples kept in memory, files staged in a local folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dtlib.errors import DtlibError
from dtlib.files import locked, opened_to_read
from dtlib.storage.files import StorageError
from dtlib.storage.formats import INDEX, read_index, write_index
from dtlib.storage.readers import Reader, Samples

if TYPE_CHECKING:
    from dtlib.comm import Communicator


CHUNK = 2**22  # bytes that are copied at a time
MARK = ".staging"  # in a folder: until its index is there, its files are copies of ours


class Cached(Samples):
    """A reader that keeps every sample that it has read, in memory that all its workers share.

    ``most_bytes``: what it may keep; a set of samples that is larger is refused, not kept by half.
    """

    def __init__(self, reader: Reader, most_bytes: int = 2**30):
        size = reader.sample_bytes * len(reader)
        if size > most_bytes:
            raise DtlibError(
                f"The samples have {size:,} bytes and the cache may keep {most_bytes:,}: give a larger most_bytes, or "
                "stage them in a local folder."
            )
        self.reader, self.files, self.block, self.window = reader, reader.files, reader.block, reader.window
        self.injected, self.sample_bytes = reader.injected, reader.sample_bytes
        nothing, _ = reader.read([])
        self._kept = {
            name: torch.empty((len(reader), *values.shape[1:]), dtype=values.dtype).share_memory_()
            for name, values in nothing.items()
        }
        self._have = torch.zeros(len(reader), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.reader)

    def will_need(self, numbers: Sequence[int]) -> None:
        have = self._have.numpy()
        if missing := [number for number in numbers if not have[number]]:
            self.reader.will_need(missing)

    def read(self, numbers: Sequence[int]) -> tuple[dict[str, torch.Tensor], list[StorageError]]:
        have, numbers = self._have.numpy(), list(map(self._number, numbers))
        missing = [number for number in numbers if not have[number]]
        skipped: list[StorageError] = []
        self.files.counters.add(hits=len(numbers) - len(missing))
        if missing:
            batch, skipped = self.reader.read(missing)
            lost = {error.sample for error in skipped}
            got = [number for number in missing if number not in lost]
            for name, values in batch.items():
                self._kept[name].numpy()[got] = values.numpy()
            have[got] = True
            numbers = [number for number in numbers if number not in lost]
        return {name: torch.from_numpy(kept.numpy()[numbers]) for name, kept in self._kept.items()}, skipped


@dataclass(frozen=True)
class Staged:
    """What ``stage`` did: the local folder, and how many bytes it copied."""

    folder: Path
    bytes: int


def stage(folder: str | PathLike[str], local: str | PathLike[str], comm: Communicator | None = None) -> Staged:
    """Copy samples to a folder on this node's own disk; ``open_samples(staged.folder)`` reads them there.

    Files that an earlier staging has copied are not copied again, unless they have changed. With ``comm``, of the
    ranks that share the local folder, rank 0 copies and all of them return the same.

    Raises:
        DtlibError: for a local folder that has other samples already.
        StorageError: where a file cannot be read or written, with the byte at which it stopped; on all ranks.
    """
    if comm is None:
        return _copy(Path(folder).resolve(), Path(local))
    done: Staged | DtlibError | None = None
    if comm.rank == 0:
        try:
            done = stage(folder, local)
        except DtlibError as error:
            done = error
    outcome = comm.broadcast_object(done)
    if isinstance(outcome, DtlibError):
        raise outcome
    assert isinstance(outcome, Staged)
    return outcome


def _copy(folder: Path, local: Path) -> Staged:
    index, count = {**read_index(folder), "source": str(folder)}, 0
    try:
        local.mkdir(parents=True, exist_ok=True)
        with locked(local):
            there = read_index(local) if (local / INDEX).exists() else None
            if there and there.get("source") != index["source"]:
                raise DtlibError(f"{local} has samples already, and not those of {folder}: name a new folder.")
            old = [name for name in index["counts"] if not _alike(folder / name, local / name)]
            if not old and there == index:
                return Staged(local, 0)
            others = [local / name for name in old if (local / name).exists()]
            if others and there is None and not (local / MARK).exists():
                raise DtlibError(f"{others[0]} is no copy that was staged: name a new folder, or delete it first.")
            (local / MARK).touch()
            (local / INDEX).unlink(missing_ok=True)  # first, so that no index ever names files of two versions
            count = sum(_copy_file(folder / name, local / name) for name in old)
            for name in index["counts"]:
                if not _alike(folder / name, local / name):
                    raise StorageError(
                        folder / name, 0, f"{folder / name} was written anew while it was staged: stage once more."
                    )
            write_index(local, index)
            (local / MARK).unlink()
    except OSError as problem:
        raise StorageError(
            local, 0, f"{local} cannot be written ({problem.strerror}): free some space, or choose another folder."
        ) from None
    return Staged(local, count)


def _alike(source: Path, copy: Path) -> bool:
    """Whether a copy is there, and its source has not been written since: by size and time."""
    if not (copy.exists() and source.exists()):
        return False
    one, other = source.stat(), copy.stat()
    return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def _copy_file(source: Path, target: Path) -> int:
    """Bytes copied. A name stands for a whole file, so it is given last."""
    partial, done, reading = target.with_name(target.name + ".partial"), 0, True
    try:
        with open(source, "rb", opener=opened_to_read) as theirs, open(partial, "wb", buffering=0) as ours:
            while piece := theirs.read(CHUNK):
                reading = False
                while piece:
                    written = ours.write(piece)
                    done, piece = done + written, piece[written:]
                reading = True
            reading, made = False, os.fstat(theirs.fileno())
        os.utime(partial, ns=(made.st_atime_ns, made.st_mtime_ns))  # by which a later staging knows it
        os.replace(partial, target)
        return done
    except OSError as problem:
        partial.unlink(missing_ok=True)
        path, what = (source, "cannot be read") if reading else (target, "cannot be written")
        raise StorageError(
            path, done,
            f"{path} {what} at byte {done} ({problem.strerror}): free some space, or choose another folder.",
        ) from None  # fmt: skip
