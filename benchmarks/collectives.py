"""How fast are collectives from sends and receives: against MPI's own and gloo's, from 4 kB to 100 MB."""

import numpy as np
import torch

from benchmarks.compare import compare

RANKS = 2
SIZES = {"4 kB": 2**12, "64 kB": 2**16, "1 MB": 2**20, "4 MB": 2**22, "25 MB": 25 * 2**20, "100 MB": 100 * 2**20}


def rows(world, repeats: int):
    comm = world.comm
    gloo = _gloo(world)
    for name, count in SIZES.items():
        tensor = torch.zeros(count // 4)
        flat = tensor.numpy()
        times = _calls_for(count)
        ours = _repeated(lambda tensor=tensor: comm.all_reduce(tensor), times)
        raw = _repeated(lambda flat=flat: comm.mpi.Allreduce(_in_place(), flat), times)
        yield compare(comm, f"all_reduce {name}", "MPI Allreduce", ours, raw, repeats)
        theirs = _repeated(lambda tensor=tensor: torch.distributed.all_reduce(tensor, group=gloo), times)
        yield compare(comm, f"all_reduce {name}", "gloo", ours, theirs, repeats)
    yield from _reduce_scatter(comm, gloo, repeats)
    if comm.size == 2:
        yield _send_and_receive(comm, repeats)


def _reduce_scatter(comm, gloo, repeats):
    tensor = torch.zeros(SIZES["25 MB"] // 4 // comm.size * comm.size)
    out = torch.zeros(len(tensor) // comm.size)

    def ours():
        comm.reduce_scatter(out, tensor)

    def mpi():
        comm.mpi.Reduce_scatter_block(tensor.numpy(), out.numpy())

    def with_gloo():
        torch.distributed.reduce_scatter_tensor(out, tensor, group=gloo)

    yield compare(comm, "reduce_scatter 25 MB", "MPI Reduce_scatter_block", ours, mpi, repeats)
    yield compare(comm, "reduce_scatter 25 MB", "gloo reduce_scatter_tensor", ours, with_gloo, repeats)


def _send_and_receive(comm, repeats):
    """One direction, against a copy of as many bytes on the sending rank."""
    tensor, copy = torch.zeros(SIZES["25 MB"] // 4), torch.zeros(SIZES["25 MB"] // 4)

    def ours():
        comm.send(tensor, 1) if comm.rank == 0 else comm.recv(tensor, 0)

    def plain_copy():
        if comm.rank == 0:
            np.copyto(copy.numpy(), tensor.numpy())

    return compare(comm, "send and recv 25 MB", "plain memory copy", ours, plain_copy, repeats)


def _calls_for(count: int) -> int:
    """How often a small call is repeated within one timing, so that the clock is not what is measured."""
    return max(1, min(100, 2**18 // count))


def _repeated(call, times: int):
    def repeated():
        for _ in range(times):
            call()

    return repeated


def _in_place():
    from mpi4py import MPI

    return MPI.IN_PLACE


def _gloo(world):
    """A torch process group of the same ranks. Its store listens on a port that the system chooses."""
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    port = world.comm.broadcast_object(store.port if store else None)
    store = store or distributed.TCPStore("127.0.0.1", port)
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return distributed.group.WORLD
