"""What an exported file runs: a small model, trained by a strategy on ranks and, beside it, in one process.

A function a strategy takes ``comm`` and the whole batch ``x``, ``y``, and yields the loss of each step.
"""

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from dtlib.comm import Communicator
from dtlib.parallel.context.plain import RingAttention, my_tokens
from dtlib.parallel.data.plain import DataParallelBuckets
from dtlib.parallel.expert.plain import MixtureOfExperts
from dtlib.parallel.pipeline.plain import step
from dtlib.parallel.tensor.plain import ParallelMLP

WIDTH, RATE, STEPS = 12, 0.01, 5


def perceptron(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


def perceptrons(ranks: int, make: Callable = perceptron) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[make(4 * ranks) for _ in range(ranks)])


def train(model: nn.Module, step: Callable, x: Tensor, y: Tensor, ranks: int = 1) -> Iterator[Tensor]:
    for _ in range(STEPS):
        (loss := mse_loss(model(x), y)).backward()
        step()
        model.zero_grad()
        if ranks > 1:
            dist.all_reduce(loss.data)
        yield loss.detach() / ranks


def data_parallel(comm: Communicator, x: Tensor, y: Tensor) -> Iterator[Tensor]:
    model = DataParallelBuckets(perceptrons(comm.size), comm, bucket_cap_mb=0.001)
    x, y = (tensor.chunk(comm.size)[comm.rank] for tensor in (x, y))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE).step, x, y, comm.size)


def sharded(comm: Communicator, x: Tensor, y: Tensor, stage: Callable) -> Iterator[Tensor]:
    model = perceptrons(comm.size)
    zero = stage(comm, model, torch.optim.AdamW, list(model), lr=RATE)
    x, y = (tensor.chunk(comm.size)[comm.rank] for tensor in (x, y))
    return train(model, zero.step, x, y, comm.size)


def pipelined(comm: Communicator, x: Tensor, y: Tensor, schedule: str) -> Iterator[Tensor]:
    stage, is_last = perceptrons(comm.size)[comm.rank], comm.rank == comm.size - 1
    vars(comm)["groups"] = dist.new_group(), dist.new_group()  # on NCCL, messages of one group wait for each other
    optimizer = torch.optim.AdamW(stage.parameters(), lr=RATE)
    for _ in range(STEPS):
        loss = step(comm, stage, x if comm.rank == 0 else None, y if is_last else None, mse_loss, 4, schedule)
        optimizer.step()
        optimizer.zero_grad()
        dist.broadcast(loss := torch.zeros(()) if loss is None else loss, comm.size - 1)
        yield loss


def tensor_parallel(comm: Communicator, x: Tensor, y: Tensor) -> Iterator[Tensor]:
    model = perceptrons(comm.size, lambda hidden: ParallelMLP(WIDTH, hidden, comm))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE).step, x, y)


class Attention(nn.Module):
    """Causal, between all tokens, of which each rank has some; without ``comm``, in one process."""

    def __init__(self, ranks: int, comm: Communicator | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.comm, self.first, self.last = comm, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).view(1, len(x), 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        ring = (self.comm, True, "zigzag") if self.comm else ()
        out = RingAttention.apply(q, k, v, *ring) if ring else scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(out.transpose(1, 2).flatten(2)[0])


class Mixture(nn.Module):
    """Two experts a token, all in one process."""

    def __init__(self, ranks: int):
        super().__init__()
        self.experts, self.gate = perceptrons(ranks), nn.Linear(WIDTH, ranks, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits, chosen = self.gate(x).topk(2)
        parts = [(logits.softmax(-1) * (chosen == e)).sum(-1, True) * f(x) for e, f in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


def context_parallel(comm: Communicator, x: Tensor, y: Tensor) -> Iterator[Tensor]:
    vars(comm)["groups"], model = (dist.new_group(), dist.new_group()), Attention(comm.size, comm)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: comm.all_reduce(gradient.contiguous().clone(), op="mean"))
    x, y = (my_tokens(tensor, comm, dim=0) for tensor in (x, y))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE).step, x, y, comm.size)


def expert_parallel(comm: Communicator, x: Tensor, y: Tensor) -> Iterator[Tensor]:
    whole = Mixture(comm.size)
    model = MixtureOfExperts(WIDTH, [whole.experts[comm.rank]], comm, top=2)
    model.gate = whole.gate  # an expert's gradients are those of all ranks' tokens already
    model.gate.weight.register_hook(lambda gradient: comm.all_reduce(gradient.contiguous().clone(), op="mean"))
    x, y = (tensor.chunk(comm.size)[comm.rank] for tensor in (x, y))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE).step, x, y, comm.size)


def main(connect: Callable, strategy: Callable, make: Callable) -> None:
    if gpus := torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("nccl" if gpus else "gloo")
    comm, model = connect(), make(dist.get_world_size())
    x, y = torch.randn(2, 4 * comm.size, WIDTH)
    alone = train(model, torch.optim.AdamW(model.parameters(), lr=RATE).step, x, y)
    for loss, expected in zip(strategy(comm, x, y), alone, strict=True):
        assert abs(loss - expected) < 1e-9, f"loss {loss} on ranks, {expected} in one process"
        print(f"rank {comm.rank}: loss {loss.item()} on ranks, {expected.item()} in one process")
    dist.destroy_process_group()
