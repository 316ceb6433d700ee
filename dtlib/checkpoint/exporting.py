"""``export``: a checkpoint for who has torch alone."""

import warnings
from os import PathLike
from pathlib import Path

import torch

from dtlib.checkpoint.folder import TYPES, Reader, check_file, decoded, read_index


def export(folder: str | PathLike[str], out: str | PathLike[str]) -> None:
    """Write the checkpoint in ``folder`` once more, into the folder ``out``, in torch's distributed checkpoint format.

    One process calls it and holds all of it in memory. There, without dtlib:

        state: dict = {"model": model.state_dict()}
        torch.distributed.checkpoint.load(state, checkpoint_id=out)

    ``model`` has all names of tied parameters, as ``state_dict()`` has. If they were saved: ``optimizer`` has ``state``
    by the parameter's name and ``param_groups``, as ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives
    them; ``masters`` the float32 copies; ``extra`` what was given. Random states stay behind.

    Raises:
        CheckpointError: for a folder without a whole checkpoint.
    """
    import torch.distributed.checkpoint  # which takes seconds, and every rank of a training imports this file

    folder = Path(folder)
    index = read_index(folder)
    for name in index["files"]:
        check_file(folder, index, name)
    with Reader(folder, index) as reader:
        model = {name: reader.read(name, "value") for name in index["tensors"]}
        model |= {alias: model[name] for alias, name in index["aliases"].items() if name in model}
        state: dict = {"model": model}
        masters = {name: reader.read(name, "master") for name in _with_role(index, "master")}
        if index["optimizer"] is not None:
            state["optimizer"] = _optimizer(reader)
    if masters:
        state["masters"] = masters
    if index["extra"] is not None:
        state["extra"] = decoded(index["extra"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, as it should be
        torch.distributed.checkpoint.save(state, checkpoint_id=out, no_dist=True)


def _with_role(index: dict, role: str) -> list[str]:
    return [name for name, tensor in index["tensors"].items() if role in tensor["roles"]]


def _optimizer(reader: Reader) -> dict:
    saved, states = reader.index["optimizer"], {}
    for name, tensor in reader.index["tensors"].items():
        roles = [role for role in tensor["roles"] if role.startswith("state/")]
        numbers = saved["numbers"].get(name, {})
        if roles or numbers:
            states[name] = {role.removeprefix("state/"): reader.read(name, role) for role in roles}
            states[name] |= {what: _number(number) for what, number in numbers.items()}
    groups = [{**{k: _number(v) for k, v in g["settings"].items()}, "params": g["parameters"]} for g in saved["groups"]]
    return {"state": states, "param_groups": groups}


def _number(saved):
    return torch.tensor(saved["value"], dtype=TYPES[saved["dtype"]]) if isinstance(saved, dict) else saved
