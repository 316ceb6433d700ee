"""Parameters, optimizer states and objects from one rank to all. Counterpart: ``horovod.torch.functions``."""

import io
import pickle
from collections.abc import Iterable

import torch

from dtlib.comm.waiting import V
from dtlib.horovod.basics import rank
from dtlib.horovod.operations import allgather_async, broadcast_, broadcast_async_, synchronize


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
    handles = []
    for name, tensor in params:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"broadcast_parameters: {name!r} is no tensor but {type(tensor).__name__}: leave it out.")
        plain = tensor.detach().contiguous()  # the tensor's own memory, where that is contiguous
        handles.append((broadcast_async_(plain, root_rank, name), tensor.detach(), plain))
    for handle, own, plain in handles:
        synchronize(handle)
        if not own.is_contiguous():
            own.copy_(plain)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Give all ranks the optimizer state and the options (learning rate ...) of ``root_rank``, bit by bit.

    Whatever state the others' optimizers have is replaced. It travels as one object: room for two copies is needed.
    """
    mine, saved = rank() == root_rank, io.BytesIO()
    if mine:
        torch.save(optimizer.state_dict(), saved)
    state = io.BytesIO(broadcast_object(saved.getvalue(), root_rank, "optimizer_state"))
    if not mine:
        optimizer.load_state_dict(torch.load(state, map_location="cpu", weights_only=False))


# Without a name Horovod takes that of the object's type. Here all objects have one name, so that who receives may pass
# None; only one at a time is under way.


def broadcast_object(obj: V, root_rank: int = 0, name: str | None = None) -> V:
    """The ``obj`` of rank ``root_rank`` (anything that pickles), on every rank; others may pass None."""
    mine, name = rank() == root_rank, "object" if name is None else name
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if mine else torch.empty(0)
    length = broadcast_(torch.tensor([len(data)]), root_rank, f"{name}.sz")
    data = broadcast_(data if mine else torch.empty(int(length), dtype=torch.uint8), root_rank, f"{name}.t")
    return obj if mine else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: V, name: str | None = None) -> list[V]:
    """Every rank's ``obj`` (anything that pickles), in rank order."""
    name = "object" if name is None else name
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    lengths = allgather_async(torch.tensor([len(data)]), f"{name}.sz")
    contents = allgather_async(data, f"{name}.t")
    pieces = synchronize(contents).split(synchronize(lengths).tolist())
    return [pickle.loads(piece.numpy().tobytes()) for piece in pieces]
