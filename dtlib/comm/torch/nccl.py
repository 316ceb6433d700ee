"""CUDA tensors in a communicator over MPI: through NCCL, or through host memory.

    every rank has a separate GPU        GPU ----------- NCCL ----------- GPU
    ranks share a GPU, or no NCCL        GPU -> pinned host memory -> MPI -> pinned host memory -> GPU

All ranks choose together, at a communicator's first collective on a CUDA tensor. Two slices of one GPU (MIG) count as a
shared GPU. NCCL connects ranks that share a GPU from version 2.30 on, if ``NCCL_MULTI_RANK_GPU_ENABLE=1`` is set on
every rank. If NCCL cannot connect the ranks, rank 0 warns and host memory is used.

Sends and receives always use host memory, because their two ends cannot know whether the other ranks have chosen yet.
A collective with ``algorithm=`` also uses host memory, because its algorithm consists of messages over MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import socket
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from dtlib.comm import shared_gpus
from dtlib.comm.objects import ObjectOperations

if TYPE_CHECKING:
    from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator


def nccl_communicator(comm: ObjectOperations, device: torch.device) -> ProcessGroupCommunicator | None:
    """Return a communicator over NCCL of the same ranks, or None if NCCL cannot connect them. All ranks call it."""
    from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator
    from dtlib.comm.torch.group_work import make_group
    from dtlib.comm.torch.store import shared_store

    if why_not(comm.all_gather_object(gpu_of(device))):
        return None
    torch.cuda.set_device(device)  # NCCL works on the current device
    store = shared_store(comm)
    group = make_group({"cuda": "nccl"}, store, comm.rank, comm.size)
    refusal = None
    # NCCL connects ranks only in their first collective, so try one.
    try:
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    except RuntimeError as problem:
        refusal = " ".join(str(problem).split())[-300:]
    # If NCCL fails on one rank, all ranks must use host memory.
    refusals = [said for said in comm.all_gather_object(refusal) if said]
    if not refusals:
        # Otherwise torch warns at exit about a group that was not destroyed.
        atexit.register(group.abort)
        return ProcessGroupCommunicator(group, comm.time_limit, comm.members, comm.name)
    with suppress(RuntimeError):
        group.abort()
    if comm.rank == 0:
        warnings.warn(f"NCCL refuses, so CUDA tensors go through host memory: {refusals[0]}", stacklevel=2)
    return None


def gpu_of(device: torch.device) -> tuple | None:
    """Return this rank's host, its GPU, and whether NCCL may share the GPU; None without NCCL.

    The result pickles, and converts to JSON.
    """
    if not dist.is_nccl_available():
        return None
    facts = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")  # equal for all slices of a GPU
    address = ":".join(str(getattr(facts, name)) for name in names) if hasattr(facts, names[0]) else str(facts.uuid)
    return socket.gethostname(), address, shared_gpus.asked_for() and nccl_version() >= shared_gpus.FROM


def why_not(gpus: Sequence[Sequence | None]) -> str:
    """Return the reason why NCCL cannot connect ranks with these ``gpu_of``; an empty string if it can."""
    found = [(host, address) for host, address, _ in filter(None, gpus)]
    if len(found) < len(gpus):
        return "torch has no NCCL here"
    if len(set(found)) == len(found) or all(shares for _, _, shares in filter(None, gpus)):
        return ""
    return f"ranks share a GPU: {shared_gpus.ADVICE}"


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL in this process, which may differ from the one that torch was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # NCCL is linked into torch
        return torch.cuda.nccl.version()[:2]
    return number.value // 10000, number.value // 100 % 100
