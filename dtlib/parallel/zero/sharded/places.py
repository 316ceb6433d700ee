"""Where parameters are: which modules have them, under which names, and those that have no memory yet."""

import torch
from torch import nn

from dtlib.errors import DtlibError


def own_modules(module: nn.Module, prefix: str = "") -> dict[nn.Module, str]:
    """The modules inside of one that are in no unit of their own, with the beginnings of their parameters' names."""
    found = {module: prefix}
    for name, child in module.named_children():
        if "_unit" not in vars(child):
            found = own_modules(child, f"{prefix}{name}.") | found
    return found


def places_of(module: nn.Module) -> dict[nn.Parameter, list]:
    """For each parameter that is in no unit yet: the modules that have it, under which attribute and full name."""
    places: dict[nn.Parameter, list] = {}
    for owner, prefix in own_modules(module).items():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((owner, attribute, prefix + attribute))
    return places


def bring_to_life(module: nn.Module, device: torch.device | str) -> None:
    """Give parameters and buffers on the meta device memory and first values, as far as this unit goes."""
    alive: dict[torch.Tensor, torch.Tensor] = {}
    without = set()
    for owner in own_modules(module):
        both: tuple[dict, dict] = owner._parameters, owner._buffers
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in alive:
                        memory = torch.empty_like(tensor, device=device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        alive[tensor] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
                    tensors[name] = alive[tensor]
                    without.add(owner)
    for owner in reversed(own_modules(module)):  # the innermost first, as when they are constructed
        if owner in without:
            reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
            if reset is None:
                raise DtlibError(
                    f"{type(owner).__name__} has parameters or buffers on the meta device and no reset_parameters() "
                    "that gives them values: add that method, or build the model on a real device."
                )
            reset()
