import copy

import pytest
import torch
from torch import nn

from dtlib.errors import DtlibError
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.batch_norm import SyncBatchNorm
from tests.models import batches, build, difference, loss_of, sgd, slice_of
from tests.ranks import on_ranks


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("extra", [0, 1])
def test_training_equals_one_process_with_the_joined_batch(world, extra):
    data = batches("convolutional", 5, 4 * world.size + extra)
    reference = build("convolutional")
    optimizer = sgd(reference)
    for batch in data:
        loss_of(reference, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    converted = SyncBatchNorm.convert_sync_batchnorm(build("convolutional"))
    ours = DataParallel(converted, world.comm)
    optimizer = sgd(ours)
    for batch in data:
        mine = slice_of(batch, world.rank, world.size)
        # The gradient of one rank's loss reaches the others through the statistics, before ranks are averaged: the
        # loss itself has to be this rank's weighted summand of the mean over samples.
        (loss_of(ours, mine) * world.size * len(mine[0]) / len(batch[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(ours, reference) <= 1e-12
    ours.eval(), reference.eval()
    torch.testing.assert_close(ours(data[0][0]), reference(data[0][0]), rtol=0, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("momentum,affine,tracks", [(None, True, True), (0.3, False, True), (0.1, True, False)])
def test_options_are_those_of_torch(world, momentum, affine, tracks):
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    theirs = nn.BatchNorm1d(3, momentum=momentum, affine=affine, track_running_stats=tracks).double()
    ours = SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.BatchNorm1d(3, momentum=momentum, affine=affine, track_running_stats=tracks).double()),
        world.comm,
    )
    for _ in range(3):
        expected, got = theirs(x), ours(slice_of((x, x[:, 0, 0]), world.rank, 2)[0])
    torch.testing.assert_close(got, expected[world.rank * 4 : world.rank * 4 + 4], rtol=0, atol=1e-12)
    if tracks:
        torch.testing.assert_close(ours[0].running_var, theirs.running_var, rtol=0, atol=1e-12)


@on_ranks(2)
def test_other_shapes_and_join_are_refused(world):
    layer = SyncBatchNorm(3)
    with pytest.raises(DtlibError, match="got 1 values a channel on all ranks together"):
        layer(torch.ones(1 if world.rank else 0, 3))
    with pytest.raises(DtlibError, match=r"takes inputs of shape \(N, 3, ...\) and got \(4, 2\)"):
        layer(torch.ones(4, 2))
    model = DataParallel(nn.Sequential(SyncBatchNorm(3, world.comm)), world.comm)
    with pytest.raises(DtlibError, match="join"), model.join():
        pass
    world.comm.barrier()


@on_ranks(2)
def test_what_conversion_keeps(world):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.append(model[1])  # one layer under two names
    seen = []
    handle = model[1].register_forward_hook(lambda *_: seen.append(1))
    model = SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[1] is model[3] and isinstance(model[1], SyncBatchNorm)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3)
    torch.testing.assert_close(twin(x), model(x))
    assert twin[1].comm is model[1].comm and twin[1].weight is not model[1].weight
    assert len(seen) == 4
    handle.remove()
    model(x)
    assert len(seen) == 4
    assert model[1](x.bfloat16()).dtype == torch.bfloat16
