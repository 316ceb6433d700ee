"""What a notebook asks of each rank: functions that run on the engines."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path


def join(ready_folder: str, notebook_folder: str) -> dict:
    """Join the world, start importing torch in the background, and say who this rank is."""
    from dtlib.machine import usable_cores
    from dtlib.world import init, reset

    with suppress(OSError):  # on another machine the folder may not be there
        os.chdir(notebook_folder)
    first_time = not hasattr(join, "importing_torch")
    world = init() if first_time else reset()
    if first_time:
        join.device = _take_gpu(world.local_rank)
        join.importing_torch = threading.Thread(target=_import_torch, args=(ready_folder,), daemon=True)
        join.importing_torch.start()
    return {
        "rank": world.rank,
        "size": world.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": join.device,
        "cores": usable_cores(),
    }


def _take_gpu(local_rank: int) -> str:
    """Give this rank a GPU of its own, or a share of one, before torch looks: there it is ``cuda:0``, the only one."""
    from dtlib.machine import visible_gpus

    gpus = visible_gpus()
    if not gpus:
        return "cpu"
    mine = gpus[local_rank % len(gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = mine
    return f"GPU {mine}"


def _import_torch(ready_folder: str) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    (Path(ready_folder) / f"torch-{os.getpid()}").touch()
