"""The whole state dict of a sharded model."""

import torch
from torch import nn

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
