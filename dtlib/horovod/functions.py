"""Parameters, optimizer states and objects from one rank to all. Counterpart: ``horovod.torch.functions``."""

import io
from collections.abc import Iterable

import torch

from dtlib.comm.waiting import V
from dtlib.horovod.basics import communicator, rank
from dtlib.horovod.operations import broadcast_


def broadcast_parameters(params: Iterable, root_rank: int) -> None:
    """Give all ranks the values of ``root_rank``, in place.

    ``params`` is ``model.state_dict()``, ``model.named_parameters()``, a list of such pairs, or a list of tensors.
    """
    if isinstance(params, dict):
        params = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        params = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; pass model.state_dict() or named_parameters().")
    for name, tensor in params:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"broadcast_parameters: {name!r} is no tensor but {type(tensor).__name__}: leave it out.")
        broadcast_(tensor.detach(), root_rank, name)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Give all ranks the optimizer state and the options (learning rate ...) of ``root_rank``, bit by bit.

    The states of the other ranks' optimizers are replaced. The state is sent as one object, so there must be memory
    for two copies.
    """
    saved = io.BytesIO()
    if rank() == root_rank:
        torch.save(optimizer.state_dict(), saved)
    state = io.BytesIO(broadcast_object(saved.getvalue(), root_rank))
    if rank() != root_rank:
        optimizer.load_state_dict(torch.load(state, map_location="cpu", weights_only=False))


def broadcast_object(obj: V, root_rank: int = 0, name: str | None = None) -> V:
    """Return the ``obj`` of rank ``root_rank`` (anything that pickles) on every rank; others may pass None."""
    return communicator().broadcast_object(obj, root_rank)


def allgather_object(obj: V, name: str | None = None) -> list[V]:
    """Return every rank's ``obj`` (anything that pickles), in rank order."""
    return communicator().all_gather_object(obj)
