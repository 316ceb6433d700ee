"""What a notebook asks of each rank: functions that run on the engines."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path


def join(ready_folder: str, notebook_folder: str) -> dict:
    """Join the world, start importing torch in the background, and say who this rank is."""
    from dtlib.launch import usable_cores
    from dtlib.world import init, reset

    with suppress(OSError):  # on another machine the folder may not be there
        os.chdir(notebook_folder)
    first_time = not hasattr(join, "importing_torch")
    world = init() if first_time else reset()
    if first_time:
        join.importing_torch = threading.Thread(target=_import_torch, args=(ready_folder, world), daemon=True)
        join.importing_torch.start()
    return {
        "rank": world.rank,
        "size": world.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": world.device_name,
        "cores": usable_cores(),
    }


def _import_torch(ready_folder: str, world) -> None:
    import torch

    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    (Path(ready_folder) / f"torch-{os.getpid()}").touch()
