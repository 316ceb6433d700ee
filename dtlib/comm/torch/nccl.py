"""CUDA tensors in a communicator over MPI: through NCCL, or through host memory.

    every rank has a GPU of its own      GPU ----------- NCCL ----------- GPU
    ranks share one, or no NCCL          GPU -> pinned host memory -> MPI -> pinned host memory -> GPU

Which of the two is decided once a communicator, at its first collective on a CUDA tensor, and alike on all ranks. A
send or a receive always goes through host memory: its two ends cannot know whether the other ranks have decided yet.
So does a collective with ``algorithm=``, as that choice is one of messages over MPI.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from dtlib.comm.objects import ObjectOperations

if TYPE_CHECKING:
    from dtlib.comm.torch.process_group import ProcessGroupCommunicator


def nccl_communicator(comm: ObjectOperations, device: torch.device) -> ProcessGroupCommunicator | None:
    """A communicator over NCCL of the same ranks, or None where they share a GPU; all ranks call it together."""
    from dtlib.comm.torch.group_work import make_group
    from dtlib.comm.torch.process_group import ProcessGroupCommunicator
    from dtlib.comm.torch.store import shared_store

    mine = str(torch.cuda.get_device_properties(device).uuid) if dist.is_nccl_available() else None
    everyone = comm.all_gather_object((socket.gethostname(), mine))
    if not each_has_its_own(everyone):
        return None
    torch.cuda.set_device(device)  # NCCL works on the current device
    store = shared_store(comm)
    group = make_group({"cuda": "nccl"}, store, comm.rank, comm.size)
    return ProcessGroupCommunicator(group, comm.time_limit, comm.members, comm.name, store)


def each_has_its_own(devices: list) -> bool:
    """True where no two ranks share a device: (host, UUID) of each rank's, or (host, None) without NCCL."""
    return all(uuid is not None for _, uuid in devices) and len(set(devices)) == len(devices)
