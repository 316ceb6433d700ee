"""Closer to the accelerator: samples kept in memory, files staged in a local folder."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

from dtlib.errors import DtlibError
from dtlib.storage.files import StorageError
from dtlib.storage.formats import INDEX

CHUNK = 2**22  # bytes that are copied at a time


class Cached(Dataset):
    """A reader that keeps every sample that it has read, in memory that all its workers share.

    ``most_bytes``: what it may keep; a set of samples that is larger is refused, not kept by half.
    """

    def __init__(self, reader, most_bytes: int = 2**30):
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

    def __getitem__(self, numbers):
        if isinstance(numbers, int):
            return {name: values[0] for name, values in self.read([numbers])[0].items()}
        return self.read(numbers)[0]

    def will_need(self, numbers) -> None:
        have = self._have.numpy()
        if missing := [number for number in numbers if not have[number]]:
            self.reader.will_need(missing)

    def read(self, numbers):
        have = self._have.numpy()
        missing, skipped = [number for number in numbers if not have[number]], []
        self.files.counters.add(hits=len(numbers) - len(missing))
        if missing:
            batch, skipped = self.reader.read(missing)
            lost = {error.sample for error in skipped}
            came = [number for number in missing if number not in lost]
            for name, values in batch.items():
                self._kept[name].numpy()[came] = values.numpy()
            have[came] = True
            numbers = [number for number in numbers if number not in lost]
        return {name: torch.from_numpy(kept.numpy()[numbers]) for name, kept in self._kept.items()}, skipped


@dataclass(frozen=True)
class Staged:
    """What ``stage`` did: the local folder, the files that are there, and those that found no room."""

    folder: Path
    copied: list[str]
    left: list[str]
    bytes: int


def stage(folder, local, if_full: str = "stop", comm=None) -> Staged:
    """Copy samples to a folder on this node's own disk; ``open_samples(staged.folder)`` reads them there.

    ``if_full="leave"``: files for which there is no room stay where they are, and are read from there; else it is an
    error. With ``comm``, of the ranks that share the local folder, rank 0 copies and all of them return the same.

    Raises:
        StorageError: where a file cannot be read or written, with the byte at which it stopped; on all ranks.
    """
    if comm is None:
        return _copy(Path(folder).resolve(), Path(local), if_full)
    done = None
    if comm.rank == 0:
        try:
            done = stage(folder, local, if_full)
        except DtlibError as error:
            done = error
    done = comm.broadcast_object(done)
    if isinstance(done, DtlibError):
        raise done
    return done


def _copy(folder: Path, local: Path, if_full: str) -> Staged:
    if if_full not in ("stop", "leave"):
        raise DtlibError(f"if_full={if_full!r} is not known: 'stop', or 'leave' files where they are.")
    try:
        index = json.loads((folder / INDEX).read_text())
    except FileNotFoundError:
        raise DtlibError(f"{folder} has no {INDEX}: there are no samples to stage.") from None
    local.mkdir(parents=True, exist_ok=True)
    copied, left, count = [], [], 0
    for name in index["counts"]:
        try:
            count += _copy_file(folder / name, local / name)
            copied.append(name)
        except StorageError:
            if if_full == "stop":
                raise
            left.append(name)
    (local / INDEX).write_text(json.dumps({**index, "elsewhere": str(folder)}))
    return Staged(local, copied, left, count)


def _copy_file(source: Path, target: Path) -> int:
    """Bytes copied. A name stands for a whole file, so it is given last."""
    partial, done, reading = target.with_name(target.name + ".partial"), 0, True
    try:
        with open(source, "rb") as theirs, open(partial, "wb", buffering=0) as ours:
            while piece := theirs.read(CHUNK):
                reading = False
                while piece:
                    written = ours.write(piece)
                    done, piece = done + written, piece[written:]
                reading = True
            reading = False
        os.replace(partial, target)
        return done
    except OSError as problem:
        partial.unlink(missing_ok=True)
        path, what = (source, "cannot be read") if reading else (target, "cannot be written")
        raise StorageError(
            path, done,
            f"{path} {what} at byte {done} ({problem.strerror}): make room, choose another folder, or stage with "
            "if_full='leave', which reads the rest from where it is.",
        ) from None  # fmt: skip
