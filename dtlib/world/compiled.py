"""Compile the small C files in this folder, on first use."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from dtlib.errors import DtlibError

SECONDS = 20


def compiled(name: str, *options: str) -> Path:
    """Compile the C file ``name``, or find it compiled; return the path in a folder that only this user can write.

    Raises:
        DtlibError: if it cannot be compiled; the message says why.
    """
    source = Path(__file__).with_name(name)
    made_of = f"{source.read_text()} {options} {platform.machine()} {platform.libc_ver()}"
    ending = ".so" if "-shared" in options else ""
    path = _private_folder() / f"{source.stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}{ending}"
    try:
        if not path.exists():
            _compile(source, path, options)
    except OSError as problem:
        raise DtlibError(f"{path} cannot be built ({problem})") from None
    return path


def _compile(source: Path, path: Path, options: tuple[str, ...]) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise DtlibError("there is no C compiler on PATH, such as gcc")
    # Two processes may compile at once, so each writes its own file and renames it.
    unfinished = path.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O1", "-pipe", *options, "-o", str(unfinished), str(source), "-ldl"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        if ran.returncode:
            said = (ran.stderr.strip() or f"status {ran.returncode}").splitlines()[-1]
            raise DtlibError(f"{compiler} does not compile {source.name} ({said})")
        unfinished.replace(path)
    except subprocess.TimeoutExpired:
        raise DtlibError(f"{compiler} took longer than {SECONDS} s") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _private_folder() -> Path:
    """Return a folder that only this user can write. Its name has no space or colon, which LD_PRELOAD cannot hold."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    for folder in (Path(cache).expanduser() / "dtlib", Path(tempfile.gettempdir()) / f"dtlib-{os.getuid()}"):
        if not folder.is_absolute() or any(letter.isspace() or letter == ":" for letter in str(folder)):
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError:
            continue
        others_may_write = status.st_mode & 0o022
        if status.st_uid == os.getuid() and folder.is_dir() and not others_may_write and os.access(folder, os.W_OK):
            return folder
    raise DtlibError("there is no private folder for it: set XDG_CACHE_HOME to a folder without spaces in its name")
