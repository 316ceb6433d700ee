"""``save``: every rank writes its slices to a file, then rank 0 writes the index."""

import json
import secrets
from contextlib import suppress
from os import PathLike
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from dtlib.checkpoint import folder as disk
from dtlib.checkpoint.folder import CheckpointError, raise_on_all
from dtlib.checkpoint.local_shards import aliases_of, local, local_shards_of, names_of_groups, settings_of, states_of
from dtlib.comm import Communicator, as_communicator
from dtlib.gradients.precision import MasterWeights
from dtlib.gradients.same_model import digest_of
from dtlib.world import init


def save(
    folder: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, comm: Communicator | None = None,
    masters: MasterWeights | None = None, extra: object = None,
) -> None:  # fmt: skip
    """Save a model, its optimizer and the random states in ``folder``; replace the checkpoint that was there.

    All ranks of ``comm`` call it, with the same folder on a file system that all ranks share. When it returns, the
    checkpoint is on disk. If the run is killed at any moment, the folder has a complete checkpoint: the previous or the
    new one. The disk needs space for both.

    Args:
        folder: created if it does not exist. Other files in it are not changed.
        model: an ``nn.Module``, plain, in ``DataParallel`` or after ``fully_shard``. Parameters and persistent buffers
            are saved; buffers are those of rank 0.
        optimizer: an optimizer of torch for the model's parameters or its masters, or a ``ZeroOptimizer``. States of
            the parameter's shape, single numbers, and the settings of its groups are saved.
        comm: default: the world communicator. Plain models must be equal on all ranks: each rank writes a slice.
        masters: the ``MasterWeights`` from which the optimizer was constructed, if any.
        extra: JSON types, tuples, and dictionaries with any keys. Examples are a scheduler's ``state_dict()`` and the
            epoch of a loader. Rank 0's ``extra`` is saved.

    Raises:
        CheckpointError: on all ranks, with the same message: if a rank cannot write, if the optimizer is not of this
            model, or if a dtype, a state or ``extra`` cannot be saved.
    """
    comm = as_communicator(comm) if comm is not None else init().comm
    folder = Path(folder)
    save_id = comm.broadcast_object(secrets.token_hex(8) if comm.rank == 0 else None)
    path = folder / disk.file_name(comm.rank, save_id)

    def write():
        tensors, summary = _what_this_rank_writes(model, optimizer, masters, extra, comm)
        return {**summary, "size": disk.write_file(path, tensors, save_id)}

    # Rank 0 commits only when all ranks have written their files. If a step fails on one rank, all ranks raise.
    try:
        mine = raise_on_all(comm, write)
        everyones = comm.all_gather_object(mine)
        index = raise_on_all(comm, lambda: {"id": save_id, **_index(everyones, save_id)})
        raise_on_all(comm, lambda: disk.commit(folder, index) if comm.rank == 0 else None)
    except CheckpointError:
        # Delete this rank's file, unless the new index already lists it: the disk may fail after the rename.
        if not comm.broadcast_object(comm.rank == 0 and _is_committed(folder, save_id)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def _is_committed(folder: Path, save_id: str) -> bool:
    """Return whether the folder's index is that of this save."""
    with suppress(CheckpointError):
        return disk.read_index(folder)["id"] == save_id
    return False


def _what_this_rank_writes(model, optimizer, masters, extra, comm) -> tuple[dict, dict]:
    """Return this rank's tensors by their key in the file, and a summary of them for the index."""
    shards = local_shards_of(model, optimizer, masters, comm)
    tensors, pieces, numbers, digests = random_states(), [], {}, {}
    for shard in shards:
        roles = {"value": shard.value}
        if shard.master is not None and shard.master.dtype != shard.value.dtype:
            roles["master"] = shard.master
        states, counters = states_of(optimizer, shard)
        roles.update((f"state/{what}", state) for what, state in states.items())
        if counters and shard.counts(comm.rank):
            numbers[shard.name] = counters
        if shard.replicated:
            digests[shard.name] = digest_of(roles.values())
        written = shard.written
        for role, tensor in roles.items():
            kind = str(tensor.dtype).removeprefix("torch.")
            if kind not in disk.TYPES:
                raise CheckpointError(f"{shard.name} is {kind}, which safetensors does not support: convert it.")
            pieces.append((shard.name, role, written.shape, kind, written.start, written.stop))
            if written.start < written.stop:
                tensors[f"{shard.name}/{role}"] = shard.written_part(tensor)
    groups = None
    if optimizer is not None:
        named = zip(names_of_groups(optimizer, shards), settings_of(optimizer), strict=True)
        groups = [{"parameters": names, "settings": settings} for names, settings in named]
    try:
        extra = json.loads(json.dumps(disk.encoded(extra)))
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
    """Return the states of torch's random generators on this rank: that of the CPU, and of the GPU if it is in use."""
    states = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["random/cuda"] = torch.cuda.get_rng_state()
    return states


def _index(everyones: list[dict], save_id: str) -> dict:
    """Merge the summaries of all ranks into the index; raise an error if they do not fit together."""
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
                entry["pieces"][disk.file_name(rank, save_id)] = f"{start}:{stop}"
    # Each rank writes only a part of a replicated tensor, so these tensors must be equal on all ranks.
    for rank, summary in enumerate(everyones):
        if lacking := sorted(first["digests"].keys() ^ summary["digests"].keys()):
            raise CheckpointError(
                f"{lacking[0]} is on rank {0 if lacking[0] in first['digests'] else rank} but not on rank "
                f"{rank if lacking[0] in first['digests'] else 0}, as in a pipeline: save each stage to its own "
                "folder, with comm= the ranks of this stage, or use engine.save_checkpoint()."
            )
        if other := [name for name, digest in first["digests"].items() if summary["digests"][name] != digest]:
            raise CheckpointError(
                f"Values or optimizer states of {other[0]} differ between ranks 0 and {rank}: average them before you "
                "save, for example with LocalSGD.finish(), or let each rank save its own, with comm.split(rank)."
            )
    for name, tensor in tensors.items():
        for role, entry in tensor["roles"].items():
            disk.check_pieces(f"{name}/{role}", tensor["shape"], entry)
    optimizer = None
    if first["groups"] is not None:
        # Ranks may have different experts, so a group has the names of all ranks.
        for number, group in enumerate(first["groups"]):
            names = [name for summary in everyones for name in summary["groups"][number]["parameters"]]
            group["parameters"] = list(dict.fromkeys(names))
        optimizer = {"class": first["class"], "groups": first["groups"], "numbers": numbers}
    return {
        "files": {disk.file_name(rank, save_id): summary["size"] for rank, summary in enumerate(everyones)},
        "tensors": tensors, "aliases": first["aliases"], "optimizer": optimizer, "extra": first["extra"],
    }  # fmt: skip
