"""What a notebook asks of each rank: functions that run on the engines."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path


def join(ready_folder: str, notebook_folder: str) -> dict:
    """Join the world, start importing torch in the background, and say who this rank is."""
    from dtlib.world import init, reset
    from dtlib.world.machine import usable_cores

    with suppress(OSError):  # on another machine the folder may not be there
        os.chdir(notebook_folder)
    first_time = not hasattr(join, "importing_torch")
    world = init() if first_time else reset()
    if first_time:
        _tell_whom_everybody_waits_for()
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


def _tell_whom_everybody_waits_for() -> None:
    """Have this rank tell the notebook when it waits for long, and the board what became of its cells."""
    from ipyparallel.engine.datapub import publish_data
    from IPython import get_ipython

    from dtlib.comm import waiting
    from dtlib.comm.watch import board

    def say_how_it_ended(result):
        error = result.error_before_exec or result.error_in_exec
        board.publish(f"raised {type(error).__name__}: {error}"[:120] if error else "has finished its cell")

    waiting.notice = lambda sentence: publish_data({"waiting": sentence})
    events = get_ipython().events
    events.register("pre_run_cell", lambda _: board.publish("has called no operation in this cell yet"))
    events.register("post_run_cell", say_how_it_ended)


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
    (Path(ready_folder) / f"torch-{os.getpid()}").touch()
