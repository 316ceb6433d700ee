"""What a rank has of a model and its optimizer, in words that all strategies share.

                        value                    master, optimizer's states     writes
    plain, stage 0      all                      all                            an equal slice
    stages 1, 2         all; loads its shard     its shard                      its shard
    stage 3             its shard                its shard                      its shard
    torch's stage 1     all                      all, of parameters of its own  those parameters
    torch's FSDP2       its rows                 its rows                       its rows
    frozen at 0, 1, 2   all                      -                              an equal slice
    experts             this rank's              this rank's                    its experts, of the first copy
    buffers             all                      -                              all of it, on rank 0

A strategy shows its shards by ``optimizer.shard_of(parameter)`` (stages 1 and 2) or ``ShardInfo.slice`` (stage 3),
torch by ``optimizer.optim`` (that of a rank's own parameters) or by DTensors, so that nothing here imports one.

``held()`` (measure/held.py) is another question: it tells memory by what it is for, and a checkpoint has to know which
elements of which parameter they are, and under what the optimizer knows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.checkpoint.folder import CheckpointError
from dtlib.gradients.buckets import Shards, Slice
from dtlib.gradients.precision import MasterWeights
from dtlib.gradients.shard_info import info_of

if TYPE_CHECKING:
    from dtlib.comm import Communicator


# The counters in the states of torch's optimizers: one number a parameter, even if that has one element itself.
COUNTERS = ("step", "eta", "mu", "mu_product")


@dataclass
class Holding:
    """What this rank has of a parameter or buffer: ``value`` is the elements of ``slice``, in one dimension or whole.

    ``written`` is what this rank writes of it. ``master`` has the same elements in float32, or on another device; None
    where the value is its own master. ``key`` is what the optimizer knows it as; None if it is not trained. An
    ``expert`` is one that other ranks need not have; ``replicated``, one of which each rank writes a slice, because all
    have the same values.
    """

    name: str
    slice: Slice
    written: Slice
    value: torch.Tensor
    master: torch.Tensor | None = None
    key: torch.Tensor | None = None
    expert: bool = False
    replicated: bool = False

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank writes of a tensor with the same elements as ``value``: flat, in host memory."""
        if self.written.start == self.written.stop:
            return torch.empty(0, dtype=tensor.dtype)
        begin, end = self.written.start - self.slice.start, self.written.stop - self.slice.start
        return elements_here(tensor.detach()).reshape(-1)[begin:end].cpu()

    def counts(self, rank: int) -> bool:
        """Whether this rank writes what there is once a parameter: the one with its first element."""
        return self.written.start == 0 and (self.written.stop > 0 or (0 in self.slice.shape and rank == 0))


def holdings_of(
    model: nn.Module, optimizer: Optimizer | None, masters: MasterWeights | None, comm: Communicator
) -> list[Holding]:
    """One for each parameter and persistent buffer, in the model's order."""
    model = bare(model)
    shard_of = getattr(optimizer, "shard_of", lambda parameter: None)
    trained = {key for group in groups_of(optimizer) for key in group["params"]}
    owned_here = keys_here(optimizer)
    master_of = {} if masters is None else dict(zip(masters.parameters, masters.masters, strict=True))
    held, replicated = [], []
    for name, parameter in model.named_parameters():
        info = info_of(parameter)
        copy = info.expert_copy
        if copy is None and len(info.experts) > 1:
            raise CheckpointError(
                f"{name} is an expert's, and other ranks have others of that name: use the full class, "
                "dtlib.parallel.expert.MixtureOfExperts, which numbers them."
            )
        slice_ = info.slice or _rows(name, parameter, comm)
        value, key = parameter, master_of.get(parameter, parameter)
        if owned := shard_of(parameter):
            slice_, value, key = owned
        master = None if key is value else key
        held.append(Holding(name, slice_, slice_, value, master, key if key in trained else None))
        if copy is not None:
            held[-1].expert, held[-1].written = True, slice_ if copy == 0 else Slice(slice_.shape, 0, 0)
        if owned or copy is not None or info.slice or is_dtensor(parameter):
            continue
        if key not in trained or not hasattr(optimizer, "optim"):
            replicated.append(held[-1])
        elif key not in owned_here:
            held[-1].written = Slice(slice_.shape, 0, 0)
    slices = Shards([holding.slice.shape for holding in replicated], comm.rank, comm.size).slices
    for holding, slice_ in zip(replicated, slices, strict=True):
        holding.written, holding.replicated = slice_, True
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        if attribute not in model.get_submodule(owner)._non_persistent_buffers_set:
            # Ranks may differ in them; those of rank 0 are what data parallelism gives everybody.
            slice_ = _whole(buffer)
            held.append(Holding(name, slice_, slice_ if comm.rank == 0 else Slice(slice_.shape, 0, 0), buffer))
    _check_trained(optimizer, held)
    return held


