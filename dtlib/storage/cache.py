"""Caches: keep samples in memory, or copy (stage) their files to a local folder."""

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


CHUNK = 2**22  # bytes per read of a copy
MARK = ".staging"  # this file marks a folder without an index whose files we have copied


class Cached(Samples):
    """A reader that keeps each sample in memory after the first read. All its workers share this memory.

    Args:
        reader: the reader of the samples.
        most_bytes: the largest size of all samples together, in bytes.

    Raises:
        DtlibError: if the samples are larger than ``most_bytes``; it does not cache a part.
    """

    def __init__(self, reader: Reader, most_bytes: int = 2**30):
        size = reader.sample_bytes * len(reader)
        if size > most_bytes:
            raise DtlibError(
                f"The samples have {size:,} bytes, but the cache may keep {most_bytes:,}: pass a larger most_bytes, or "
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
        """Let the reader prefetch the samples that are not cached yet."""
        have = self._have.numpy()
        if missing := [number for number in numbers if not have[number]]:
            self.reader.will_need(missing)

    def read(self, numbers: Sequence[int]) -> tuple[dict[str, torch.Tensor], list[StorageError]]:
        """Return a batch of these samples, and an error for each sample that is skipped; read only missing ones."""
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
    """The result of ``stage``: the local folder, and the number of bytes copied."""

    folder: Path
    bytes: int


def stage(folder: str | PathLike[str], local: str | PathLike[str], comm: Communicator | None = None) -> Staged:
    """Copy samples to a folder on this node's local disk; then ``open_samples(staged.folder)`` reads the copy.

    Files that are already copied are not copied again, unless they have changed. ``comm`` has the ranks that share the
    local folder. Rank 0 copies, and all ranks return the same result.

    Raises:
        DtlibError: if the local folder has other samples.
        StorageError: on all ranks, if a file cannot be read or written; ``offset`` is the number of bytes copied.
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
                raise DtlibError(f"{local} already has samples, but not of {folder}: choose a new folder.")
            before = {name: _size_and_time(folder / name) for name in index["counts"]}
            old = [name for name, made in before.items() if not _alike(made, _size_and_time(local / name))]
            if not old and there == index:
                return Staged(local, 0)
            others = [local / name for name in old if (local / name).exists()]
            if others and there is None and not (local / MARK).exists():
                raise DtlibError(f"{others[0]} is not a staged copy: choose a new folder, or delete it first.")
            (local / MARK).touch()
            # Delete the index before copying, so that it never describes a mixture of two versions.
            (local / INDEX).unlink(missing_ok=True)
            count = sum(_copy_file(folder / name, local / name) for name in old)
            # If the source has changed during the copy, the copy is not consistent.
            for name, made in before.items():
                if _size_and_time(folder / name) != made:
                    raise StorageError(
                        folder / name, 0, f"{folder / name} was written again while it was staged: stage it again."
                    )
            write_index(local, index)
            (local / MARK).unlink()
    except OSError as problem:
        raise StorageError(
            local, 0, f"{local} cannot be written ({problem.strerror}): free some space, or choose another folder."
        ) from None
    return Staged(local, count)


def _size_and_time(path: Path) -> tuple[int, int] | None:
    """Return the size of a file and its modification time in nanoseconds, or None if it does not exist."""
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None


def _alike(source: tuple[int, int] | None, copy: tuple[int, int] | None) -> bool:
    """Return whether the copy exists and has the size and modification time of its source.

    Some disks round the time of a copy: exFAT to 10 ms, vfat to 2 s.
    """
    if source is None or copy is None:
        return False
    rounded = copy[1] % 10**7 == 0 and abs(source[1] - copy[1]) < 2 * 10**9
    return source[0] == copy[0] and (source[1] == copy[1] or rounded)


def _copy_file(source: Path, target: Path) -> int:
    """Copy a file and return its size. Rename it at the end, so that a file with this name is always complete."""
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
        os.utime(partial, ns=(made.st_atime_ns, made.st_mtime_ns))  # the next ``stage`` compares this time
        os.replace(partial, target)
        return done
    except OSError as problem:
        partial.unlink(missing_ok=True)
        path, what = (source, "cannot be read") if reading else (target, "cannot be written")
        raise StorageError(
            path, done,
            f"{path} {what} at byte {done} ({problem.strerror}): free some space, or choose another folder.",
        ) from None  # fmt: skip
