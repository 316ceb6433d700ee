"""Functions that a notebook calls on its engines."""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from dtlib.errors import PeerFailed, WaitTimeout

MOST_NAMES = 500
TELL_SECONDS = 1.0


_joined: dict[str, str | None] = {}  # this rank's device, after it has joined


def join(ready_folder: str, notebook_folder: str) -> dict:
    """Join the world, import torch in the background, and return the facts about this rank."""
    from dtlib.world import init, reset
    from dtlib.world.machine import usable_cores

    with suppress(OSError):  # the folder may not exist on another machine
        os.chdir(notebook_folder)
    first_time = not _joined
    world = init() if first_time else reset()
    if first_time:
        _follow_cells()
        _joined["device"] = _take_gpu(world.local_rank)
        threading.Thread(target=_import_torch, args=(ready_folder,), daemon=True).start()
    return {
        "rank": world.rank, "size": world.size, "host": socket.gethostname(), "pid": os.getpid(),
        "device": _joined["device"], "cores": usable_cores(),
    }  # fmt: skip


def names() -> list[str]:
    """Return the names that cells have defined on this rank."""
    from IPython import get_ipython

    shell = get_ipython()
    return [name for name in shell.user_ns if name not in shell.user_ns_hidden and not name.startswith("_")]


def reset() -> int:
    """Call ``dtlib.reset()`` and return this rank; the ``World`` object does not pickle."""
    from dtlib.world import reset

    return reset().rank


def complete(line: str, position: int) -> tuple[str, list[str]]:
    """Return the fragment before ``position`` in a line, and the names on this rank that complete it."""
    from IPython import get_ipython

    shell = get_ipython()
    shell.Completer.use_jedi = False  # jedi takes seconds to load
    fragment, names = shell.complete("", line, position)
    return fragment, list(names)[:MOST_NAMES]


def inspect(name: str, detail_level: int) -> dict:
    """Return what ``name?`` shows on this rank, as MIME types; empty for an unknown name."""
    from IPython import get_ipython

    try:
        return get_ipython().object_inspect_mime(name, detail_level=detail_level)
    except KeyError:
        return {}


def _follow_cells() -> None:
    """Report this rank's current line and waits to the notebook, and the end of each cell to the board."""
    from ipyparallel.engine.datapub import publish_data
    from IPython import get_ipython

    from dtlib.comm import waiting
    from dtlib.comm.watch import board

    shell, running = get_ipython(), threading.Event()
    execute = shell.kernel.do_execute

    async def do_execute(*args, **kwargs):
        """Run a cell with the notebook's cell number, which the notebook sends as the label."""
        board.cell = shell.kernel.get_parent().get("metadata", {}).get("label") or ""
        if (number := board.cell.partition(".")[0]).isdigit():
            shell.execution_count = int(number)
        return await execute(*args, **kwargs)

    def begin(_):
        board.publish("has called no operation in this cell yet")
        running.set()

    def end(result):
        running.clear()
        error = result.error_before_exec or result.error_in_exec
        if error is None:
            board.end_cell("has finished its cell")
        elif isinstance(error, PeerFailed | WaitTimeout):
            board.end_cell("timed out")  # so that other ranks also name the missing rank
        else:
            board.end_cell(f"raised {type(error).__name__}: {error}"[:120])

    shell.kernel.do_execute = do_execute
    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", end)
    waiting.notice = lambda sentence: publish_data({"waiting": sentence})
    threading.Thread(target=_tell_where, args=(running, publish_data), daemon=True).start()


def _tell_where(running, publish) -> None:
    """Report every second in which line of a cell this rank is."""
    from dtlib.comm.call import line_of

    main = threading.main_thread().ident
    while running.wait():
        time.sleep(TELL_SECONDS)
        frame, place = sys._current_frames().get(main or 0), None
        # Release each frame at once: a frame keeps its function's tensors alive, even after the function has returned.
        while frame is not None:
            if "ipykernel_" in frame.f_code.co_filename:  # the outermost such frame is the cell
                place = frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        if running.is_set() and place is not None:
            publish({"line": line_of(*place), "waits": _waits()})


def _waits() -> tuple[str, list[int]] | None:
    """Return the operation in which this rank waits and the missing ranks; None if it does not wait."""
    from dtlib.comm.watch import blame, board

    if board.current is None:
        return None
    me, seen = board.current.rank, board.current.seen()
    if me not in seen or seen[me].state != "waits":
        return None
    return seen[me].operation, blame.missing(me, seen)


def _take_gpu(local_rank: int) -> str:
    """Assign a GPU to this rank, possibly shared, before torch starts: the rank sees only this one, as ``cuda:0``."""
    from dtlib.world.machine import visible_gpus

    gpus = visible_gpus()
    if not gpus:
        return "cpu"
    mine = gpus[local_rank % len(gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = mine
    return f"GPU {mine}"


def _import_torch(ready_folder: str) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    (Path(ready_folder) / f"torch-{socket.gethostname()}-{os.getpid()}").touch()
