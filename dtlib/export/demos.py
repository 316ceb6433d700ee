"""What an exported file runs: a small model, trained by a strategy on ranks and, beside it, in one process.

A function a strategy takes ``comm`` and the whole batch ``x``, ``y``, and yields the loss of each step.
"""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from dtlib.export.communicator import Communicator
from dtlib.parallel.data.plain import DataParallelBuckets
from dtlib.parallel.pipeline.plain import step
from dtlib.parallel.tensor.plain import ParallelMLP

WIDTH, RATE, STEPS = 12, 0.01, 5


def blocks(ranks, make=lambda hidden: nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))):
    torch.manual_seed(0)
    return nn.Sequential(*[make(4 * ranks) for _ in range(ranks)])


def train(model, optimizer, x, y, rank=0, ranks=1):
    for _ in range(STEPS):
        loss = mse_loss(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        model.zero_grad()
        if ranks > 1:
            dist.all_reduce(loss.data)
        yield loss.detach() / ranks


def data_parallel(comm, x, y):
    model = DataParallelBuckets(blocks(comm.size), comm, bucket_cap_mb=0.001)
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), x, y, comm.rank, comm.size)


def sharded(comm, x, y, stage):
    model = blocks(comm.size)
    zero = stage(comm, model, torch.optim.AdamW, list(model), lr=RATE)
    return train(model, zero, x, y, comm.rank, comm.size)


def pipelined(comm, x, y, schedule):
    stage, is_last = blocks(comm.size)[comm.rank], comm.rank == comm.size - 1
    comm.groups = dist.new_group(), dist.new_group()  # on NCCL, messages of one group wait for each other
    optimizer = torch.optim.AdamW(stage.parameters(), lr=RATE)
    for _ in range(STEPS):
        loss = step(comm, stage, x if comm.rank == 0 else None, y if is_last else None, mse_loss, 4, schedule)
        optimizer.step()
        optimizer.zero_grad()
        dist.broadcast(loss := loss if is_last else torch.zeros(()), comm.size - 1)
        yield loss


def tensor_parallel(comm, x, y):
    model = blocks(comm.size, lambda hidden: ParallelMLP(WIDTH, hidden, comm))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), x, y)


def main(strategy):
    if gpus := torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("nccl" if gpus else "gloo")
    comm, model = Communicator(), blocks(dist.get_world_size())
    x, y = torch.randn(2, 4 * comm.size, WIDTH)
    alone = train(model, torch.optim.AdamW(model.parameters(), lr=RATE), x, y)
    for loss, expected in zip(strategy(comm, x, y), alone, strict=True):
        assert abs(loss - expected) < 1e-9, f"loss {loss} on ranks, {expected} in one process"
        print(f"rank {comm.rank}: loss {loss.item()} on ranks, {expected.item()} in one process")
    dist.destroy_process_group()
