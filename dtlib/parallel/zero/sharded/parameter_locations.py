"""Find the modules and names of each parameter of a unit."""

from torch import nn


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
