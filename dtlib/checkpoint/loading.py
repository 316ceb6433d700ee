"""``load``: validate everything first, then read the elements that this rank needs."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.checkpoint import folder as disk
from dtlib.checkpoint.folder import CheckpointError, raise_on_all
from dtlib.checkpoint.local_shards import LocalShard, elements_here, keys_here, local, local_shards_of, names_of_groups
from dtlib.comm import Communicator, as_communicator
from dtlib.gradients.precision import MasterWeights
from dtlib.world import init

# Settings that choose an implementation for this machine. They do not change the result, so they are not loaded.
MACHINE = ("foreach", "fused", "capturable", "differentiable")


def load(
    folder: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, comm: Communicator | None = None,
    masters: MasterWeights | None = None, check: Callable[[object], object] | None = None,
) -> object:  # fmt: skip
    """Load a checkpoint of ``save``, on any number of ranks and with any strategy; return its ``extra``.

    First create the model, its strategy and its optimizer as for training. Then all ranks of ``comm`` call it, and each
    rank reads the elements that it needs. The arguments are the same as for ``save``. Without ``optimizer`` only the
    model is loaded. ``check(extra)`` may refuse the checkpoint with a ``DtlibError``.

    * Floating-point values are converted to the model's dtype, from the float32 masters if they were saved. Other
      dtypes must be equal. If masters were not saved, they are set to the values.
    * Settings of the optimizer's groups are replaced by the saved ones. The exceptions are settings such as
      ``foreach``, which choose an implementation for this machine.
    * Random generators continue from their saved state if the number of ranks is the same. Otherwise they do not
      change.

    Raises:
        CheckpointError: on all ranks, with the same message, before anything is changed: if ``folder`` has no complete
            checkpoint, or if the model or the optimizer differs from the saved one.
    """
    comm = as_communicator(comm) if comm is not None else init().comm
    folder = Path(folder)
    index = comm.broadcast_object(raise_on_all(comm, lambda: disk.read_index(folder) if comm.rank == 0 else None))

    extra = disk.decoded(index["extra"])

    def find_shards():
        if check is not None:
            check(extra)
        for name in list(index["files"])[comm.rank :: comm.size]:
            disk.check_file(folder, index, name)
        return local_shards_of(model, optimizer, masters, comm)

    # Experts of this checkpoint may be on other ranks. They are not missing in the model.
    shards = raise_on_all(comm, find_shards)
    here = {shard.name for shard in shards}
    experts = comm.all_gather_object([shard.name for shard in shards if shard.expert])
    elsewhere = {name for each in experts for name in each} - here

    def compare():
        with disk.corruption_as_checkpoint_error(folder / disk.INDEX):
            _check_model(folder, index["tensors"], shards, elsewhere)
            if optimizer is not None:
                _check_optimizer(folder, index["optimizer"], optimizer, shards, elsewhere)

    raise_on_all(comm, compare)
    # ``_others`` reads and converts, but changes nothing. Then ``_fill`` changes the model, and only a disk error can
    # interrupt it.
    reader = disk.Reader(folder, index)
    others = raise_on_all(comm, lambda: _others(reader, shards, optimizer, comm))
    raise_on_all(comm, lambda: _fill(reader, shards, optimizer, *others))
    # A ZeroOptimizer has loaded its shards only: gather the parameters from all ranks.
    if hasattr(optimizer, "shard_of"):
        optimizer.copy_to_parameters()  # type: ignore[union-attr]
    return extra


def _others(reader: disk.Reader, shards: list[LocalShard], optimizer, comm) -> tuple[dict, list, dict]:
    """Read the optimizer's states, its settings and the random states, without changing anything yet."""
    states, settings, owned_here, files = {}, [], keys_here(optimizer), list(reader.index["files"])
    with disk.corruption_as_checkpoint_error(reader.folder / disk.INDEX):
        for shard in shards:
            if shard.key in owned_here and (state := _state(reader, shard, optimizer)):
                states[shard.key] = state
        # A ZeroOptimizer and its local optimizer have separate groups: load the settings into both.
        for here in {id(o): o for o in (optimizer, local(optimizer)) if o is not None}.values():
            for group, saved in zip(here.param_groups, reader.index["optimizer"]["groups"], strict=True):
                for name, value in saved["settings"].items():
                    if name not in MACHINE:
                        settings.append((group, name, _setting(group.get(name), value)))
    random = {}
    if len(files) == comm.size:
        with disk.corruption_as_checkpoint_error(reader.folder / files[comm.rank], RuntimeError):
            random = _random_states(reader.file(files[comm.rank]))
    return states, settings, random


