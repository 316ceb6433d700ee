"""A model in shards seen as one: its values, and the norm of its gradient."""

import torch
from torch import nn

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.gradients.precision import clip_by_norm
from dtlib.parallel.tensor.functions import whole_of
from dtlib.parallel.tensor.layers import ParallelLayer


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """``model.state_dict()`` as if nothing had been cut, on every rank; all ranks call it.

    An unsplit model with layers of the same names loads it.
    """
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for path, module in model.named_modules():
        if isinstance(module, ParallelLayer):
            for name, dim in module.partition_dim.items():
                if name in module.whole_shapes:
                    count = module.whole_shapes[name][dim]
                    whole = whole_of(getattr(module, name).detach(), module.comm, count, dim)
                    values[f"{path}.{name}".removeprefix(".")] = whole
    return values


def clip_grad_norm_(model: nn.Module, max_norm: float, comm: AnyCommunicator) -> float:
    """Between ``backward()`` and ``step()``: scale all gradients down together so that the 2-norm of the whole model's
    gradient is at most ``max_norm``; returns the norm before. All ranks of ``comm``, the tensor axis, call it.

    ``nn.utils.clip_grad_norm_`` would see one rank's shards alone, and each rank would scale by another factor. Here
    squares of shards are added over ranks; those of parameters that every rank has whole are counted once. Gradients
    have been averaged over a data axis before, as by ``DataParallel``; those inside a ``ZeroOptimizer`` are not seen.
    """
    cut = {
        getattr(module, name)
        for module in model.modules()
        if isinstance(module, ParallelLayer)
        for name in module.partition_dim
    }
    comm = as_communicator(comm)
    counted = [p.grad for p in model.parameters() if p.grad is not None and (p in cut or comm.rank == 0)]
    return clip_by_norm([parameter.grad for parameter in model.parameters()], max_norm, comm, counted)
