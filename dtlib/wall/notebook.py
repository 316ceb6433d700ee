"""The learner's side of the wall: ``lab.join``, ``lab.leave``, and the messages in between.

A learner's state is one small file in the folder of the course, which all kernels there use. It is sent as a whole. So
after a restart the wall knows everything again after one message of each learner:

    check, predict, quiz, %%px  -- hooks.py  -->  a queue  -- a thread -->  .wall.json  -- message() -->  the wall

Without the file nothing is sent and no thread runs. No cell waits for the network, except for ``lab.join`` and
``lab.leave`` themselves, which take three seconds at most.
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
from IPython.core.interactiveshell import InteractiveShell

from dtlib.errors import DtlibError
from dtlib.files import read_json, write_atomically
from dtlib.lab import course, hooks
from dtlib.lab.tables import fold
from dtlib.wall.learner_state import ALIAS, applied, message
from dtlib.world import in_engine

FILE = ".wall.json"
MOST = 200  # unsent events at most
JOINED_SECONDS = 12 * 3600  # after this time the learner has left: the laptop may be in another network
HEARTBEAT_SECONDS = 5
BETWEEN_SECONDS = 0.5  # between two messages
ANSWER_SECONDS = 3
_ADDRESS = re.compile(r"(\w{4,12})@(?:(https?)://)?([\w.-]+(?::\d+)?|\[[\da-fA-F:]+\](?::\d+)?)(/[\w./-]*)?")

_events: queue.Queue = queue.Queue(MOST)
_thread = None
# In kernels: send the state again and again, so that the wall knows that the learner is present.
_beats = False


def join(where: str, alias: str) -> None:
    """Show your place in the course on an instructor's wall, until ``lab.leave()`` and for twelve hours at most.

    Args:
        where: the code and the address that the wall shows, such as "K7QF2MXB@192.168.1.20:8790".
        alias: your name on the wall, 1 to 24 characters; the wall gets no other name of you.

    Raises:
        DtlibError: if no wall answers, or if it refuses the code. Everything except the wall works without it.
    """
    if in_engine():
        raise DtlibError("lab.join belongs in a cell without %%px, because you join, and not each rank.")
    if not (found := _ADDRESS.fullmatch(str(where).strip())):
        raise DtlibError(f"lab.join({where!r}): write the code and the address in the form of the wall, CODE@ADDRESS.")
    alias = " ".join(str(alias).split())
    if not 1 <= len(alias) <= ALIAS or not alias.isprintable():
        raise DtlibError(f"The alias {alias[:40]!r} does not fit a tile: choose an alias of 1 to {ALIAS} letters.")
    code, scheme, host, path = found.groups()
    address = f"{scheme or 'http'}://{host}{(path or '').rstrip('/')}"
    try:
        token = _asked(address, "join", {"code": code})["token"]
    except Exception as problem:  # an error of the network, or of another server at this address
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
    """Leave the wall: your tile disappears, and nothing more is sent."""
    with _lock():
        note = _read()
        _file().unlink(missing_ok=True)
    if note:
        with suppress(OSError, ValueError):
            _asked(note["address"], "leave", {}, note["token"])
    if not quietly:
        print("You have left the wall." if note else "You are not on a wall: nothing is sent.")


def report(kind: str, **fields: object) -> None:
    """Queue an event for the wall that this learner has joined, if any. It never waits and never fails."""
    global _thread
    with suppress(Exception):
        if not _file().exists():
            return
        _events.put_nowait((time.time(), kind, fields))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_send_events, daemon=True, name="wall")
            _thread.start()


def follow(shell: InteractiveShell | None) -> None:
    """Make this kernel report the cells that it runs; a second call changes nothing."""
    global _beats
    if shell is None or getattr(shell, "kernel", None) is None or in_engine():
        return
    _beats = True
    shell.events.register("pre_run_cell", _begins)
    shell.events.register("post_run_cell", _ends)
    report("started")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Start reporting. IPython calls this in each kernel of ``dtlib lab``, because the kernelspec names this file."""
    follow(shell)


def _begins(info) -> None:
    report("cell", cell=getattr(info, "cell_id", None))


def _ends(result) -> None:
    report("ended", fine=bool(result.success))


def _send_events() -> None:
    """Send events in a thread: in kernels until the learner leaves, elsewhere until the queue is empty."""
    events: list = []
    while _beats or events or not _events.empty():
        with suppress(queue.Empty):
            events.append(_events.get(timeout=HEARTBEAT_SECONDS))
            while True:
                events.append(_events.get_nowait())
        del events[:-MOST]
        with suppress(Exception):  # after an error of the file or the network, try again later
            note, events = _noted(events), []
            if note is None:
                return
            try:
                _asked(note["address"], "tell", message(note["state"], time.time()), note["token"])
            except HTTPError as problem:
                if problem.code in (401, 403, 410):  # the token is from another day or another wall
                    return _forget(note)
        time.sleep(BETWEEN_SECONDS)


def _noted(events: list) -> dict | None:
    """Add events to the learner's state and return it; None if the learner has left the wall."""
    with _lock():
        note, now = _read(), time.time()
        if note is None or now - note["joined"] > JOINED_SECONDS:
            _file().unlink(missing_ok=True)
            return None
        state = note["state"]
        if state.get("runs") and not psutil.pid_exists(state["runs"]):  # the kernel was killed
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
    """Return the wall's answer. No proxy is used, because the wall is in the local network."""
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
    """Write the file completely or not at all (a kernel may be killed at any time), readable by its owner only."""
    write_atomically(_file(), json.dumps(note), 0o600)


hooks.listeners.append(report)