@torch.no_grad()
def _fill(reader: disk.Reader, shards: list[LocalShard], optimizer, states: dict, settings: list, random: dict) -> None:
    """Copy the checkpoint into the model and its masters, and set random states, optimizer states and settings."""
    for shard in shards:
        roles = reader.index["tensors"][shard.name]["roles"]
        values = reader.read(
            shard.name, "master" if "master" in roles else "value", shard.slice.start, shard.slice.stop
        )
        # Value and master get the same numbers, each in its own dtype.
        for tensor in (shard.value, shard.master):
            if tensor is not None:
                elements = elements_here(tensor)
                elements.copy_(values.view(elements.shape))
    for device, state in random.items():
        (torch.cuda if device == "cuda" else torch).set_rng_state(state)
    if optimizer is not None:
        local(optimizer).state.clear()
        local(optimizer).state.update(states)
    for group, name, value in settings:
        # A tensor is set in place: a captured CUDA graph, for example, reads it.
        group[name] = group[name].copy_(value) if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def _state(reader: disk.Reader, shard: LocalShard, optimizer) -> dict:
    """Return the optimizer's state of a parameter on this rank. Even an empty shard gets single-number states."""
    key, state = shard.key, {}
    assert key is not None
    for role, entry in reader.index["tensors"][shard.name]["roles"].items():
        kind, _, what = role.partition("/")
        if kind == "state":
            flat = reader.read(shard.name, role, shard.slice.start, shard.slice.stop)
            # As in torch's load_state_dict, floating-point states get the dtype of the trained tensor.
            dtype = key.dtype if entry["dtype"] in disk.FLOATS else flat.dtype
            state[what] = torch.empty_like(key, dtype=dtype)
            elements = elements_here(state[what])
            elements.copy_(flat.view(elements.shape))
    group = next(g for g in local(optimizer).param_groups if any(p is key for p in g["params"]))
    for what, number in reader.index["optimizer"]["numbers"].get(shard.name, {}).items():
        if isinstance(number, dict):
            # torch counts steps in host memory, unless the whole step runs on the GPU.
            on_host = what == "step" and not (group.get("fused") or group.get("capturable"))
            number = torch.tensor(
                number["value"], dtype=disk.TYPES[number["dtype"]], device="cpu" if on_host else key.device
            )
        state[what] = number
    return state


def _setting(before, saved):
    """Convert a saved setting to the type of the current one, because JSON has no tuples and no tensors."""
    saved = saved["value"] if isinstance(saved, dict) else saved
    if isinstance(before, torch.Tensor):
        return torch.full_like(before, saved)
    return tuple(saved) if isinstance(before, tuple) else saved


def _random_states(file) -> dict[str, torch.Tensor]:
    """Return the saved random states of this rank, by device."""
    on_gpu = "random/cuda" in file.keys() and torch.cuda.is_available()  # noqa: SIM118 (a file, not a dictionary)
    states = {device: file.get_tensor(f"random/{device}") for device in ("cpu", "cuda")[: 1 + on_gpu]}
    for device, state in states.items():
        # Try the state on another generator first: a damaged one must raise before anything is changed.
        torch.Generator(device).set_state(state)
    return states


# Checks


def _check_model(folder, saved: dict, shards: list[LocalShard], elsewhere: set) -> None:
    """Raise an error if names, shapes or dtypes of model and checkpoint differ; other ranks have ``elsewhere``."""
    ours = {shard.name: shard for shard in shards}
    if missing := ours.keys() - saved.keys():
        raise CheckpointError(f"{folder} lacks {_some(missing)} of the model: build the model that was saved.")
    if unexpected := saved.keys() - ours.keys() - elsewhere:
        raise CheckpointError(f"The model lacks {_some(unexpected)} of {folder}: build the model that was saved.")
    for name, shard in ours.items():
        here, there = tuple(shard.slice.shape), tuple(saved[name]["shape"])
        if here != there:
            raise CheckpointError(
                f"{name} has shape {there} in {folder} and {here} in the model: build the model that was saved."
            )
        kind, before = str(shard.value.dtype).removeprefix("torch."), saved[name]["roles"]["value"]["dtype"]
        if kind != before and not (kind in disk.FLOATS and before in disk.FLOATS):
            raise CheckpointError(
                f"{name} is {before} in {folder} and {kind} in the model, and only floating-point types are converted "
                "into each other: build the model that was saved."
            )


def _check_optimizer(folder, saved: dict | None, optimizer, shards: list[LocalShard], elsewhere: set) -> None:
    if saved is None:
        raise CheckpointError(
            f"{folder} was saved without an optimizer: load without optimizer=, and create the optimizer afterwards."
        )
    here, without = type(local(optimizer)).__name__, "or load without optimizer=, and create a new one afterwards"
    if here != saved["class"]:
        raise CheckpointError(
            f"{folder} has the states of {saved['class']}, not of {here}: create a {saved['class']}, {without}."
        )
    groups = names_of_groups(optimizer, shards)
    if len(groups) != len(saved["groups"]):
        raise CheckpointError(
            f"The optimizer has {len(groups)} groups of parameters, but the optimizer in {folder} had "
            f"{len(saved['groups'])}: create the same groups, {without}."
        )
    for number, (ours, theirs) in enumerate(zip(groups, saved["groups"], strict=True)):
        if differing := (set(ours) ^ set(theirs["parameters"])) - elsewhere:
            raise CheckpointError(
                f"Group {number} of the optimizer and that in {folder} differ in {_some(differing)}: make the same "
                f"groups, {without}."
            )


def _some(names) -> str:
    first, *others = sorted(names)
    return f"{first} (and {len(others)} more)" if others else first
