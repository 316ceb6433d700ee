"""Write files completely or not at all, and read files that other programs may have written."""

import errno
import io
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from dtlib.errors import DtlibError

K = TypeVar("K")


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file completely or not at all: readers find the old or the new file, even if this process is killed.

    Raises:
        OSError: if the file cannot be written; the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # some systems report a full disk only here
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_text(path: Path, most: int = 2**26) -> str:
    """Read a text file of at most ``most`` bytes; a pipe or a device is refused, because reading it may never end.

    Raises:
        OSError: if there is no such file, or if it cannot be read.
        ValueError: if it is not text, or larger than ``most``.
    """
    with open(path, "rb", opener=opened_to_read) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"it has {size:,} bytes, and {most:,} are expected at most")
        return file.read().decode()


def opened_to_read(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, for ``open(..., opener=opened_to_read)``.

    Anything except a regular file is refused, because reading a pipe or a device may never end.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise io.UnsupportedOperation(errno.EINVAL, "it is no ordinary file", path)
    return descriptor


def read_json(path: Path, kind: type[K], most: int = 2**26) -> K:
    """Read JSON of this ``kind`` (dict, list, ...).

    Raises:
        OSError: as ``read_text``.
        ValueError: as ``read_text``, and if it is not JSON or of another kind.
    """
    try:
        found = json.loads(read_text(path, most))
    except RecursionError:
        raise ValueError("its lists and objects are too deep") from None
    if not isinstance(found, kind):
        raise ValueError(f"it has a {type(found).__name__} where a {kind.__name__} is expected")
    return found


@contextmanager
def writing(path: str | Path, cure: str = "name another file") -> Iterator[None]:
    """Turn an OSError of the block into a DtlibError with ``path``, the cause and a cure.

    Raises:
        DtlibError: in place of an OSError.
    """
    try:
        yield
    except OSError as problem:
        raise DtlibError(f"{path} cannot be written ({problem.strerror}): {cure}.") from None


def open_nonblocking(path: str, flags: int) -> int:
    """Open without waiting, for ``open(..., opener=open_nonblocking)``: a pipe without a reader raises OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def private_temp_folder(name: str) -> Iterator[Path]:
    """Yield a temporary folder of this process, ``dtlib-NAME-...``; remove folders that killed processes left behind.

    Only folders of this user that are at least a minute old are removed. A running process holds a lock on its folder.
    """
    import fcntl

    for left in Path(tempfile.gettempdir()).glob(f"dtlib-{name}-*"):
        with suppress(OSError), _opened(left, os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
            found = os.fstat(descriptor)
            if found.st_uid == os.getuid() and found.st_mtime < time.time() - 60:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"dtlib-{name}-") as folder, locked(Path(folder)):
        yield Path(folder)


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that one process at a time writes to it; without effect on disks without locks."""
    import fcntl  # Python in a browser has no fcntl

    with _opened(folder) as descriptor:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def is_plain_name(name: object) -> bool:
    """Return True if this names a file in its own folder, with characters that every disk accepts."""
    return isinstance(name, str) and bool(re.fullmatch(r"(?!\.+$)[\w .-]{1,200}", name, re.ASCII))
