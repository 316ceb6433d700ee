"""How fast are collectives from sends and receives: against MPI's own and gloo's, from 4 kB to 100 MB.

On two ranks; with ``--ranks 4`` more ranks than this machine may have cores for.
"""

import numpy as np
import torch

from benchmarks.compare import compare, in_turns, repeated, row
from benchmarks.peers import torch_group

RANKS = 2
SIZES = {
    "4 kB": 2**12,
    "16 kB": 2**14,
    "64 kB": 2**16,
    "1 MB": 2**20,
    "4 MB": 2**22,
    "25 MB": 25 * 2**20,
    "100 MB": 100 * 2**20,
}


def rows(world, repeats: int):
    comm = world.comm
    bare = comm.mpi.Dup()  # without our waits
    gloo = torch_group(world)
    for name, count in SIZES.items():
        tensor = torch.zeros(count // 4)
        flat = tensor.numpy()
        times = _calls_for(count)
        ours = repeated(lambda tensor=tensor: comm.all_reduce(tensor), times)
        raw = repeated(lambda flat=flat: bare.Allreduce(_in_place(), flat), times)
        yield compare(comm, f"all_reduce {name}", "MPI Allreduce", ours, raw, repeats)
        theirs = repeated(lambda tensor=tensor: torch.distributed.all_reduce(tensor, group=gloo), times)
        yield compare(comm, f"all_reduce {name}", "gloo", ours, theirs, repeats)
    yield from _in_a_notebook(comm, repeats)
    yield from _reduce_scatter(comm, gloo, repeats)
    if comm.size == 2:
        yield _send_and_receive(comm, repeats)


def _in_a_notebook(comm, repeats):
    """Short operations with what a notebook's cells have on: a time limit, the board, and verification."""
    notebook, bare = comm.split(0), comm.mpi.Dup()
    notebook.time_limit, notebook.verify = 30, True
    count = SIZES["4 kB"]
    tensor, out = torch.zeros(count // 4), torch.zeros(count // 4 * comm.size)
    raw = repeated(lambda: bare.Allreduce(_in_place(), tensor.numpy()), _calls_for(count))
    operations = {
        "all_reduce 4 kB": lambda group: group.all_reduce(tensor),
        "all_gather 4 kB": lambda group: group.all_gather(out, tensor),
        "broadcast 4 kB": lambda group: group.broadcast(tensor),
        "barrier": lambda group: group.barrier(),
    }
    for name, operation in operations.items():
        ours = repeated(lambda operation=operation: operation(notebook), _calls_for(count))
        plainly = repeated(lambda operation=operation: operation(comm), _calls_for(count))
        seconds = in_turns(comm, {"ours": ours, "script": plainly, "raw": raw}, repeats)
        yield row(f"{name} as in a notebook", "MPI Allreduce 4 kB", seconds["ours"], seconds["raw"])
        yield row(f"{name} as in a notebook", "as in a script", seconds["ours"], seconds["script"])


def _reduce_scatter(comm, gloo, repeats):
    tensor = torch.zeros(SIZES["25 MB"] // 4 // comm.size * comm.size)
    out, bare = torch.zeros(len(tensor) // comm.size), comm.mpi.Dup()

    def ours():
        comm.reduce_scatter(out, tensor)

    def mpi():
        bare.Reduce_scatter_block(tensor.numpy(), out.numpy())

    def with_gloo():
        torch.distributed.reduce_scatter_single(out, tensor, group=gloo)

    yield compare(comm, "reduce_scatter 25 MB", "MPI Reduce_scatter_block", ours, mpi, repeats)
    yield compare(comm, "reduce_scatter 25 MB", "gloo reduce_scatter_single", ours, with_gloo, repeats)


def _send_and_receive(comm, repeats):
    """One direction, against a copy of as many bytes on the sending rank."""
    # Ones: memory that was never written to is one page of zeros over and over, and quick to read.
    tensor, copy = torch.ones(SIZES["25 MB"] // 4), torch.ones(SIZES["25 MB"] // 4)

    def ours():
        comm.send(tensor, 1) if comm.rank == 0 else comm.recv(tensor, 0)

    def plain_copy():
        if comm.rank == 0:
            np.copyto(copy.numpy(), tensor.numpy())

    return compare(comm, "send and recv 25 MB", "plain memory copy", ours, plain_copy, repeats)


def _calls_for(count: int) -> int:
    """How often a small call is repeated within one timing, so that the clock is not what is measured."""
    return max(1, min(100, 2**18 // count))


def _in_place():
    from mpi4py import MPI

    return MPI.IN_PLACE
