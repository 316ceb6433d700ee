"""The operating system's page cache: files that were read stay in free memory.

After the first epoch a small data set is read from memory, and every format looks fast. So a measurement of storage
must first empty this cache, and check that it is empty.
"""

import ctypes
import mmap
import os
import sys
from os import PathLike
from pathlib import Path

import numpy as np


def drop(folder: str | PathLike[str]) -> float | None:
    """Remove a folder's files from the page cache; return the fraction of their bytes that is still cached.

    0.0 means that none is cached. None means that this system does not support it; the report of a measurement must
    then say so.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    _forget(folder)
    if cached(folder):
        os.sync()  # pages that are not on disk yet cannot be removed, so write them first
        _forget(folder)
    return cached(folder)


def _forget(folder) -> None:
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached(folder: str | PathLike[str]) -> float | None:
    """Return the fraction of a folder's bytes in the page cache, by ``mincore``; None if the system is not Linux."""
    if sys.platform != "linux":
        return None
    found = [_pages(path) for path in _files(folder)]
    return sum(there for there, _ in found) / max(1, sum(all_ for _, all_ in found))


def in_words(fraction: float | None) -> str:
    """Describe the result of ``drop`` for the report of a measurement."""
    if fraction is None:
        return "the cache of files could not be emptied here: figures may be those of memory"
    return f"cold: {fraction:.0%} of the bytes were cached" + (" ALL THE SAME" if fraction > 0.01 else "")


def _files(folder):
    return [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]


def _pages(path) -> tuple[int, int]:
    """Return the number of cached pages of a file, and of all its pages."""
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
    # The lowest bit of each byte in ``pages`` says whether that page is in memory.
    failed = libc.mincore(address, size, pages)
    libc.munmap(address, size)
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return int((np.frombuffer(pages.raw, np.uint8) & 1).sum()), len(pages)
