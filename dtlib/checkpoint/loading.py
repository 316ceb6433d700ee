"""``load``: look at everything first, then read the elements that this rank needs."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.checkpoint.folder import (
    FLOATS,
    INDEX,
    TYPES,
    CheckpointError,
    Reader,
    check_file,
    decoded,
    making_sense,
    read_index,
    together,
)
from dtlib.checkpoint.holdings import Holding, elements_here, holdings_of, keys_here, local, names_of_groups
from dtlib.comm import as_communicator
from dtlib.gradients.precision import MasterWeights
from dtlib.world import init

if TYPE_CHECKING:
    from dtlib.comm import Communicator


# Settings that say how this machine computes, and nothing about what: as they are here.
MACHINE = ("foreach", "fused", "capturable", "differentiable")


def load(
    folder: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, comm: Communicator | None = None,
    masters: MasterWeights | None = None, check: Callable[[object], object] | None = None,
) -> object:  # fmt: skip
    """Load what ``save`` has saved, on any number of ranks and with any strategy; returns its ``extra``.

    All ranks of ``comm`` call it, after the model, its strategy and its optimizer have been made as for training. Each
    reads the elements that it needs. Arguments are those of ``save``; without ``optimizer`` the model alone is loaded.
    ``check`` is a function of ``extra`` that may refuse it by a ``DtlibError``.

    Floating-point values are converted to the model's type, from the float32 masters where those were saved; other
    types must agree. Masters that were not saved get the values. Settings of the optimizer's groups become those that
    were saved, but for ``foreach`` and others that say how this machine computes. Generators of random numbers go on
    where they were on the same rank of as many ranks; with another number of ranks they are left alone.

    Raises:
        CheckpointError: on all ranks, with the same sentence, before anything is changed: for a folder without a whole
            checkpoint, and for a model or an optimizer that is not like the saved one; by name.
    """
    comm = as_communicator(comm) if comm is not None else init().comm
    folder = Path(folder)
    index = comm.broadcast_object(together(comm, lambda: read_index(folder) if comm.rank == 0 else None))

    extra = decoded(index["extra"])

    def look():
        if check is not None:
            check(extra)
        for name in list(index["files"])[comm.rank :: comm.size]:
            check_file(folder, index, name)
        return holdings_of(model, optimizer, masters, comm)

    held = together(comm, look)
    here = {holding.name for holding in held}
    experts = comm.all_gather_object([holding.name for holding in held if holding.expert])
    elsewhere = {name for each in experts for name in each} - here

    def compare():
        with making_sense(folder / INDEX):
            _check_model(folder, index["tensors"], held, elsewhere)
            if optimizer is not None:
                _check_optimizer(folder, index["optimizer"], optimizer, held, elsewhere)

    together(comm, compare)
    with Reader(folder, index) as reader:
        others = together(comm, lambda: _others(reader, held, optimizer, comm))
        together(comm, lambda: _fill(reader, held, optimizer, *others))  # only a disk that fails now can stop it
    if hasattr(optimizer, "shard_of"):
        optimizer.give_values()  # type: ignore[union-attr]  # it is a ZeroOptimizer
    return extra


def _others(reader: Reader, held: list[Holding], optimizer, comm) -> tuple[dict, list, dict]:
    """All but the model's values, which changes nothing: the optimizer's states, its settings, random states."""
    states, settings, owned_here, files = {}, [], keys_here(optimizer), list(reader.index["files"])
    with making_sense(reader.folder / INDEX):
        for holding in held:
            if holding.key in owned_here and (state := _state(reader, holding, optimizer)):
                states[holding.key] = state
        for here in {id(o): o for o in (optimizer, local(optimizer)) if o is not None}.values():
            for group, saved in zip(here.param_groups, reader.index["optimizer"]["groups"], strict=True):
                for name, value in saved["settings"].items():
                    if name not in MACHINE:
                        settings.append((group, name, _setting(group.get(name), value)))
        return states, settings, _random_states(reader.file(files[comm.rank])) if len(files) == comm.size else {}


@torch.no_grad()
def _fill(reader: Reader, held: list[Holding], optimizer, states: dict, settings: list, random: dict) -> None:
    for holding in held:
        roles = reader.index["tensors"][holding.name]["roles"]
        values = reader.read(
            holding.name, "master" if "master" in roles else "value", holding.slice.start, holding.slice.stop
        )
        for tensor in (holding.value, holding.master):
            if tensor is not None:
                elements = elements_here(tensor)
                elements.copy_(values.view(elements.shape))
    for put, numbers in random.items():
        put(numbers)
    if optimizer is not None:
        local(optimizer).state.clear()
        local(optimizer).state.update(states)
    for group, name, value in settings:
        group[name] = value


@torch.no_grad()
def _state(reader: Reader, holding: Holding, optimizer) -> dict:
    """The optimizer's state of a parameter. Numbers are given to every shard of it, even one without elements."""
    key, state = holding.key, {}
    assert key is not None
    for role, entry in reader.index["tensors"][holding.name]["roles"].items():
        kind, _, what = role.partition("/")
        if kind == "state":
            flat = reader.read(holding.name, role, holding.slice.start, holding.slice.stop)
            # As torch's load_state_dict does it: in the type of what is trained.
            dtype = key.dtype if entry["dtype"] in FLOATS else flat.dtype
            state[what] = torch.empty_like(key, dtype=dtype)
            elements = elements_here(state[what])
            elements.copy_(flat.view(elements.shape))
    group = next(g for g in local(optimizer).param_groups if any(p is key for p in g["params"]))
    for what, number in reader.index["optimizer"]["numbers"].get(holding.name, {}).items():
        if isinstance(number, dict):
            # torch counts steps in host memory, unless the whole step runs on the GPU.
            on_host = what == "step" and not (group.get("fused") or group.get("capturable"))
            number = torch.tensor(
                number["value"], dtype=TYPES[number["dtype"]], device="cpu" if on_host else key.device
            )
        state[what] = number
    return state


