"""Find the modules and names of each parameter, and allocate parameters that are on the meta device."""

import torch
from torch import nn

from dtlib.errors import DtlibError


def own_modules(module: nn.Module, prefix: str = "") -> dict[nn.Module, str]:
    """Map the modules of this unit, without those of inner units, to the prefix of their parameters' names."""
    found = {module: prefix}
    for name, child in module.named_children():
        if "_unit" not in vars(child):
            found = own_modules(child, f"{prefix}{name}.") | found
    return found


def places_of(module: nn.Module) -> dict[nn.Parameter, list]:
    """Map each parameter that is in no unit yet to (module, attribute, full name); several if the parameter is tied."""
    places: dict[nn.Parameter, list] = {}
    for owner, prefix in own_modules(module).items():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((owner, attribute, prefix + attribute))
    return places


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Allocate and initialise this unit's parameters and buffers that are on the meta device."""
    alive: dict[torch.Tensor, torch.Tensor] = {}
    without = set()
    for owner in own_modules(module):
        both: tuple[dict, dict] = owner._parameters, owner._buffers
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    # A tied tensor has several names, but is allocated once.
                    if tensor not in alive:
                        memory = torch.empty_like(tensor, device=device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        alive[tensor] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
                    tensors[name] = alive[tensor]
                    without.add(owner)
    for owner in reversed(own_modules(module)):  # innermost first, as in construction
        if owner in without:
            reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
            if reset is None:
                raise DtlibError(
                    f"{type(owner).__name__} has parameters or buffers on the meta device and no reset_parameters() "
                    "that gives them values: add that method, or build the model on a real device."
                )
            reset()
