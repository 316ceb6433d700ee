"""Files of a wall on the instructor's machine: its code and keys, valid for a day."""

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jupyter_core.paths import jupyter_data_dir

from dtlib.files import read_json, write_atomically, writing

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # no letters that look alike
CODE = 8  # letters: at 2,000 guesses per second, all day, it is found once in 6,000 days
SECRET_SECONDS = 24 * 3600


def folder() -> Path:
    """Return the folder of the codes, readable by its owner only."""
    found = Path(jupyter_data_dir()) / "dtlib-wall"
    with writing(found, "name another folder in JUPYTER_DATA_DIR"):
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        found.chmod(0o700)
    return found


def secret_of(port: int) -> dict:
    """Return code, key and secret of the wall on a port: those of an earlier start within a day, or new ones."""
    path = folder() / f"{port}.json"
    with suppress(OSError, ValueError, LookupError, TypeError, OverflowError):
        found = read_json(path, dict)
        words = all(isinstance(found[name], str) for name in ("code", "key", "secret"))
        if words and 0 <= time.time() - found["made"] < SECRET_SECONDS:
            return found
    code = "".join(secrets.choice(LETTERS) for _ in range(CODE))
    found = {"made": time.time(), "code": code, "key": secrets.token_urlsafe(16), "secret": secrets.token_hex(32)}
    _write(path, found)
    return found


@contextmanager
def page_file(port: int, address: str) -> Iterator[str]:
    """Yield the address of a temporary file that redirects a browser to the page.

    The page's key stays in this file, which only its owner can read. In the browser's command line, every user of the
    machine could see the key.
    """
    path = folder() / f"{port}.html"
    _write(path, f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={address}">')
    try:
        yield path.as_uri()
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, content: dict | str) -> None:
    """Write a file completely or not at all, readable by its owner only."""
    with writing(path, "name another file or folder"):
        write_atomically(path, content if isinstance(content, str) else json.dumps(content), 0o600)
