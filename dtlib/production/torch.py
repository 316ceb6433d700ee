"""``runtime="torch"``: DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2."""

from torch import distributed, nn

from dtlib.comm.torch.process_group import ProcessGroupCommunicator


def process_group(comm):
    """A torch process group of the ranks of ``comm``: NCCL for GPUs and gloo for the CPU; no fixed port.

    It is torch's default group, which lives as long as the process; a later call returns the one that is there.
    """
    if isinstance(comm, ProcessGroupCommunicator):
        return comm.group
    if not distributed.is_initialized():
        from dtlib.comm.torch.store import shared_store

        store = shared_store(comm)
        distributed.init_process_group(store=store, rank=comm.rank, world_size=comm.size)
    return distributed.group.WORLD


def data_parallel(module: nn.Module, comm) -> nn.Module:
    """The module in a ``DistributedDataParallel`` that behaves like ours: unused parameters are allowed."""
    return nn.parallel.DistributedDataParallel(
        module, process_group=process_group(comm), gradient_as_bucket_view=True, find_unused_parameters=True
    )


def zero_redundancy(groups, optimizer_class, settings: dict, comm):
    """torch's ``ZeroRedundancyOptimizer``, ZeRO stage 1, for a model in its DistributedDataParallel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, optimizer_class, process_group=process_group(comm), **settings)


def shard_fully(module: nn.Module, comm, reshard_after_forward: bool) -> nn.Module:
    """torch's ``fully_shard`` (FSDP2), in place; call it on the blocks of a model first, then on the model."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device = next(module.parameters()).device.type
    mesh = DeviceMesh.from_group(process_group(comm), device)
    return fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
