"""Checks that all ranks have the same model, and that its parameters can be averaged."""

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import nn

from dtlib.comm import Communicator, types
from dtlib.errors import DtlibError
from dtlib.gradients.shard_info import info_of


def check_same_model(parameters: dict, comm: Communicator, owner: str, model: nn.Module | None = None) -> None:
    """Compare the parameters' names, shapes, dtypes and order between ranks; all ranks call it.

    Raises:
        DtlibError: on every rank, if ranks differ, or if strategy ``owner`` cannot average the dtype of a parameter.
            With ``model``, also if there is no parameter, or if a module gives sparse gradients.
    """
    if model is not None and not parameters:
        raise DtlibError(f"{owner}: no parameter of this model requires a gradient, so there is nothing to average.")
    for name, module in model.named_modules() if model is not None else ():
        if getattr(module, "sparse", False):
            raise DtlibError(f"{owner} needs dense gradients: build {name or 'the module'} with sparse=False.")
    for name, parameter in parameters.items():
        if (kind := types.dtype_name(parameter.dtype)) not in types.FLOATS:
            raise DtlibError(
                f"{owner} averages {', '.join(types.FLOATS)}, and {name} is {kind}: convert it, or freeze it with "
                f"{name}.requires_grad_(False)."
            )
    check_axis(parameters, comm, owner)
    mine = {name: f"{tuple(one.shape)} {types.dtype_name(one.dtype)}" for name, one in parameters.items()}
    _compare(comm, mine, "The models differ", "Build the same model on all ranks.")


def check_axis(parameters: dict, comm: Communicator, owner: str) -> None:
    """Raise an error if ``comm`` is the wrong axis of a mesh for the gradients of a parameter.

    Shards and experts must not be averaged with their counterparts. Gradients of shared sequences must be averaged over
    all ranks that share them. ``ShardInfo`` says which ranks these are.
    """
    here = set(comm.members)
    experts = {rank for parameter in parameters.values() for rank in info_of(parameter).experts}
    for name, parameter in parameters.items():
        info = info_of(parameter)
        if len(here.intersection(info.tensor)) > 1:
            raise DtlibError(
                f"{owner}: {name} is a shard of a tensor-parallel layer, and ranks {list(info.tensor)} have the other "
                "shards: average over the data axis only, with mesh['data']."
            )
        if len(here.intersection(info.experts)) > 1:
            raise DtlibError(
                f"{owner}: {name} belongs to an expert, and ranks {list(info.experts)} have different ones: average "
                "experts with MixtureOfExperts(..., data=mesh['data']), and only other parameters here."
            )
        if not here.issuperset(info.sequences):
            raise DtlibError(
                f"{owner}: gradients of {name} include only this rank's tokens, and ranks {list(info.sequences)} share "
                "each sequence: average over both axes, with mesh['data', 'context']."
            )
        if not info.experts and not here.issuperset(experts):
            raise DtlibError(
                f"{owner}: gradients of {name} include only this rank's tokens, and ranks {sorted(experts)}, which "
                "share experts, have others: average over both axes, with mesh['data', 'expert']."
            )


def check_same_arguments(comm: Communicator, caller: str, **arguments: object) -> None:
    """Refuse, on every rank, arguments of ``caller`` that differ between ranks; all ranks call it."""
    _compare(comm, arguments, f"{caller} differs between ranks", "Pass the same on all ranks.")


def _compare(comm: Communicator, mine: dict, what: str, cure: str) -> None:
    # Every rank compares all ranks with rank 0, so all ranks raise the same error.
    first, *others = comm.all_gather_object(mine)
    for rank, theirs in enumerate(others, 1):
        for name in first | theirs:
            here, there = first.get(name, "missing"), theirs.get(name, "missing")
            if here != there:
                raise DtlibError(f"{what}: {name} is {here} on rank 0 and {there} on rank {rank}. {cure}")
        if list(theirs) != list(first):
            raise DtlibError(f"{what} in the order of their parameters. {cure}")


def check_same_values(module: nn.Module, parameters: list, comm: Communicator, what: str) -> None:
    """Compare parameters between ranks in the first ``PASSES`` forward passes of ``module``; all ranks call it.

    If no strategy averages their gradients, values differ between ranks after the first step. Without this check that
    error would be silent.

    Args:
        module: the module that needs equal parameters; it counts the passes.
        parameters: the parameters that must be equal.
        comm: the ranks that are compared.
        what: the parameters' name in the error message.
    """
    passes = module.__dict__.setdefault("_passes_compared", 0)
    if passes == PASSES or any(info_of(parameter).slice for parameter in parameters):  # shards differ
        return
    module.__dict__["_passes_compared"] = passes + 1
    if len(set(comm.all_gather_object(digest_of(parameters)))) > 1:
        raise DtlibError(
            f"{type(module).__name__}: {what} differ between ranks that should have the same: average gradients over "
            "all ranks before each step, with DataParallel(model, mesh['data', ...]) or DataParallel(model, comm)."
        )


PASSES, AGAIN, SAMPLE = 3, 4, 1024
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a checksum of eight bytes, equal if all values are equal bit by bit.

    The values are added as integers. Such a sum does not depend on the order, so it is equal on all kinds of machines.
    """
    flat = [tensor.detach().view(BITS[tensor.element_size()]).flatten() for tensor in tensors]
    # torch converts the summands to int64 first, so sum parts to limit the memory of that copy.
    sums = [sum(int(part.sum()) for part in one.split(2**18)) for one in flat]
    return blake2b(repr(sums).encode(), digest_size=8).digest()


def bits_of(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Return the bits of the first byte of the checksum, as flags for ``Reducer``."""
    byte = digest_of(tensors)[0]
    return [bool(byte >> place & 1) for place in range(8)]
