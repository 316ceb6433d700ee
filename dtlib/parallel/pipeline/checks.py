"""Checks for plain.py, which imports only torch. Importing this module adds the checks to its function ``step``.

With these checks, ``group`` may also be a dtlib communicator, and ``dtlib.trace()`` records forward and backward
passes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dtlib.comm import AnyCommunicator, Communicator
from dtlib.comm.watch import recorder
from dtlib.errors import DtlibError
from dtlib.gradients.preconditions import around, check_first, group_and_communicator
from dtlib.parallel.pipeline import plain
from dtlib.schedule import Action


def about_stage(stage: nn.Module, loss_fn: Callable) -> tuple:
    """Return the facts about this rank's stage that ``check`` compares between ranks."""
    trained = any(parameter.requires_grad for parameter in stage.parameters())
    norms = [
        name
        for name, module in stage.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    # A tied layer on two stages cannot be found by identity, because the stages are in different processes. Its values
    # are equal, though, and eight values are enough to compare. Its names differ: stages that were built from the same
    # seed have equal values under equal names.
    values = {name: tuple(p.detach().flatten()[:8].tolist()) for name, p in stage.named_parameters() if p.dim() > 1}
    options = getattr(loss_fn, "keywords", {})  # for a functools.partial
    return trained, norms, values, getattr(loss_fn, "reduction", options.get("reduction", "mean"))


def check(comm: Communicator, batches: list, about: tuple, microbatches: int, schedule: str) -> None:
    """Refuse, on every rank, arguments that plain.py does not support.

    Also refuse stages with gradients unlike those of the whole model. ``about`` is the result of
    ``about_stage``.
    """
    samples = [None if batch is None else len(batch) for batch in batches]
    notes = comm.all_gather_object((samples, microbatches, schedule, about))
    count, wanted = notes[0][0][0], notes[-1][0][1]
    if count != wanted or not count:
        raise DtlibError(f"Rank 0 needs inputs, and the last rank as many targets: they have {count} and {wanted}.")
    if any(note[1:3] != notes[0][1:3] for note in notes) or notes[0][2] not in plain.SCHEDULES:
        raise DtlibError(
            f"All ranks need the same schedule, one of {plain.SCHEDULES}, and the same number of micro-batches: this "
            f"rank has {schedule!r} and {microbatches}."
        )
    if not all(isinstance(note[1], int) for note in notes) or microbatches < 1 or count % microbatches:
        raise DtlibError(f"{count} samples do not divide into {microbatches} micro-batches: use Schedule1F1B.")
    trained, norms, values, reductions = zip(*(note[3] for note in notes), strict=True)
    if idle := [rank for rank, any_trained in enumerate(trained) if not any_trained]:
        raise DtlibError(f"Stages {idle} have no parameter to train: give each stage one, or use PipelineStage.")
    if reductions[-1] != "mean":
        raise DtlibError(f"loss_fn has reduction={reductions[-1]!r}: use the mean over samples.")
    if any(norms) and microbatches > 1:
        rank, names = next((rank, names) for rank, names in enumerate(norms) if names)
        raise DtlibError(
            f"{names[0]} of rank {rank} is batch norm, which would see one micro-batch at a time: use a group norm, "
            "or microbatches=1."
        )
    seen: dict[tuple, tuple] = {}
    for rank, named in enumerate(values):
        for name, some in named.items():
            first, its_name = seen.setdefault(some, (rank, name))
            if first != rank and name != its_name and len(set(some)) > 1:
                raise DtlibError(
                    f"{name} of rank {rank} has the values of {its_name} of rank {first}: a tied layer needs the "
                    "gradients of both stages (use TiedLayerSpec), and other layers need different seeds."
                )


def _check_output(group, dest: int, tensor: object) -> None:
    most = plain.HEADER - 2
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in plain.DTYPES or tensor.dim() > most:
        raise DtlibError(f"A stage returns one tensor of {plain.DTYPES}, of at most {most} dimensions, not {tensor}.")


def _step(
    original, group: AnyCommunicator | None, stage, inputs, targets, loss_fn, microbatches, schedule="1f1b", *groups
):
    group, comm = group_and_communicator(group)
    check(comm, [inputs, targets], about_stage(stage, loss_fn), microbatches, schedule)

    @contextmanager
    def recorded(what: str) -> Iterator[None]:
        with recorder.phase(Action(comm.rank, what[0], int(what[1:])), comm.world_rank):
            yield

    plain.record_function = recorded  # type: ignore[misc, assignment]
    return original(group, stage, inputs, targets, loss_fn, microbatches, schedule, *groups)


around(plain, "step", _step)
check_first(plain, "announce", _check_output)
