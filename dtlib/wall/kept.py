"""What a wall leaves on the instructor's machine: its codes for a day, and the room where ``--keep`` asks for it."""

import json
import secrets
import time
from contextlib import suppress
from pathlib import Path

from jupyter_core.paths import jupyter_data_dir

from dtlib.errors import DtlibError
from dtlib.files import read_json, write_whole
from dtlib.wall.room import Room, checked

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # those that nobody mixes up
SECRET_SECONDS = 24 * 3600
FORM = "dtlib wall 1"  # how a file that was kept begins


def folder() -> Path:
    """Where codes are, for their owner alone."""
    found = Path(jupyter_data_dir()) / "dtlib-wall"
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        found.chmod(0o700)
    except OSError as problem:
        raise DtlibError(f"{found} cannot be made ({problem.strerror}): name another in JUPYTER_DATA_DIR.") from None
    return found


def secret_of(port: int) -> dict:
    """Code, key and secret of the wall on a port: those of today, if it was started before."""
    path = folder() / f"{port}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        found = read_json(path, dict)
        if 0 <= time.time() - found["made"] < SECRET_SECONDS:
            return found
    code = "".join(secrets.choice(LETTERS) for _ in range(6))
    found = {"made": time.time(), "code": code, "key": secrets.token_urlsafe(16), "secret": secrets.token_hex(32)}
    _write(path, found)
    return found


def save(room: Room, path: Path) -> None:
    _write(path, {"form": FORM, "learners": room.learners, "left": sorted(room.left)})


def load(room: Room, path: Path) -> None:
    """What was kept, if anything was."""
    if path.exists():
        room.learners, room.left = _kept(path)
    save(room, path)  # or it is said now that this cannot be


def delete(path: Path | None) -> int:
    """Delete what a wall kept, and the codes of all walls: who joined one cannot speak to the next."""
    if path:
        _kept(path)
        path.unlink()
    codes = list(folder().glob("*.json"))
    for each in codes:
        each.unlink()
    what = f"{path} and {len(codes)}" if path else f"{len(codes)}"
    print(f"Deleted: {what} code{'s' * (len(codes) != 1)} of walls. One that still runs keeps its own until it ends.")
    return 0


def _kept(path: Path) -> tuple[dict, set]:
    try:
        found = read_json(path, dict)
        if found["form"] == FORM:
            learners = {
                number: (checked(message), float(when)) for number, (message, when) in found["learners"].items()
            }
            return learners, set(found["left"])
    except OSError as problem:
        raise DtlibError(f"{path} cannot be read ({problem.strerror}): name the file that --keep named.") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise DtlibError(f"{path} was not made by dtlib wall, so it is left alone: name the file that --keep named.")


def _write(path: Path, content: dict) -> None:
    """For its owner's eyes alone, and never half."""
    try:
        write_whole(path, json.dumps(content), 0o600)
    except OSError as problem:
        raise DtlibError(f"{path} cannot be written ({problem.strerror}): name another file or folder.") from None
