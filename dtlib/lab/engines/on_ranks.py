"""What a notebook asks of each rank: functions that run on the engines."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

MOST_NAMES = 500


_joined: dict[str, str | None] = {}  # this rank's device, once it has joined


def join(ready_folder: str, notebook_folder: str) -> dict:
    """Join the world, start importing torch in the background, and say who this rank is."""
    from dtlib.lab.engines import cells
    from dtlib.world import init, reset
    from dtlib.world.machine import usable_cores

    with suppress(OSError):  # on another machine the folder may not be there
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


def names() -> list[str]:
    """The names that cells have made on this rank."""
    from IPython import get_ipython

    shell = get_ipython()
    return [name for name in shell.user_ns if name not in shell.user_ns_hidden and not name.startswith("_")]


def reset() -> int:
    """``dtlib.reset()``; its world stays where it is."""
    from dtlib.world import reset

    return reset().rank


def complete(line: str, position: int) -> tuple[str, list[str]]:
    """The fragment before this position of a line, and the names that it may become on this rank."""
    from IPython import get_ipython

    shell = get_ipython()
    shell.Completer.use_jedi = False  # which would take seconds to load
    fragment, names = shell.complete("", line, position)
    return fragment, list(names)[:MOST_NAMES]


def inspect(name: str, detail_level: int) -> dict:
    """What ``name?`` says on this rank, as MIME types; nothing where there is no such name."""
    from IPython import get_ipython

    try:
        return get_ipython().object_inspect_mime(name, detail_level=detail_level)
    except KeyError:
        return {}


def _take_gpu(local_rank: int) -> str:
    """Give this rank a GPU of its own, or a share of one, before torch looks: there it is ``cuda:0``, the only one."""
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
