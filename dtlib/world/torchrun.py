"""Join a world that torchrun started: with torch.distributed, without MPI."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from dtlib.comm.watch import board
from dtlib.world import loopback
from dtlib.world.machine import usable_cores

if TYPE_CHECKING:
    from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator


# Variables that torchrun sets for each process. A program that sets only WORLD_SIZE was not started by torchrun.
REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def started_this() -> bool:
    """Return True in a process that torchrun, or a launcher with the same variables, has started."""
    return all(name in os.environ for name in REQUIRED_VARIABLES)


def join() -> dict:
    """Return the arguments of ``World``, from the environment and the default group of ``torch.distributed``.

    If the program has a default group, it is used. Otherwise one is created: gloo for CPUs, and NCCL for GPUs if every
    rank has a separate GPU.
    """
    from torch import distributed as dist

    from dtlib.comm import waiting
    from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator

    if loopback.all_ranks_here():
        loopback.use_loopback_for_groups()
    if not dist.is_initialized():
        _make_default_group(dist)
    env = os.environ
    # DeepSpeed's launcher uses other names for the number of ranks on a node and for the node's index.
    local_rank, local_size = int(env["LOCAL_RANK"]), int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", 1)))
    waiting.oversubscribed = local_size > usable_cores()
    assert dist.group.WORLD is not None
    comm = ProcessGroupCommunicator(dist.group.WORLD, name="world")
    node = int(env.get("GROUP_RANK", env.get("CROSS_RANK", comm.rank // local_size)))
    nodes = sorted(set(comm.all_gather_object(node)))
    # With several nodes there is no file that all ranks can read, and so no board.
    if len(nodes) == 1 < comm.size:
        file = comm.broadcast_object(board.Board.make_file(comm.size) if comm.rank == 0 else None)
        board.current = board.Board(file, comm.rank, comm.members)
        comm.barrier()
        if comm.rank == 0:
            os.unlink(file)  # all ranks have opened it
    return {
        "rank": comm.rank, "size": comm.size, "node": nodes.index(node), "local_rank": local_rank, "comm": comm,
        "nodes": len(nodes),
    }  # fmt: skip


def fresh_communicator(old: ProcessGroupCommunicator) -> ProcessGroupCommunicator:
    """Return a communicator over a new group of all ranks, after an interrupt or an error broke the old one."""
    from torch import distributed as dist

    from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator

    return ProcessGroupCommunicator(dist.new_group(), old.time_limit, name="world")


def _make_default_group(dist) -> None:
    store, rank, size = next(dist.rendezvous("env://"))
    store.set_timeout(dist.default_pg_timeout)
    store = dist.PrefixStore("dtlib", store)  # the launcher and other programs have keys in the same store
    backend = "cpu:gloo,cuda:nccl" if _nccl_connects(dist, store, rank, size) else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _nccl_connects(dist, store, rank: int, size: int) -> bool:
    """Return whether NCCL can connect all ranks.

    Ranks exchange their GPUs through the store, because there is no group yet.
    """
    import json

    import torch

    from dtlib.comm.torch.nccl import gpu_of, why_not

    mine = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        mine = gpu_of(device)
    store.set(f"gpu of rank {rank}", json.dumps(mine))
    return not why_not([json.loads(store.get(f"gpu of rank {other}")) for other in range(size)])
