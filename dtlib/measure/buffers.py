"""The memory of strategies, by purpose: an object that allocates buffers has a method ``tensors_by_kind()``.

The method returns lists of tensors. Each of these keys is optional:

    parameters      views of flat buffers: whole parameters, or this rank's slices of them
    gradients       views of flat buffers: averages, or gradients that are still in flight
    masters         tensors that an optimizer updates instead of parameters: slices of them, or float32 copies
    communication   buffers of messages, and parameters that are gathered for a short time
    communicators   communicators that are not the attribute ``comm``

Memory of a flat buffer outside the views is padding. Ordinary parameters, their gradients and the states of torch's
optimizers are found without this method.
"""

from collections.abc import Iterable

from torch import nn

KINDS = ("parameters", "gradients", "masters", "communication", "communicators")


def tensors_by_kind(*objects: object) -> dict[str, list]:
    """Return the tensors of these objects and the modules inside them, by kind; a tensor may be in a list twice."""
    found: dict[str, list] = {kind: [] for kind in KINDS}
    for obj in objects:
        ones: Iterable = obj.modules() if isinstance(obj, nn.Module) else [obj]
        for one in ones:
            for kind, some in (one.tensors_by_kind() if hasattr(type(one), "tensors_by_kind") else {}).items():
                found[kind] += some
            if hasattr(comm := getattr(one, "comm", None), "rank"):
                found["communicators"].append(comm)
    found["communicators"] = list({id(comm): comm for comm in found["communicators"]}.values())
    reporting = [comm for comm in found["communicators"] if hasattr(comm, "tensors_by_kind")]
    found["communication"] += [tensor for comm in reporting for tensor in comm.tensors_by_kind()["communication"]]
    return found
