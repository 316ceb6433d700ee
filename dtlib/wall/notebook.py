"""The wall, seen from a learner's notebooks: ``lab.join``, ``lab.leave``, and what is sent in between.

What is known of a learner stands in one small file in the folder of the course, which all its kernels share. It is
sent as a whole, so a wall that was started anew knows all about everybody after one message of each:

    check, predict, quiz, %%px  -- hooks.py  -->  a queue  -- a thread -->  .wall.json  -- message() -->  the wall

Without a file nothing is sent and no thread runs. Nothing here waits for the network while a cell runs, but for
``lab.join`` and ``lab.leave`` themselves, for three seconds at most.
"""

import json
import os
import queue
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import psutil
from filelock import FileLock

from dtlib.errors import DtlibError
from dtlib.files import read_json, write_whole
from dtlib.lab import course, hooks
from dtlib.lab.foreign import Shell
from dtlib.lab.tables import fold
from dtlib.wall.known import ALIAS, applied, message
from dtlib.world import in_engine

FILE = ".wall.json"
MOST = 200  # events that wait to be sent
JOINED_SECONDS = 12 * 3600  # then a learner has left without a word: the next network is another one
HEARTBEAT_SECONDS = 5
BETWEEN_SECONDS = 0.5  # two messages
ANSWER_SECONDS = 3
_ADDRESS = re.compile(r"(\w{4,12})@(?:(https?)://)?([\w.-]+(?::\d+)?|\[[\da-fA-F:]+\](?::\d+)?)(/[\w./-]*)?")

_events: queue.Queue = queue.Queue(MOST)
_thread = None
_beats = False  # in kernels: what is known is sent again and again, so that the wall knows who is there


def join(where: str, alias: str) -> None:
    """Show an instructor's wall where you are, until ``lab.leave()`` and for twelve hours at most.

    Args:
        where: the code and the address that the wall shows, such as "K7QF2MXB@192.168.1.20:8790".
        alias: what you want to be called there, 1 to 24 letters; the wall knows no other name of you.

    Raises:
        DtlibError: where no wall answers, or it refuses the code. All but the wall works without it.
    """
    if in_engine():
        raise DtlibError("lab.join belongs in a cell without %%px, because you join, and not each rank.")
    found = _ADDRESS.fullmatch(str(where).strip())
    if not found:
        raise DtlibError(f"lab.join({where!r}): write the code and the address in the form of the wall, CODE@ADDRESS.")
    alias = " ".join(str(alias).split())
    if not 1 <= len(alias) <= ALIAS or not alias.isprintable():
        raise DtlibError(f"The alias {alias[:40]!r} does not fit a tile: choose one of 1 to {ALIAS} letters.")
    code, scheme, host, path = found.groups()
    address = f"{scheme or 'http'}://{host}{(path or '').rstrip('/')}"
    try:
        token = _asked(address, "join", {"code": code})["token"]
    except Exception as problem:  # of the network, or of whatever else answers there
        why = {403: f"refuses the code {code!r}", 429: "receives too many requests: try again in a minute"}
        if (status := getattr(problem, "code", None)) in why:
            raise DtlibError(f"The wall at {address} {why[status]}.") from None
        raise DtlibError(
            f"No wall answers at {address} ({problem}): ask for its address; everything else works without it."
        ) from None
    from IPython import get_ipython

    now = time.time()
    note = {"address": address, "token": token, "joined": now, "state": {"alias": alias, "last": now}}
    leave(quietly=True)
    with _lock():
        _write(note)
    follow(get_ipython())
    report("started")
    print(fold(
        f"You are {alias!r} on the wall at {address}. Until lab.leave() the wall receives: your current cell of the "
        "course, results of checks, the rank for which your ranks wait, your predictions and quiz answers. No name, "
        f"code or output is sent; {FILE} in the folder of the course has everything that is sent."
    ))  # fmt: skip


def leave(quietly: bool = False) -> None:
    """Leave the wall: your tile goes, and nothing is sent any more."""
    with _lock():
        note = _read()
        _file().unlink(missing_ok=True)
    if note:
        with suppress(OSError, ValueError):
            _asked(note["address"], "leave", {}, note["token"])
    if not quietly:
        print("You have left the wall." if note else "You are not on a wall: nothing is sent.")


def report(kind: str, **fields: object) -> None:
    """Note what has happened, for the wall that this learner has joined, if any. It never waits and never fails."""
    global _thread
    with suppress(Exception):
        if not _file().exists():
            return
        _events.put_nowait((time.time(), kind, fields))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_send_what_comes, daemon=True, name="wall")
            _thread.start()


def follow(shell: "Shell | None") -> None:
    """Have this kernel report which cells it runs; a second time changes nothing."""
    global _beats
    if shell is None or getattr(shell, "kernel", None) is None or in_engine():
        return
    _beats = True
    shell.events.register("pre_run_cell", _begins)
    shell.events.register("post_run_cell", _ends)
    report("started")


def load_ipython_extension(shell: Shell) -> None:
    """IPython calls this in each kernel of ``dtlib lab``, whose kernelspec names this file."""
    follow(shell)


def _begins(info) -> None:
    report("cell", cell=getattr(info, "cell_id", None))


def _ends(result) -> None:
    report("ended", fine=bool(result.success))


def _send_what_comes() -> None:
    """In the background, as long as this learner is on a wall; outside of kernels until all is sent."""
    wait = HEARTBEAT_SECONDS
    while _beats or not _events.empty():
        events = []
        with suppress(queue.Empty):
            events.append(_events.get(timeout=wait))
            while True:
                events.append(_events.get_nowait())
        with suppress(Exception):  # whatever is wrong with the file or the network, there is a next time
            if (note := _noted(events)) is None:
                return
            try:
                _asked(note["address"], "tell", message(note["state"], time.time()), note["token"])
            except HTTPError as problem:
                if problem.code in (401, 403, 410):  # of another day, or another wall
                    return _forget(note)
        time.sleep(BETWEEN_SECONDS)


def _noted(events: list) -> dict | None:
    """What is known with these events; None where this learner is on no wall any more."""
    with _lock():
        note, now = _read(), time.time()
        if note is None or now - note["joined"] > JOINED_SECONDS:
            _file().unlink(missing_ok=True)
            return None
        state = note["state"]
        if state.get("runs") and not psutil.pid_exists(state["runs"]):  # a kernel that was killed
            events = [(now, "started", {}), *events]
        for when, kind, fields in events:
            applied(state, when, kind, fields, os.getpid())
        if events:
            _write(note)
        return note


def _forget(note: dict) -> None:
    with _lock():
        if (_read() or {}).get("token") == note["token"]:
            _file().unlink(missing_ok=True)


def _asked(address: str, what: str, body: dict, token: str = "") -> dict:
    """What the wall answers. Not through a proxy: the wall is near."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = Request(f"{address}/{what}", json.dumps(body).encode(), headers)
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_SECONDS) as answer:
        return json.loads(answer.read(10_000))


def _file() -> Path:
    return course.folder() / FILE


def _lock() -> FileLock:
    return FileLock(_file().with_suffix(".lock"), timeout=ANSWER_SECONDS)


def _read() -> dict | None:
    with suppress(OSError, ValueError):
        return read_json(_file(), dict)
    return None


def _write(note: dict) -> None:
    """For its owner's eyes alone, and never half: a kernel may be killed at any time."""
    write_whole(_file(), json.dumps(note), 0o600)


hooks.listeners.append(report)
