"""Files that are written whole, and files that somebody else may have written."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

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
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no ordinary file")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size:,} bytes, and {most:,} are expected at most")
        return file.read().decode()


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
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time write to a folder; on a disk that knows no locks this does nothing."""
    import fcntl  # which Python in a browser does not have

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_plain_name(name: object) -> bool:
    """Whether this names a file in its folder, and none elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
