"""ZeRO stage 3 against one process, and against torch's FSDP2."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2

from benchmarks.peers import torch_group
from dtlib.parallel.sharded import fully_shard
from tests.models import batches, build, difference_of_values, loss_of, part
from tests.ranks import on_ranks
from tests.test_data_parallel import STEPS, train_alone
from tests.test_zero import CLASSES, optimizer_of


def units(model):
    """Some parts of a model, with parameters of odd sizes in each."""
    if hasattr(model, "features"):
        return [model.features, model.classify]
    return [model.layer] if hasattr(model, "layer") else [model.first, model.second]


def sharded(model, comm, **options):
    for module in units(model):
        fully_shard(module, comm, **options)
    return fully_shard(model, comm, **options)


def train(model, optimizer, data, comm, accumulate=1, clip=None, sync_always=True):
    for step, batch in enumerate(data):
        last = (step + 1) % accumulate == 0
        if last or sync_always:
            loss_of(model, part(batch, comm.rank, comm.size)).backward()
        else:
            with model.no_sync():
                loss_of(model, part(batch, comm.rank, comm.size)).backward()
        if last:
            if clip:
                model.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", ["plain", "convolutional", "transformer"])
@pytest.mark.parametrize("optimizer", CLASSES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parity_with_one_process_and_with_fsdp2(world, name, optimizer, reshard, accumulate):
    comm, count = world.comm, 4 * world.size
    data = batches(name, 2 * STEPS, count)
    clip = 0.5 if accumulate == 2 else None
    reference = build(name)
    train_alone(reference, optimizer_of(reference, optimizer), data, world.size, accumulate, clip)
    ours = sharded(build(name, seed=world.rank), comm, reshard_after_forward=reshard)
    train(ours, optimizer_of(ours, optimizer), data, comm, accumulate, clip, sync_always=reshard)
    # The design's bound for float64.
    assert difference_of_values(ours, reference, comm) <= 1e-12
    if accumulate == 1 and world.size > 1:
        theirs, mesh = build(name), DeviceMesh.from_group(torch_group(world), "cpu")
        for module in [*units(theirs), theirs]:
            fsdp2(module, mesh=mesh, reshard_after_forward=reshard)
        peer = optimizer_of(theirs, optimizer)
        for batch in data:
            loss_of(theirs, part(batch, comm.rank, comm.size)).backward()
            peer.step()
            peer.zero_grad()
        assert difference_of_values(ours, theirs, comm) <= 1e-12
