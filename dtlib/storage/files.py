"""Files that are read in pieces: every open and every read is counted, and what is damaged is told with its place."""

import os
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch

from dtlib.errors import DtlibError
from dtlib.files import opened_to_read

COUNTED = ("opens", "reads", "bytes", "jumps", "hits")
SIZES = tuple(4**power for power in range(5, 14))  # 1 kiB to 64 MiB: the upper ends of the histogram's bins
MOST_PROCESSES = 65  # the one that reads by itself, and 64 workers
MOST_OPEN = 64  # files, in a process


class StorageError(DtlibError):
    """A sample cannot be read: in which ``file``, at which byte, its ``offset``; ``sample`` is its number."""

    def __init__(self, file: str | Path, offset: int, sentence: str, sample: int | None = None):
        super().__init__(sentence)
        self.file, self.offset, self.sample = str(file), offset, sample

    def __reduce__(self) -> tuple:
        return StorageError, (self.file, self.offset, str(self), self.sample)


class Counters:
    """What all processes of a reader did together, in shared memory; each worker writes a row of its own.

    ``opens`` of files, ``reads`` and their ``bytes``, ``jumps`` (reads that do not begin where the file's last one
    ended), ``hits`` (samples read from memory), and a histogram of the sizes of reads.
    """

    def __init__(self):
        self._rows = torch.zeros(MOST_PROCESSES, len(COUNTED) + len(SIZES) + 1, dtype=torch.int64).share_memory_()

    def add(self, sizes: Sequence[int] = (), **counts: int) -> None:
        """``sizes`` of reads, and counts by name; of a whole batch, as an addition here costs as much as a read."""
        row = self._row()
        for name, count in counts.items():
            row[COUNTED.index(name)] += count
        row[COUNTED.index("reads")] += len(sizes)
        row[COUNTED.index("bytes")] += sum(sizes)
        for size, count in Counter(sizes).items():
            row[len(COUNTED) + next((at for at, end in enumerate(SIZES) if size <= end), len(SIZES))] += count

    def _row(self):
        worker = torch.utils.data.get_worker_info()
        return self._rows[0 if worker is None else 1 + worker.id].numpy()

    def reset(self) -> None:
        self._rows.zero_()

    def totals(self) -> dict[str, int]:
        return dict(zip(COUNTED, self._rows.sum(0).tolist(), strict=False))

    @property
    def randomness(self) -> float:
        """The fraction of reads that jump."""
        return self.totals()["jumps"] / max(1, self.totals()["reads"])

    def read_sizes(self) -> dict[int | None, int]:
        """How many reads were at most so many bytes, and more than the size before; None: larger than all."""
        counts = self._rows.sum(0).tolist()[len(COUNTED) :]
        return {size: count for size, count in zip((*SIZES, None), counts, strict=True) if count}


class Files:
    """The files of a folder, opened when they are first read; ``MOST_OPEN`` of them stay open.

    ``open_delay``: seconds that every open waits, which stands for a busy metadata server: INJECTED, not measured.
    """

    def __init__(self, folder: Path, open_delay: float = 0.0):
        self.folder, self.open_delay = Path(folder), open_delay
        self.counters = Counters()
        # name -> [descriptor, size, where its last read ended]; a worker may inherit it, as no read uses the position
        # that the system keeps with a descriptor.
        self._open: OrderedDict[str, list[int]] = OrderedDict()
        self._sizes: list[int] = []  # not yet counted, like those below
        self._jumps, self._opens = 0, 0

    def path(self, name: str) -> Path:
        return self.folder / name

    def size(self, name: str) -> int:
        return self._opened(name)[1]

    def read_into(self, buffers: list, name: str, offset: int) -> int:
        """Fill all buffers, one after the other, from ``offset`` on; returns how many bytes there were to be had."""
        opened, wanted = self._opened(name), sum(map(len, buffers))
        done = os.preadv(opened[0], buffers, offset)
        while 0 < wanted - done <= len(buffers[-1]):
            got = os.preadv(opened[0], [buffers[-1][done - wanted :]], offset + done)
            if not got:
                break
            done += got
        self._jumps += offset != opened[2]
        opened[2] = offset + done
        self._sizes.append(done)
        return done

    def will_need(self, name: str, offset: int, length: int) -> None:
        """Have the system read ahead, without waiting for it; where it cannot, nothing happens."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._opened(name)[0], offset, length, os.POSIX_FADV_WILLNEED)

    def count(self) -> None:
        """Tell the counters what has been read since."""
        self.counters.add(self._sizes, jumps=self._jumps, opens=self._opens)
        self._sizes, self._jumps, self._opens = [], 0, 0

    def _opened(self, name: str) -> list:
        opened = self._open.get(name)
        if opened is not None:
            return opened
        if self.open_delay:
            time.sleep(self.open_delay)
        self._opens += 1
        path = f"{self.folder}/{name}"
        try:
            descriptor = opened_to_read(str(path))
        except OSError as problem:
            raise StorageError(
                path, 0, f"{path} cannot be opened ({problem.strerror}): copy it again, or read with damaged='skip'."
            ) from None
        if len(self._open) >= MOST_OPEN:
            os.close(self._open.popitem(last=False)[1][0])
        self._open[name] = opened = [descriptor, os.fstat(descriptor).st_size, 0]
        return opened

    def close(self) -> None:
        """Close what is open; a later read opens it again."""
        while self._open:
            os.close(self._open.popitem()[1][0])

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict(), "_sizes": [], "_jumps": 0, "_opens": 0}
