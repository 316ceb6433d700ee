"""``save``: every rank writes its slices, then rank 0 commits."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.checkpoint.folder import (
    TYPES,
    CheckpointError,
    check_pieces,
    commit,
    encoded,
    file_name,
    read_index,
    together,
    write_file,
)
from dtlib.checkpoint.holdings import aliases_of, holdings_of, local, names_of_groups, settings_of, states_of
from dtlib.comm import as_communicator
from dtlib.gradients.precision import MasterWeights
from dtlib.gradients.same_model import digest_of
from dtlib.world import init

if TYPE_CHECKING:
    from dtlib.comm import Communicator


def save(
    folder: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, comm: Communicator | None = None,
    masters: MasterWeights | None = None, extra: object = None,
) -> None:  # fmt: skip
    """Save a model, its optimizer and the random states in ``folder``, in place of what was saved there before.

    All ranks of ``comm`` call it, with the same folder, which all of them see. It returns when the checkpoint is on
    disk. A run that is killed at any moment leaves the one before whole; there has to be room for both.

    Args:
        folder: made if it is not there. Other files in it are left alone.
        model: an ``nn.Module``, plain, in ``DataParallel`` or after ``fully_shard``. Parameters and persistent buffers
            are saved, the latter as rank 0 has them.
        optimizer: one of torch's, over the model's parameters or its masters, or a ``ZeroOptimizer``. States that have
            the parameter's shape, single numbers, and the settings of its groups are saved.
        comm: by default the world's. Plain models on several ranks must be the same on all: each writes a slice.
        masters: the ``MasterWeights`` that the optimizer was made of, if it was.
        extra: what JSON can hold, and tuples and any keys: a scheduler's ``state_dict()``, positions in the data, such
            as a loader's epoch. That of rank 0 counts.

    Raises:
        CheckpointError: on all ranks, with the same sentence: where a rank cannot write, the model and the optimizer do
            not belong together, or have what cannot be saved.
    """
    comm = as_communicator(comm) if comm is not None else init().comm
    folder = Path(folder)
    mark = comm.broadcast_object(secrets.token_hex(8) if comm.rank == 0 else None)
    path = folder / file_name(comm.rank, mark)

    def write():
        tensors, summary = _what_this_rank_writes(model, optimizer, masters, extra, comm)
        return {**summary, "size": write_file(path, tensors, mark)}

    try:
        mine = together(comm, write)
        everyones = comm.all_gather_object(mine)
        index = together(comm, lambda: {"id": mark, **_index(everyones, mark)})
        together(comm, lambda: commit(folder, index) if comm.rank == 0 else None)
    except CheckpointError:
        if not comm.broadcast_object(comm.rank == 0 and _is_committed(folder, mark)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def _is_committed(folder: Path, mark: str) -> bool:
    """Whether this checkpoint has taken its place, although the disk failed afterwards."""
    with suppress(CheckpointError):
        return read_index(folder)["id"] == mark
    return False


def _what_this_rank_writes(model, optimizer, masters, extra, comm) -> tuple[dict, dict]:
    """Tensors by their key in this rank's file, and what the index has to know about them."""
    held = holdings_of(model, optimizer, masters, comm)
    tensors, pieces, numbers, digests = random_states(), [], {}, {}
    for holding in held:
        roles = {"value": holding.value}
        if holding.master is not None and holding.master.dtype != holding.value.dtype:
            roles["master"] = holding.master
        states, counters = states_of(optimizer, holding)
        roles.update((f"state/{what}", state) for what, state in states.items())
        if counters and holding.counts(comm.rank):
            numbers[holding.name] = counters
        if holding.replicated:
            digests[holding.name] = digest_of(roles.values())
        written = holding.written
        for role, tensor in roles.items():
            kind = str(tensor.dtype).removeprefix("torch.")
            if kind not in TYPES:
                raise CheckpointError(f"{holding.name} is {kind}, which safetensors does not support: convert it.")
            pieces.append((holding.name, role, written.shape, kind, written.start, written.stop))
            if written.start < written.stop:
                tensors[f"{holding.name}/{role}"] = holding.cut(tensor)
    groups = None
    if optimizer is not None:
        named = zip(names_of_groups(optimizer, held), settings_of(optimizer), strict=True)
        groups = [{"parameters": names, "settings": settings} for names, settings in named]
    try:
        extra = json.loads(json.dumps(encoded(extra)))
    except (TypeError, ValueError) as problem:
        raise CheckpointError(
            f"extra cannot be written as JSON ({problem}): pass numbers, text, lists, tuples or dicts."
        ) from None
    name = None if optimizer is None else type(local(optimizer)).__name__
    return tensors, {
        "pieces": pieces, "numbers": numbers, "groups": groups, "class": name, "aliases": aliases_of(model),
        "extra": extra, "digests": digests,
    }  # fmt: skip


def random_states() -> dict[str, torch.Tensor]:
    """torch's generators of this rank: the CPU's, and that of its GPU if it uses one."""
    states = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["random/cuda"] = torch.cuda.get_rng_state()
    return states


def _index(everyones: list[dict], mark: str) -> dict:
    """What all ranks together have written."""
    first = everyones[0]
    tensors: dict[str, dict] = {}
    numbers: dict[str, dict] = {}
    for rank, summary in enumerate(everyones):
        numbers.update(summary["numbers"])
        for name, role, shape, kind, start, stop in summary["pieces"]:
            tensor = tensors.setdefault(name, {"shape": shape, "roles": {}})
            entry = tensor["roles"].setdefault(role, {"dtype": kind, "pieces": {}})
            if (tensor["shape"], entry["dtype"]) != (shape, kind):
                raise CheckpointError(
                    f"The models differ: {name} is {tensor['shape']} {entry['dtype']} on rank 0 and {shape} {kind} on "
                    f"rank {rank}. Build the same model on all ranks."
                )
            if start < stop:
                entry["pieces"][file_name(rank, mark)] = f"{start}:{stop}"
    for rank, summary in enumerate(everyones):
        if lacking := sorted(first["digests"].keys() ^ summary["digests"].keys()):
            raise CheckpointError(
                f"{lacking[0]} is on rank {0 if lacking[0] in first['digests'] else rank} and not on rank "
                f"{rank if lacking[0] in first['digests'] else 0}, as if ranks had other stages of a pipeline: save "
                "each stage in a folder of its own, with comm= the ranks that have it, or by engine.save_checkpoint()."
            )
        if apart := [name for name, digest in first["digests"].items() if summary["digests"][name] != digest]:
            raise CheckpointError(
                f"Values or optimizer states of {apart[0]} differ between ranks 0 and {rank}: average them before you "
                "save, for example with LocalSGD.finish(), or save on each rank with comm.split(rank)."
            )
    for name, tensor in tensors.items():
        for role, entry in tensor["roles"].items():
            check_pieces(f"{name}/{role}", tensor["shape"], entry)
    optimizer = None
    if first["groups"] is not None:
        for number, group in enumerate(first["groups"]):  # of all ranks: experts are not the same everywhere
            names = [name for summary in everyones for name in summary["groups"][number]["parameters"]]
            group["parameters"] = list(dict.fromkeys(names))
        optimizer = {"class": first["class"], "groups": first["groups"], "numbers": numbers}
    return {
        "files": {file_name(rank, mark): summary["size"] for rank, summary in enumerate(everyones)},
        "tensors": tensors, "aliases": first["aliases"], "optimizer": optimizer, "extra": first["extra"],
    }  # fmt: skip
