"""The system keeps what was read in memory that is free. Whoever measures storage has to empty it, and to look.

After the first epoch a small data set comes from memory, and every format looks good.
"""

import ctypes
import mmap
import os
import sys
from os import PathLike
from pathlib import Path

import numpy as np


def drop(folder: str | PathLike[str]) -> float | None:
    """Empty the cache of a folder's files, and return the fraction of their bytes that is cached all the same.

    0.0: it is empty. None: this system lets nobody do it, or look; then a measurement has to say so.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    _forget(folder)
    if cached(folder):
        os.sync()  # bytes that are not on the disk yet cannot be forgotten
        _forget(folder)
    return cached(folder)


def _forget(folder) -> None:
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached(folder: str | PathLike[str]) -> float | None:
    """The fraction of a folder's bytes that is in the system's cache, by ``mincore``; None where nobody can tell."""
    if sys.platform != "linux":
        return None
    found = [_pages(path) for path in _files(folder)]
    return sum(there for there, _ in found) / max(1, sum(all_ for _, all_ in found))


def in_words(fraction: float | None) -> str:
    """For the line below a measurement."""
    if fraction is None:
        return "the cache of files could not be emptied here: figures may be those of memory"
    return f"cold: {fraction:.0%} of the bytes were cached" + (" ALL THE SAME" if fraction > 0.01 else "")


def _files(folder):
    return [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]


def _pages(path) -> tuple[int, int]:
    """Pages of a file that are cached, and all of them."""
    size = os.path.getsize(path)
    if not size:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    descriptor = os.open(path, os.O_RDONLY)
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    os.close(descriptor)
    failed = libc.mincore(address, size, pages)
    libc.munmap(address, size)
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return int((np.frombuffer(pages.raw, np.uint8) & 1).sum()), len(pages)
