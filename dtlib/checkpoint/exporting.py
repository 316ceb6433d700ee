"""``export``: convert a checkpoint to PyTorch's distributed checkpoint format."""

import warnings
from os import PathLike
from pathlib import Path

import torch

from dtlib.checkpoint.folder import TYPES, Reader, check_file, decoded, read_index


def export(folder: str | PathLike[str], out: str | PathLike[str]) -> None:
    """Convert the checkpoint in ``folder`` to torch's distributed checkpoint format, in the folder ``out``.

    One process calls it, and needs memory for the whole checkpoint. A program without dtlib can load the result:

        state: dict = {"model": model.state_dict()}
        torch.distributed.checkpoint.load(state, checkpoint_id=out)

    The result has these entries, the last three only if they were saved:

    * ``model``: with all names of tied parameters, like ``state_dict()``;
    * ``optimizer``: ``state`` by parameter name, and ``param_groups``, in the form of
      ``torch.distributed.checkpoint.state_dict.get_state_dict``;
    * ``masters``: the float32 master weights;
    * ``extra``: the argument of ``save``.

    Random states are not exported.

    Raises:
        CheckpointError: if ``folder`` has no complete checkpoint.
    """
    # Imported here because it takes seconds, and every training rank imports this file.
    import torch.distributed.checkpoint

    folder = Path(folder)
    index = read_index(folder)
    for name in index["files"]:
        check_file(folder, index, name)
    reader = Reader(folder, index)
    model = {name: reader.read(name, "value") for name in index["tensors"]}
    model |= {alias: model[name] for alias, name in index["aliases"].items() if name in model}
    state: dict = {"model": model}
    if masters := [name for name, tensor in index["tensors"].items() if "master" in tensor["roles"]]:
        state["masters"] = {name: reader.read(name, "master") for name in masters}
    if index["optimizer"] is not None:
        state["optimizer"] = _optimizer(reader)
    if index["extra"] is not None:
        state["extra"] = decoded(index["extra"])
    with warnings.catch_warnings():
        # torch warns that only one process saves, which is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        torch.distributed.checkpoint.save(state, checkpoint_id=out, no_dist=True)


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
