"""What a rank holds for its strategies, in their own words: whoever keeps memory has a method ``held()``.

It returns lists of tensors by kind, as far as there are any:

    parameters      views of flat memory: whole parameters, or this rank's slices of them
    gradients       likewise, whether they still travel or are averages
    masters         what an optimizer updates in place of parameters: slices of them, or copies in float32
    communication   memory in which messages are put together or arrive, and parameters that are gathered for a while
    communicators   those that are not found as ``comm``

What lies around views in flat memory is padding. Ordinary parameters and their gradients, and states of torch's
optimizers, are found without a word.
"""

from collections.abc import Iterable

from torch import nn

KINDS = ("parameters", "gradients", "masters", "communication", "communicators")


def held(*things: object) -> dict[str, list]:
    """What these hold, and the modules inside them, by kind: lists, in which a tensor may stand more than once."""
    found: dict[str, list] = {kind: [] for kind in KINDS}
    for thing in things:
        ones: Iterable = thing.modules() if isinstance(thing, nn.Module) else [thing]
        for one in ones:
            for kind, some in (one.held() if hasattr(type(one), "held") else {}).items():
                found[kind] += some
            if hasattr(comm := getattr(one, "comm", None), "rank"):
                found["communicators"].append(comm)
    found["communicators"] = list({id(comm): comm for comm in found["communicators"]}.values())
    telling = [comm for comm in found["communicators"] if hasattr(comm, "held")]
    found["communication"] += [tensor for comm in telling for tensor in comm.held()["communication"]]
    return found