def bare(model: nn.Module) -> nn.Module:
    """The model in a wrapper such as ``DataParallel``, which has nothing but ``module``."""
    while [name for name, _ in model.named_children()] == ["module"] and not [*model.parameters(recurse=False)]:
        model = model.get_submodule("module")
    return model


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers, and the name that stands for them."""
    model = bare(model)
    first: dict[torch.Tensor, str] = {}
    aliases = {}
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in both:
        if first.setdefault(tensor, name) != name:
            aliases[name] = first[tensor]
    return aliases


def local(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the states: a ``ZeroOptimizer``, ours or torch's, has one inside, for this rank."""
    return getattr(optimizer, "optim", optimizer)


def groups_of(optimizer: Optimizer | None) -> list[dict]:
    if optimizer is None:
        return []
    return (local(optimizer) if hasattr(optimizer, "shard_of") else optimizer).param_groups


def keys_here(optimizer: Optimizer | None) -> set:
    """What the optimizer of this rank steps."""
    return set() if optimizer is None else {key for group in local(optimizer).param_groups for key in group["params"]}


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Has torch sharded it?"""
    return hasattr(tensor, "placements")


def elements_here(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank has of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local and is_dtensor(tensor) else tensor


def names_of_groups(optimizer: Optimizer, held: list[Holding]) -> list[list[str]]:
    """The names of the trained parameters of each group."""
    names = {holding.key: holding.name for holding in held if holding.key is not None}
    return [
        [names[key] for key in group["params"] if key in names and key.requires_grad] for group in groups_of(optimizer)
    ]


def settings_of(optimizer: Optimizer) -> list[dict]:
    """Learning rate and the like of each group, as JSON."""
    return [
        {name: as_json(value, name) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def states_of(optimizer: Optimizer, holding: Holding) -> tuple[dict, dict]:
    """The optimizer's states of a parameter: tensors that are cut like it, and numbers."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict = {}
    if (key := holding.key) is None:
        return tensors, numbers
    for what, state in local(optimizer).state.get(key, {}).items():
        if isinstance(state, torch.Tensor) and state.shape == key.shape and what not in COUNTERS:
            tensors[what] = state
        else:
            numbers[what] = as_json(state, f"state {what} of {holding.name}")
    return tensors, numbers


def as_json(value: object, name: str) -> object:
    """A setting or a number of the optimizer; a tensor of no dimension becomes its value and type."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [as_json(item, name) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise CheckpointError(
        f"The optimizer's {name} is {what}, and a checkpoint takes tensors of the parameter's shape, and single "
        "numbers: save without the optimizer, or use one that works element by element."
    )


def _whole(tensor) -> Slice:
    return Slice(tuple(tensor.shape), 0, tensor.numel())


def _rows(name: str, tensor, comm) -> Slice:
    """All of a tensor, or the rows that FSDP2 has left here."""
    if not is_dtensor(tensor):
        return _whole(tensor)
    if not (
        len(tensor.placements) == 1 and tensor.placements[0].is_shard(0) and tensor.device_mesh.size() == comm.size
    ):
        raise CheckpointError(
            f"{name} is sharded as {tensor.placements} over {tensor.device_mesh.size()} ranks, but a checkpoint needs "
            f"whole rows over all {comm.size}: use torch.distributed.checkpoint."
        )
    shape = tuple(tensor.shape)
    longest, row = -(-shape[0] // comm.size), math.prod(shape[1:])
    return Slice(shape, *(min(place * longest, shape[0]) * row for place in (comm.rank, comm.rank + 1)))


def _check_trained(optimizer, held) -> None:
    known = {holding.key for holding in held}
    for number, group in enumerate(groups_of(optimizer)):
        for key in group["params"]:
            if key not in known:
                raise CheckpointError(
                    f"Group {number} of the optimizer has a parameter of shape {tuple(key.shape)} that is not the "
                    "model's: pass the model that it was made for, and masters= where the optimizer trains masters."
                )
