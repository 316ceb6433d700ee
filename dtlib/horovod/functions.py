"""Parameters, optimizer states and objects from one rank to all. Counterpart: ``horovod.torch.functions``."""

import pickle
from collections.abc import Iterable

import torch

from dtlib.horovod.basics import rank
from dtlib.horovod.operations import allgather_async, broadcast_async_
from dtlib.horovod.submission import synchronize


def broadcast_parameters(params, root_rank) -> None:
    """Give all ranks the values of ``root_rank``, in place.

    ``params`` is ``model.state_dict()``, ``model.named_parameters()``, a list of such pairs, or a list of tensors.
    """
    if isinstance(params, dict):
        params = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        params = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; pass model.state_dict() or named_parameters().")
    handles = []
    for name, tensor in params:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"broadcast_parameters: {name!r} is no tensor but {type(tensor).__name__}: leave it out.")
        own = tensor.detach()
        plain = own if own.is_contiguous() else own.contiguous()
        handles.append((broadcast_async_(plain, root_rank, name), own, plain))
    for handle, own, plain in handles:
        synchronize(handle)
        if plain is not own:
            own.copy_(plain)


def broadcast_optimizer_state(optimizer, root_rank) -> None:
    """Give all ranks the optimizer state and the options (learning rate ...) of ``root_rank``.

    Ranks whose optimizer has no state yet get that of the root.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: use hvd.broadcast_object(optimizer.state_dict()).")
    tensors = []

    def outline(thing):
        """The same structure with a place where a tensor was; the tensors themselves follow."""
        if isinstance(thing, torch.Tensor):
            tensors.append(thing.detach().cpu().contiguous())
            return _Place(len(tensors) - 1, tuple(thing.shape), thing.dtype)
        return _mapped(thing, outline)

    mine = rank() == root_rank
    structure = broadcast_object(outline(optimizer.state_dict()) if mine else None, root_rank)
    if not mine:

        def fill(thing):
            if isinstance(thing, _Place):
                tensors.append(torch.empty(thing.shape, dtype=thing.dtype))
                return tensors[-1]
            return _mapped(thing, fill)

        state = fill(structure)
    broadcast_parameters(tensors, root_rank)
    if not mine:
        optimizer.load_state_dict(state)


def broadcast_object(obj, root_rank=0, name=None):
    """The ``obj`` of rank ``root_rank`` (anything that pickles), on every rank; others may pass None."""
    mine = rank() == root_rank
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if mine else None
    length = torch.tensor([len(data) if mine else 0])
    synchronize(broadcast_async_(length, root_rank, name and f"{name}.sz"))
    if not mine:
        data = torch.empty(int(length), dtype=torch.uint8)
    synchronize(broadcast_async_(data, root_rank, name and f"{name}.t"))
    return obj if mine else pickle.loads(data.numpy().tobytes())


def allgather_object(obj, name=None) -> list:
    """Every rank's ``obj`` (anything that pickles), in rank order."""
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    lengths = allgather_async(torch.tensor([len(data)]), name and f"{name}.sz")
    contents = allgather_async(data, name and f"{name}.t")
    pieces = synchronize(contents).split(synchronize(lengths).tolist())
    return [pickle.loads(piece.numpy().tobytes()) for piece in pieces]


class _Place:
    """Where a tensor was."""

    def __init__(self, number, shape, dtype):
        self.number, self.shape, self.dtype = number, shape, dtype


def _mapped(thing, function):
    if isinstance(thing, dict):
        return {key: function(value) for key, value in thing.items()}
    if type(thing) in (list, tuple):
        return type(thing)(function(value) for value in thing)
    return thing
