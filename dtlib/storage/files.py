"""Files that readers read in pieces, with counters of opens and reads, and errors that name file and offset."""

import os
import time
from collections import Counter, OrderedDict
from pathlib import Path

import torch

from dtlib.errors import DtlibError
from dtlib.files import opened_to_read

COUNTED = ("opens", "reads", "bytes", "jumps", "hits")
MOST_PROCESSES = 65  # the main process and 64 workers
MOST_OPEN = 64  # open files per process


class StorageError(DtlibError):
    """A sample cannot be read. ``file`` and ``offset`` (a byte) are the place; ``sample`` is the sample's number."""

    def __init__(self, file: str | Path, offset: int, sentence: str, sample: int | None = None):
        super().__init__(sentence)
        self.file, self.offset, self.sample = str(file), offset, sample

    def __reduce__(self) -> tuple:
        return StorageError, (self.file, self.offset, str(self), self.sample)


class Counters:
    """Counters of all processes of a reader, in shared memory. Each worker writes its own row, so no lock is needed.

    They are ``opens`` of files, ``reads``, ``bytes`` read, ``jumps`` (reads that do not begin at the end of the file's
    last read), and ``hits`` (samples read from memory).
    """

    def __init__(self):
        self._rows = torch.zeros(MOST_PROCESSES, len(COUNTED), dtype=torch.int64).share_memory_()

    def add(self, **counts: int) -> None:
        """Add counts by name. Call it once for each batch, because a call takes as long as a read."""
        worker = torch.utils.data.get_worker_info()
        row = self._rows[0 if worker is None else 1 + worker.id].numpy()
        for name, count in counts.items():
            row[COUNTED.index(name)] += count

    def reset(self) -> None:
        """Set all counters to zero."""
        self._rows.zero_()

    def totals(self) -> dict[str, int]:
        """Return the sum over all processes, by name."""
        return dict(zip(COUNTED, self._rows.sum(0).tolist(), strict=True))

    @property
    def randomness(self) -> float:
        """The fraction of reads that are jumps."""
        return self.totals()["jumps"] / max(1, self.totals()["reads"])


class Files:
    """The files of a folder, opened at their first read. At most ``MOST_OPEN`` files stay open.

    ``open_delay`` is the time in seconds that each open waits, to imitate a busy metadata server. The delay is
    INJECTED, not measured.
    """

    def __init__(self, folder: Path, open_delay: float = 0.0):
        self.folder, self.open_delay = Path(folder), open_delay
        self.counters = Counters()
        # name -> [descriptor, size, end of the last read]. Forked workers may share a descriptor, because reads pass
        # their offset and do not use the descriptor's position.
        self._open: OrderedDict[str, list[int]] = OrderedDict()
        self._uncounted: Counter[str] = Counter()  # since the last ``count``

    def path(self, name: str) -> Path:
        """Return the path of file ``name``."""
        return self.folder / name

    def size(self, name: str) -> int:
        """Return the size of file ``name`` in bytes."""
        return self._opened(name)[1]

    def read_into(self, buffers: list, name: str, offset: int) -> int:
        """Read from ``offset`` into all buffers in turn; return the number of bytes read, fewer at the file's end."""
        opened, wanted = self._opened(name), sum(map(len, buffers))
        done = os.preadv(opened[0], buffers, offset)
        # The system may return fewer bytes than asked for. Read the rest of the last buffer until the file ends.
        while 0 < wanted - done <= len(buffers[-1]):
            got = os.preadv(opened[0], [buffers[-1][done - wanted :]], offset + done)
            if not got:
                break
            done += got
        self._uncounted["reads"] += 1
        self._uncounted["bytes"] += done
        self._uncounted["jumps"] += offset != opened[2]
        opened[2] = offset + done
        return done

    def will_need(self, name: str, offset: int, length: int) -> None:
        """Ask the system to read ahead, without waiting; it does nothing on systems without ``posix_fadvise``."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._opened(name)[0], offset, length, os.POSIX_FADV_WILLNEED)

    def count(self) -> None:
        """Add the reads since the last call to the counters."""
        self.counters.add(**self._uncounted)
        self._uncounted.clear()

    def _opened(self, name: str) -> list:
        opened = self._open.get(name)
        if opened is not None:
            return opened
        if self.open_delay:
            time.sleep(self.open_delay)
        self._uncounted["opens"] += 1
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
        """Close all files; a later read opens its file again."""
        while self._open:
            os.close(self._open.popitem()[1][0])

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict(), "_uncounted": Counter()}
