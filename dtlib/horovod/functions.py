"""Broadcasts of parameters, optimizer states and objects. Counterpart: ``horovod.torch.functions``."""

import io
from collections.abc import Iterable

import torch

from dtlib.comm.waiting import V
from dtlib.horovod.basics import communicator, rank
from dtlib.horovod.operations import broadcast_


def broadcast_parameters(params: Iterable, root_rank: int) -> None:
    """Broadcast parameters from ``root_rank`` to all ranks, in place.

    ``params`` is ``model.state_dict()``, ``model.named_parameters()``, a list of such pairs, or a list of tensors.
    """
    # Sorted by name, so that all ranks broadcast in the same order.
    pairs = sorted(params.items()) if isinstance(params, dict) else params
    for name, tensor in (one if isinstance(one, tuple) else (None, one) for one in pairs):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"broadcast_parameters: {name!r} is {type(tensor).__name__}, not a tensor: leave it out.")
        broadcast_(tensor.detach(), root_rank, name)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Broadcast the optimizer's state and options (learning rate ...) from ``root_rank``, bit for bit.

    The states on the other ranks are replaced. The state is sent as one object, so every rank needs memory for two
    copies.
    """
    saved = io.BytesIO()
    if rank() == root_rank:
        torch.save(optimizer.state_dict(), saved)
    state = io.BytesIO(broadcast_object(saved.getvalue(), root_rank))
    if rank() != root_rank:
        optimizer.load_state_dict(torch.load(state, map_location="cpu", weights_only=False))


def broadcast_object(obj: V, root_rank: int = 0, name: str | None = None) -> V:
    """Broadcast a picklable object from ``root_rank``, and return it. The other ranks may pass None."""
    return communicator().broadcast_object(obj, root_rank)


def allgather_object(obj: V, name: str | None = None) -> list[V]:
    """All-gather a picklable object; return the list of every rank's ``obj``, in rank order."""
    return communicator().all_gather_object(obj)
