"""ZeRO stages 1 and 2 against one process, and against torch's ZeroRedundancyOptimizer."""

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.peers import torch_group
from dtlib.parallel.zero import ZeroOptimizer
from tests.models import batches, build, difference, loss_of, part
from tests.ranks import on_ranks
from tests.test_data_parallel import STEPS, train_alone

CLASSES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),
}


def optimizer_of(model, name):
    kind, settings = CLASSES[name]
    return kind([p for p in model.parameters() if p.requires_grad], **settings)


def train(model, optimizer, data, comm, accumulate=1, clip=None):
    for step, batch in enumerate(data):
        loss_of(model, part(batch, comm.rank, comm.size)).backward()
        if (step + 1) % accumulate == 0:
            if clip:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", ["plain", "convolutional", "transformer"])
@pytest.mark.parametrize("optimizer", CLASSES)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parity_with_one_process_and_with_torch(world, name, optimizer, stage, accumulate):
    comm, count = world.comm, 4 * world.size
    data = batches(name, 2 * STEPS, count)
    clip = 0.5 if accumulate == 2 else None
    reference = build(name)
    train_alone(reference, optimizer_of(reference, optimizer), data, world.size, accumulate, clip)
    ours = build(name, seed=world.rank)
    kind, settings = CLASSES[optimizer]
    zero = ZeroOptimizer(ours.named_parameters(), kind, comm, stage, bucket_cap_mb=0.0005, **settings)
    train(ours, zero, data, comm, accumulate, clip)
    # The design's bound for float64.
    assert difference(ours, reference, buffers=False) <= 1e-12
    assert stage == 1 or len(zero._buckets) > 1
    if accumulate == 1 and world.size > 1:
        theirs = build(name)
        ddp = nn.parallel.DistributedDataParallel(
            theirs, process_group=torch_group(world), find_unused_parameters=name == "plain"
        )
        trained = [p for p in theirs.parameters() if p.requires_grad]
        peer = ZeroRedundancyOptimizer(trained, kind, process_group=torch_group(world), **settings)
        for batch in data:
            loss_of(ddp, part(batch, comm.rank, comm.size)).backward()
            peer.step()
            peer.zero_grad()
        assert difference(ours, theirs, buffers=False) <= 1e-12
