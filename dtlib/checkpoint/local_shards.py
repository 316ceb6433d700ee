"""The parts of a model and its optimizer on this rank, described in the same way for all strategies.

                        value                    master, optimizer's states      writes
    plain, stage 0      whole                    whole                           an equal slice
    stages 1, 2         whole; loads its shard   its shard                       its shard
    stage 3             its shard                its shard                       its shard
    torch's stage 1     whole                    whole, for its own parameters   its own parameters
    torch's FSDP2       its rows                 its rows                        its rows
    frozen, stages 0-2  whole                    -                               an equal slice
    experts             this rank's              this rank's                     its experts, if it has the first copy
    buffers             whole                    -                               whole, on rank 0

Our strategies show their shards through ``optimizer.shard_of(parameter)`` (stages 1 and 2) or ``ShardInfo.slice``
(stage 3). torch shows them through ``optimizer.optim`` (the optimizer of a rank's own parameters) or DTensors. So this
file imports no strategy.

``tensors_by_kind()`` (measure/buffers.py) describes memory by its purpose. A checkpoint needs other facts: the
parameter and the elements of each tensor, and the tensor by which the optimizer finds the states.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.checkpoint.folder import CheckpointError
from dtlib.comm import Communicator
from dtlib.gradients.buckets import Shards, Slice
from dtlib.gradients.precision import MasterWeights
from dtlib.gradients.shard_info import info_of

# States of torch's optimizers that are one number per parameter. The name decides, because a parameter without
# dimensions has states of the same shape.
COUNTERS = ("step", "eta", "mu", "mu_product")


@dataclass
class LocalShard:
    """The part of a parameter or buffer on this rank.

    Args:
        name: its full name in the model.
        slice: the elements of the whole tensor that this rank has.
        written: the elements that this rank writes to its file.
        value: the elements of ``slice``: one-dimensional, or in the tensor's shape if it is whole.
        master: the same elements in float32 or on another device; None if ``value`` is its own master.
        key: the tensor by which the optimizer finds the states; None if it is not trained.
        expert: whether it is an expert, which other ranks may not have.
        replicated: whether all ranks have the same values, so that each writes a slice.
    """

    name: str
    slice: Slice
    written: Slice
    value: torch.Tensor
    master: torch.Tensor | None = None
    key: torch.Tensor | None = None
    expert: bool = False
    replicated: bool = False

    def written_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements that this rank writes of ``tensor``, flattened, in host memory.

        ``tensor`` has the same elements as ``value``: the value itself, its master or an optimizer state.
        """
        if self.written.start == self.written.stop:
            return torch.empty(0, dtype=tensor.dtype)
        begin, end = self.written.start - self.slice.start, self.written.stop - self.slice.start
        return elements_here(tensor.detach()).reshape(-1)[begin:end].cpu()

    def counts(self, rank: int) -> bool:
        """Return whether this rank writes states that are one number per parameter: the rank with element 0 does."""
        return self.written.start == 0 and (self.written.stop > 0 or (0 in self.slice.shape and rank == 0))


def local_shards_of(
    model: nn.Module, optimizer: Optimizer | None, masters: MasterWeights | None, comm: Communicator
) -> list[LocalShard]:
    """Return a ``LocalShard`` for each parameter and each persistent buffer, in the model's order.

    Raises:
        CheckpointError: for unnumbered copies of experts, unsupported sharding of DTensors, or an optimizer of other
            parameters.
    """
    model = bare(model)
    shard_of = getattr(optimizer, "shard_of", lambda parameter: None)
    trained = {key for group in groups_of(optimizer) for key in group["params"]}
    owned_here = keys_here(optimizer)
    master_of = {} if masters is None else dict(zip(masters.parameters, masters.masters, strict=True))
    shards, replicated = [], []
    for name, parameter in model.named_parameters():
        info = info_of(parameter)
        copy = info.expert_copy
        if copy is None and len(info.experts) > 1:
            raise CheckpointError(
                f"{name} belongs to an expert, and other ranks have other experts under that name: use the full class, "
                "dtlib.parallel.expert.MixtureOfExperts, which numbers them."
            )
        slice_ = info.slice or _rows(name, parameter, comm)
        value, key = parameter, master_of.get(parameter, parameter)
        if owned := shard_of(parameter):
            slice_, value, key = owned
        master = None if key is value else key
        shards.append(LocalShard(name, slice_, slice_, value, master, key if key in trained else None))
        if copy is not None:
            # Only the first copy of an expert is written.
            shards[-1].expert, shards[-1].written = True, slice_ if copy == 0 else Slice(slice_.shape, 0, 0)
        if owned or copy is not None or info.slice or is_dtensor(parameter):
            continue
        # With torch's ZeroRedundancyOptimizer the rank that steps a parameter writes it, because it has the states.
        if key not in trained or not hasattr(optimizer, "optim"):
            replicated.append(shards[-1])
        elif key not in owned_here:
            shards[-1].written = Slice(slice_.shape, 0, 0)
    # All ranks have these tensors. Treat them as one flat buffer, of which each rank writes an equal part.
    slices = Shards([shard.slice.shape for shard in replicated], comm.rank, comm.size).slices
    for shard, slice_ in zip(replicated, slices, strict=True):
        shard.written, shard.replicated = slice_, True
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        if attribute not in model.get_submodule(owner)._non_persistent_buffers_set:
            # Buffers may differ between ranks. Data parallelism broadcasts rank 0's buffers, so save these.
            slice_ = _whole(buffer)
            shards.append(LocalShard(name, slice_, slice_ if comm.rank == 0 else Slice(slice_.shape, 0, 0), buffer))
    _check_trained(optimizer, shards)
    return shards


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as ``DataParallel``, whose only child is ``module``."""
    while [name for name, _ in model.named_children()] == ["module"] and not [*model.parameters(recurse=False)]:
        model = model.get_submodule("module")
    return model


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return a map from each additional name of a tied parameter or buffer to its first name."""
    model = bare(model)
    first: dict[torch.Tensor, str] = {}
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first[tensor] for name, tensor in both if first.setdefault(tensor, name) != name}


