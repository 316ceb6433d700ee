"""Strategies rely on the same model on all ranks, with parameters that can be averaged: refuse others by name."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import nn

from dtlib.comm import types
from dtlib.errors import DtlibError
from dtlib.gradients.shard_info import info_of

if TYPE_CHECKING:
    from dtlib.comm import Communicator


def check_same_model(parameters: dict, comm: Communicator, who: str) -> None:
    """Compare parameters, by name, between ranks; all ranks call it.

    Raises:
        DtlibError: on every rank, where ``who`` cannot average a parameter's type, or where ranks differ in names,
            shapes, types or order.
    """
    for name, parameter in parameters.items():
        if (kind := types.dtype_name(parameter.dtype)) not in types.FLOATS:
            raise DtlibError(
                f"{who} averages {', '.join(types.FLOATS)}, and {name} is {kind}: convert it, or freeze it with "
                f"{name}.requires_grad_(False)."
            )
    check_axis(parameters, comm, who)
    mine = {name: (tuple(parameter.shape), types.dtype_name(parameter.dtype)) for name, parameter in parameters.items()}
    first, *others = comm.all_gather_object(mine)
    for rank, theirs in enumerate(others, 1):
        for name in first | theirs:
            if first.get(name) != theirs.get(name):
                raise DtlibError(
                    f"The models differ: {name} is {_said(first.get(name))} on rank 0 and {_said(theirs.get(name))} on "
                    f"rank {rank}. Build the same model on all ranks."
                )
        if list(theirs) != list(first):
            raise DtlibError("The models differ in the order of their parameters: build the same model on all ranks.")


def check_axis(parameters: dict, comm: Communicator, who: str) -> None:
    """Refuse shards, parameters of experts and of shared sequences along the wrong axis of a mesh.

    What parameters they are, ``ShardInfo`` says.
    """
    here = set(comm.members)
    experts = {rank for parameter in parameters.values() for rank in info_of(parameter).experts}
    for name, parameter in parameters.items():
        info = info_of(parameter)
        if len(here.intersection(info.tensor)) > 1:
            raise DtlibError(
                f"{who}: {name} is a shard of a tensor-parallel layer, and ranks {list(info.tensor)} have the others: "
                "average over the data axis alone, as by mesh['data']."
            )
        if len(here.intersection(info.experts)) > 1:
            raise DtlibError(
                f"{who}: {name} is an expert's, and ranks {list(info.experts)} have different ones: leave "
                "experts' parameters to MixtureOfExperts(..., data=mesh['data']), and average the others here."
            )
        if not here.issuperset(info.sequences):
            raise DtlibError(
                f"{who}: gradients of {name} are of this rank's tokens, and ranks {list(info.sequences)} share each "
                "sequence: average over both axes, as by mesh['data', 'context']."
            )
        if not info.experts and not here.issuperset(experts):
            raise DtlibError(
                f"{who}: gradients of {name} are of this rank's tokens, and ranks {sorted(experts)}, which share out "
                "experts, have others: average over both axes, as by mesh['data', 'expert']."
            )


def check_same_values(module: nn.Module, parameters: list, comm: Communicator, what: str) -> None:
    """In the first passes of training: have the gradients of these parameters been averaged over ``comm``? All ranks
    call it; where nobody has, values differ from the second step on, and nothing else would say so."""
    passes = module.__dict__.setdefault("_passes_compared", 0)
    if passes == PASSES or any(info_of(parameter).slice for parameter in parameters):  # shards differ
        return
    module.__dict__["_passes_compared"] = passes + 1
    if len(set(comm.all_gather_object(digest_of(parameters)))) > 1:
        raise DtlibError(
            f"{type(module).__name__}: {what} differ between ranks that should have the same: average gradients over "
            "all ranks before each step, with DataParallel(model, mesh['data', ...]) or DataParallel(model, comm)."
        )


PASSES = 3
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Eight bytes that are equal if all values are, to the bit. Sums of integers do not depend on their order, so
    machines of all kinds compute the same."""
    flat = [tensor.detach().view(BITS[tensor.element_size()]).flatten() for tensor in tensors]
    sums = [sum(int(part.sum()) for part in one.split(2**18)) for one in flat]  # torch casts all of a part to int64
    return blake2b(repr(sums).encode(), digest_size=8).digest()


def bits_of(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """The first byte of the digest, as flags."""
    byte = digest_of(tensors)[0]
    return [bool(byte >> place & 1) for place in range(8)]


def _said(parameter) -> str:
    return f"{parameter[0]} {parameter[1]}" if parameter else "missing"
