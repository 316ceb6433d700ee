"""Functions that a notebook calls on its engines."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

MOST_NAMES = 500


_joined: dict[str, str | None] = {}  # this rank's device, after it has joined


def join(ready_folder: str, notebook_folder: str) -> dict:
    """Join the world, import torch in the background, and return the facts about this rank."""
    from dtlib.lab.engines import cells
    from dtlib.world import init, reset
    from dtlib.world.machine import usable_cores

    with suppress(OSError):  # the folder may not exist on another machine
        os.chdir(notebook_folder)
    first_time = not _joined
    world = init() if first_time else reset()
    if first_time:
        cells.follow()
        _joined["device"] = _take_gpu(world.local_rank)
        threading.Thread(target=_import_torch, args=(ready_folder,), daemon=True).start()
    return {
        "rank": world.rank, "size": world.size, "host": socket.gethostname(), "pid": os.getpid(),
        "device": _joined["device"], "cores": usable_cores(),
    }  # fmt: skip


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