def local(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the states: the local one inside a ``ZeroOptimizer``, ours or torch's."""
    return getattr(optimizer, "optim", optimizer)


def groups_of(optimizer: Optimizer | None) -> list[dict]:
    """Return the optimizer's parameter groups; for our ``ZeroOptimizer``, the groups of the local optimizer."""
    if optimizer is None:
        return []
    return (local(optimizer) if hasattr(optimizer, "shard_of") else optimizer).param_groups


def keys_here(optimizer: Optimizer | None) -> set:
    """Return the tensors that the optimizer updates on this rank."""
    return set() if optimizer is None else {key for group in local(optimizer).param_groups for key in group["params"]}


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, which torch has sharded."""
    return hasattr(tensor, "placements")


def elements_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements: the local part of a DTensor, otherwise ``tensor``."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]  # of a DTensor


def names_of_groups(optimizer: Optimizer, shards: list[LocalShard]) -> list[list[str]]:
    """Return the names of the trained parameters of each group."""
    names = {shard.key: shard.name for shard in shards if shard.key is not None}
    return [
        [names[key] for key in group["params"] if key in names and key.requires_grad] for group in groups_of(optimizer)
    ]


def settings_of(optimizer: Optimizer) -> list[dict]:
    """Return the settings of each group, such as the learning rate, as JSON types."""
    return [
        {name: as_json(value, name) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def states_of(optimizer: Optimizer, shard: LocalShard) -> tuple[dict, dict]:
    """Return the optimizer's states of a parameter: tensors of the key's shape, and numbers as JSON types."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict = {}
    if (key := shard.key) is None:
        return tensors, numbers
    for what, state in local(optimizer).state.get(key, {}).items():
        if isinstance(state, torch.Tensor) and state.shape == key.shape and what not in COUNTERS:
            tensors[what] = state
        else:
            numbers[what] = as_json(state, f"state {what} of {shard.name}")
    return tensors, numbers


def as_json(value: object, name: str) -> object:
    """Convert a setting or number of the optimizer to JSON types; a tensor without dimensions keeps its dtype.

    Raises:
        CheckpointError: for any other tensor or object; ``name`` is its name in the message.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [as_json(item, name) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise CheckpointError(
        f"The optimizer's {name} is {what}, but a checkpoint stores only tensors of the parameter's shape and single "
        "numbers: save without the optimizer, or use an element-wise one."
    )


def _whole(tensor) -> Slice:
    return Slice(tuple(tensor.shape), 0, tensor.numel())


def _rows(name: str, tensor, comm) -> Slice:
    """Return the slice of this rank: the whole tensor, or its rows of a DTensor of FSDP2."""
    if not is_dtensor(tensor):
        return _whole(tensor)
    if not (
        len(tensor.placements) == 1 and tensor.placements[0].is_shard(0) and tensor.device_mesh.size() == comm.size
    ):
        raise CheckpointError(
            f"{name} is sharded as {tensor.placements} over {tensor.device_mesh.size()} ranks, but a checkpoint needs "
            f"whole rows over all {comm.size}: use torch.distributed.checkpoint."
        )
    # FSDP2 gives each rank equally many rows, rounded up; the last ranks have fewer or none.
    shape = tuple(tensor.shape)
    longest, row = -(-shape[0] // comm.size), math.prod(shape[1:])
    return Slice(shape, *(min(place * longest, shape[0]) * row for place in (comm.rank, comm.rank + 1)))


def _check_trained(optimizer, shards) -> None:
    known = {shard.key for shard in shards}
    for number, group in enumerate(groups_of(optimizer)):
        for key in group["params"]:
            if key not in known:
                raise CheckpointError(
                    f"Group {number} of the optimizer has a parameter of shape {tuple(key.shape)} that the model does "
                    "not have: pass the optimizer's model, and masters= if it trains master weights."
                )