def _setting(before, saved):
    """A setting of a group in the form that it has here: JSON knows no tuples and no tensors."""
    if isinstance(saved, dict):
        saved = saved["value"]
    if isinstance(before, torch.Tensor):
        return before.fill_(saved)
    return tuple(saved) if isinstance(before, tuple) else saved


def _random_states(file) -> dict:
    """By what takes them; the CPU's was tried on another generator."""
    states = {torch.set_rng_state: file.get_tensor("random/cpu")}
    torch.Generator().set_state(states[torch.set_rng_state])
    if "random/cuda" in file.keys() and torch.cuda.is_available():  # noqa: SIM118 (a file, not a dictionary)
        states[torch.cuda.set_rng_state] = file.get_tensor("random/cuda")
    return states


# What is refused


def _check_model(folder, saved: dict, held: list[Holding], elsewhere: set) -> None:
    """``elsewhere`` are experts that other ranks have."""
    ours = {holding.name: holding for holding in held}
    if missing := ours.keys() - saved.keys():
        raise CheckpointError(f"{folder} lacks {_some(missing)} of the model: build the model that was saved.")
    if unexpected := saved.keys() - ours.keys() - elsewhere:
        raise CheckpointError(f"The model lacks {_some(unexpected)} of {folder}: build the model that was saved.")
    for name, holding in ours.items():
        here, there = tuple(holding.slice.shape), tuple(saved[name]["shape"])
        if here != there:
            raise CheckpointError(
                f"{name} has shape {there} in {folder} and {here} in the model: build the model that was saved."
            )
        kind, before = str(holding.value.dtype).removeprefix("torch."), saved[name]["roles"]["value"]["dtype"]
        if kind != before and not (kind in FLOATS and before in FLOATS):
            raise CheckpointError(
                f"{name} is {before} in {folder} and {kind} in the model, and only floating-point types are converted "
                "into each other: build the model that was saved."
            )


def _check_optimizer(folder, saved: dict | None, optimizer, held: list[Holding], elsewhere: set) -> None:
    if saved is None:
        raise CheckpointError(
            f"{folder} was saved without an optimizer: load without optimizer=, and create the optimizer afterwards."
        )
    here, without = type(local(optimizer)).__name__, "or load without optimizer=, and make a new one afterwards"
    if here != saved["class"]:
        raise CheckpointError(
            f"{folder} has the states of {saved['class']}, and the optimizer is {here}: make the other one, {without}."
        )
    groups = names_of_groups(optimizer, held)
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
