"""``runtime="torch"``: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and torch's pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn
from torch.func import functional_call

from dtlib.comm import Communicator
from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline import PipelineModule

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle


# Process groups by their world ranks; the default group and its ranks under `all` and `members`.
_groups: dict = {}


def process_group(comm: Communicator) -> distributed.ProcessGroup:
    """Return a torch process group of the ranks of ``comm``: NCCL for GPUs, gloo for the CPU.

    The first call creates torch's default group, unless one exists, for example from ``init_process_group("dtlib")``.
    It lives as long as the process and needs no fixed port. Groups of fewer ranks are created once and then reused.

    Raises:
        DtlibError: for ranks that are not in the default group.
    """
    if isinstance(comm, ProcessGroupCommunicator):
        return comm.group
    members, default = tuple(comm.members), None
    if not distributed.is_initialized():
        from dtlib.comm.torch.store import shared_store

        store = shared_store(comm)
        distributed.init_process_group(store=store, rank=comm.rank, world_size=comm.size)
        default = members
    # The default group was replaced, and its subgroups were destroyed with it.
    if _groups.get("all") is not distributed.group.WORLD:
        _groups.clear()
        _groups.update(all=distributed.group.WORLD, members=default or tuple(range(distributed.get_world_size())))
    default = _groups["members"]
    if members == default:
        return distributed.group.WORLD  # type: ignore[return-value]  # initialised above
    if not set(members) <= set(default):
        raise DtlibError(
            f"torch's default process group has the ranks {', '.join(map(str, default))}, and "
            f"{', '.join(map(str, members))} should train together: create a default group of all ranks first."
        )
    if members not in _groups:
        ranks = [default.index(member) for member in members]
        _groups[members] = distributed.new_group(ranks, use_local_synchronization=True)
    return _groups[members]


def data_parallel(module: nn.Module, comm: Communicator) -> nn.Module:
    """Return the module in a ``DistributedDataParallel`` that allows unused parameters, as ours does."""
    return nn.parallel.DistributedDataParallel(
        module, process_group=process_group(comm), gradient_as_bucket_view=True, find_unused_parameters=True
    )


def zero_redundancy(
    groups: Iterable, optimizer_class: type[torch.optim.Optimizer], settings: dict, comm: Communicator
) -> torch.optim.Optimizer:
    """Return torch's ``ZeroRedundancyOptimizer`` (ZeRO stage 1) for a model in a DistributedDataParallel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, optimizer_class, process_group=process_group(comm), **settings)


def shard_fully(module: nn.Module, comm: Communicator, reshard_after_forward: bool) -> nn.Module:
    """Apply torch's ``fully_shard`` (FSDP2) in place; call it on the blocks of a model first, then on the model."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device = next(module.parameters()).device.type
    mesh = DeviceMesh.from_group(process_group(comm), device)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return module


def pipeline_schedule(
    name: str, submodule: nn.Module, module: PipelineModule, microbatches: int, loss_fn: Callable, inputs: tuple
) -> PipelineScheduleSingle:
    """Return torch's GPipe or 1F1B for this rank's stage of a ``PipelineModule``, with ``step`` and ``eval``.

    ``submodule`` is the module or a ``DistributedDataParallel`` of it. ``inputs`` are the first stage's inputs for all
    micro-batches of a step.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    process_group(module.everyone)
    device = next((parameter.device for parameter in submodule.parameters()), torch.device("cpu"))
    taken, given = _shapes(module, [tensor.tensor_split(microbatches)[0] for tensor in inputs])
    group = process_group(module.comm)
    stage = PipelineStage(submodule, module.comm.rank, module.num_stages, device, taken, given, group=group)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    return kind(stage, microbatches, loss_fn=loss_fn)


def _shapes(module, inputs):
    """Return inputs and outputs of this rank's stage on the meta device, which computes shapes only.

    torch would infer shapes by running each stage on uninitialised memory. Token numbers outside the vocabulary would
    then raise, and running statistics would be updated with random values.

    Raises:
        DtlibError: on all ranks, if a stage needs values to compute its shapes.
    """
    values: tuple | str = tuple(tensor.detach().to("meta") for tensor in inputs)
    # Each stage in turn computes its outputs from the previous stage's shapes, and broadcasts its own.
    for stage in range(module.num_stages):
        if stage == module.comm.rank:
            taken = values
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            try:
                given = functional_call(module, {name: each.to("meta") for name, each in tensors.items()}, taken)
                values = given = given if isinstance(given, tuple) else (given,)
            except (RuntimeError, NotImplementedError) as problem:
                values = f"Stage {stage} does not tell torch's pipeline its shapes ({problem}): use runtime='dtlib'."
        values = module.comm.broadcast_object(values, root=stage)
        if isinstance(values, str):
            raise DtlibError(values)
    return taken, given
