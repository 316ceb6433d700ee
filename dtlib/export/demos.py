"""What an exported file runs: a small model, trained by a strategy on ranks and, beside it, in one process.

A function a strategy takes ``comm`` and the whole batch ``x``, ``y``, and yields the loss of each step.
"""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from dtlib.export.communicator import Communicator
from dtlib.parallel.context.plain import RingAttention, my_tokens
from dtlib.parallel.data.plain import DataParallelBuckets
from dtlib.parallel.expert.plain import MixtureOfExperts
from dtlib.parallel.pipeline.plain import step
from dtlib.parallel.tensor.plain import ParallelMLP

WIDTH, RATE, STEPS = 12, 0.01, 5


def perceptron(hidden):
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


def perceptrons(ranks, make=perceptron):
    torch.manual_seed(0)
    return nn.Sequential(*[make(4 * ranks) for _ in range(ranks)])


def train(model, optimizer, x, y, ranks=1):
    for _ in range(STEPS):
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        if ranks > 1:
            dist.all_reduce(loss.data)
        yield loss.detach() / ranks


def data_parallel(comm, x, y):
    model = DataParallelBuckets(perceptrons(comm.size), comm, bucket_cap_mb=0.001)
    x, y = (tensor.chunk(comm.size)[comm.rank] for tensor in (x, y))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), x, y, comm.size)


def sharded(comm, x, y, stage):
    model = perceptrons(comm.size)
    zero = stage(comm, model, torch.optim.AdamW, list(model), lr=RATE)
    x, y = (tensor.chunk(comm.size)[comm.rank] for tensor in (x, y))
    return train(model, zero, x, y, comm.size)


def pipelined(comm, x, y, schedule):
    stage, is_last = perceptrons(comm.size)[comm.rank], comm.rank == comm.size - 1
    comm.groups = dist.new_group(), dist.new_group()  # on NCCL, messages of one group wait for each other
    optimizer = torch.optim.AdamW(stage.parameters(), lr=RATE)
    for _ in range(STEPS):
        loss = step(comm, stage, x if comm.rank == 0 else None, y if is_last else None, mse_loss, 4, schedule)
        optimizer.step()
        optimizer.zero_grad()
        dist.broadcast(loss := loss if is_last else torch.zeros(()), comm.size - 1)
        yield loss


def tensor_parallel(comm, x, y):
    model = perceptrons(comm.size, lambda hidden: ParallelMLP(WIDTH, hidden, comm))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), x, y)


class Attention(nn.Module):
    """Causal, between all tokens, of which each rank has some; without ``comm``, in one process."""

    def __init__(self, ranks, comm=None):
        super().__init__()
        torch.manual_seed(0)
        self.comm, self.first, self.last = comm, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.first(x).view(1, len(x), 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        ring = (self.comm, True, "zigzag") if self.comm else ()
        out = RingAttention.apply(q, k, v, *ring) if ring else scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(out.transpose(1, 2).flatten(2)[0])


class Mixture(nn.Module):
    """Two experts a token, all in one process."""

    def __init__(self, ranks):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Linear(WIDTH, ranks, bias=False), perceptrons(ranks)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        return sum((weights * (chosen == e)).sum(-1, keepdim=True) * expert(x) for e, expert in enumerate(self.experts))


def context_parallel(comm, x, y):
    comm.groups, model = (dist.new_group(), dist.new_group()), Attention(comm.size, comm)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: comm.all_reduce(gradient.contiguous().clone(), op="mean"))
    x, y = (my_tokens(tensor, comm, dim=0) for tensor in (x, y))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), x, y, comm.size)


def expert_parallel(comm, x, y):
    whole = Mixture(comm.size)
    model = MixtureOfExperts(WIDTH, [whole.experts[comm.rank]], comm, top=2)
    model.gate = whole.gate  # an expert's gradients are those of all ranks' tokens already
    model.gate.weight.register_hook(lambda gradient: comm.all_reduce(gradient.contiguous().clone(), op="mean"))
    x, y = (tensor.chunk(comm.size)[comm.rank] for tensor in (x, y))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), x, y, comm.size)


def main(strategy, make):
    if gpus := torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("nccl" if gpus else "gloo")
    comm, model = Communicator(), make(dist.get_world_size())
    x, y = torch.randn(2, 4 * comm.size, WIDTH)
    alone = train(model, torch.optim.AdamW(model.parameters(), lr=RATE), x, y)
    for loss, expected in zip(strategy(comm, x, y), alone, strict=True):
        assert abs(loss - expected) < 1e-9, f"loss {loss} on ranks, {expected} in one process"
        print(f"rank {comm.rank}: loss {loss.item()} on ranks, {expected.item()} in one process")
    dist.destroy_process_group()
