"""Files that are written whole, and files that somebody else may have written."""

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


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file as a whole or not at all: a reader, and whoever kills this, finds the old file or the new one.

    Raises:
        OSError: where it cannot be written; then the old file is as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # on a full disk some systems say so here first
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def read_text(path: Path, most: int = 2**26) -> str:
    """Read a text file of at most ``most`` bytes; a pipe or a device is refused, because reading it may never end.

    Raises:
        OSError: where there is no such file, or it cannot be read.
        ValueError: for anything else than an ordinary file of that size with text in it.
    """
    with open(path, "rb", opener=opened_to_read) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"it has {size:,} bytes, and {most:,} are expected at most")
        return file.read().decode()


def opened_to_read(path: str, flags: int = os.O_RDONLY) -> int:
    """For ``open(..., opener=opened_to_read)``: what is no ordinary file is refused, as reading it may never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise io.UnsupportedOperation(errno.EINVAL, "it is no ordinary file", path)
    return descriptor


def read_json(path: Path, kind: type[K], most: int = 2**26) -> K:
    """Read JSON of this ``kind`` (dict, list, ...).

    Raises:
        OSError: as ``read_text``.
        ValueError: as ``read_text``, and for what is no JSON or of another kind.
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
    """Around what writes to ``path``: an error of the system becomes a sentence with the path, its cause and a cure.

    Raises:
        DtlibError: in place of an OSError.
    """
    try:
        yield
    except OSError as problem:
        raise DtlibError(f"{path} cannot be written ({problem.strerror}): {cure}.") from None


def refuse_to_wait(path: str, flags: int) -> int:
    """For ``open(..., opener=refuse_to_wait)``: a pipe that nobody reads is an OSError, and no wait for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def own_folder(name: str) -> Iterator[Path]:
    """A temporary folder of this process, ``dtlib-NAME-...``. Those of processes of this user that were killed are
    removed, if they are a minute old: a living one holds the lock of its own."""
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
    """Let one process at a time write to a folder; on a disk that knows no locks this does nothing."""
    import fcntl  # which Python in a browser does not have

    with _opened(folder) as descriptor:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def is_plain_name(name: object) -> bool:
    """Whether this names a file in its folder, and none elsewhere, in letters that every disk takes."""
    return isinstance(name, str) and bool(re.fullmatch(r"(?!\.+$)[\w .-]{1,200}", name, re.ASCII))
