"""The whole state dict and the whole gradient norm of a sharded model."""

import torch
from torch import nn

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.gradients.precision import clip_by_norm
from dtlib.parallel.tensor.functions import whole_of
from dtlib.parallel.tensor.layers import ParallelLayer


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return ``model.state_dict()`` with whole parameters, on every rank; all ranks call it.

    A model without tensor parallelism can load it if its layers have the same names.
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
    """Scale all gradients so that the 2-norm of the whole model's gradient is at most ``max_norm``.

    Call it between ``backward()`` and ``step()`` on all ranks of ``comm``, the tensor axis. Returns the norm before
    scaling.

    ``nn.utils.clip_grad_norm_`` would see only one rank's shards, so each rank would use another factor. Here the
    squares of shards are summed over ranks, and parameters that every rank has are counted once. Gradients must already
    be averaged over the data axis, for example by ``DataParallel``. Gradients inside a ``ZeroOptimizer`` are not
    included.
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
