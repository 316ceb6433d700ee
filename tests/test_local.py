"""Steps alone, then a message, beside their values (test_parity.py): bytes, checkpoints and refusals."""

import copy

import torch
from torch import nn

import dtlib
from dtlib.parallel.local import DiLoCo, LocalSGD, plain
from dtlib.theory import collectives
from tests.cases import refuses
from tests.models import EXACT, apart
from tests.ranks import on_ranks

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **settings)


def gradient_of(model, rank: int, step: int) -> None:
    """Gradients of this rank's batch of this step, with a random cotangent."""
    chance = torch.Generator().manual_seed(1000 * rank + step)
    x, cotangent = (torch.randn(5, size, generator=chance, dtype=torch.float64) for size in (6, 4))
    model.zero_grad()
    model(x).backward(cotangent / 5)


def train(local, model, rank: int, steps) -> list[torch.Tensor]:
    for step in steps:
        gradient_of(model, rank, step)
        local.step()
    return [parameter.detach() for parameter in model.parameters()]


def alone(ranks: int, steps: int, sync_every: int, outer: dict | None) -> list[list[torch.Tensor]]:
    """One process that plays all ranks with AdamW; returns each rank's parameters.

    The outer step is written out: v = m v + way, start -= rate (way + m v).
    """
    outer = outer or {"lr": 1.0, "momentum": 0.0}
    models = [made() for _ in range(ranks)]
    inner = [adamw(model) for model in models]
    starts = [parameter.detach().clone() for parameter in models[0].parameters()]
    speeds = [torch.zeros_like(start) for start in starts]
    for step in range(steps):
        for rank in range(ranks):
            gradient_of(models[rank], rank, step)
            inner[rank].step()
        if (step + 1) % sync_every == 0:
            with torch.no_grad():
                for start, speed, *parameters in zip(starts, speeds, *(m.parameters() for m in models), strict=True):
                    way = sum(start - parameter for parameter in parameters) / ranks
                    speed.mul_(outer["momentum"]).add_(way)
                    start.sub_(outer["lr"] * (way + outer["momentum"] * speed))
                    for parameter in parameters:
                        parameter.copy_(start)
    return [[parameter.detach() for parameter in model.parameters()] for model in models]


def equal(ones, others) -> None:
    assert max(map(apart, ones, others)) <= EXACT


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_plain_and_full_send_what_the_formula_says(world):
    comm, steps, every = world.comm, 11, 4  # it ends within a round
    count = sum(parameter.numel() for parameter in made().parameters())
    once = 8 * collectives.elements_sent("all_reduce", "recursive_doubling", comm.size, comm.rank, count)
    for outer in (None, OUTER):
        for kind in (plain, dtlib.parallel.local):
            model = made()
            optimizers = [adamw(model), *([sgd(model, **outer)] if outer else [])]
            local = (kind.DiLoCo if outer else kind.LocalSGD)(comm, model, *optimizers, every)
            with dtlib.trace() as trace:
                train(local, model, world.rank, range(steps))
            assert trace.sent("all_reduce")[1] == steps // every * once  # beside it, the first step compares values


@on_ranks(2, 3)
def test_a_checkpoint_within_a_round_continues_it(world):
    comm, steps = world.comm, 23
    expected = alone(comm.size, steps, 6, OUTER)[comm.rank]

    def begin():
        model = made()
        inner = adamw(model)
        return model, inner, DiLoCo(comm, model, inner, sgd(model, **OUTER), 6)

    model, inner, local = begin()
    train(local, model, world.rank, range(10))
    saved = copy.deepcopy([local.state_dict(), model.state_dict(), inner.state_dict()])
    model, inner, local = begin()
    model.load_state_dict(saved[1])
    inner.load_state_dict(saved[2])
    local.load_state_dict(saved[0])
    equal(train(local, model, world.rank, range(10, steps)), expected)


@on_ranks(2, 3)
def test_buffers_are_averaged_gradients_stay_and_what_does_not_fit_is_refused(world):
    comm = world.comm

    def refused(why, kind, *arguments, model=None, **settings):
        model = model or made()
        optimizers = [sgd(model, lr=0.1), sgd(model, lr=0.1)]
        refuses(why, kind, comm, model, *optimizers, *arguments, **settings)
        comm.barrier()

    for kind in (plain.DiLoCo, DiLoCo):
        for value in (0, 2.5):
            refused("sync_every", kind, value)
        refused("differ", kind, 2, model=nn.Linear(2, 3 + world.rank))
        model = made()
        few = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for pair in ((few, sgd(model, lr=0.1)), (sgd(model, lr=0.1), few)):
            refuses("give it all", kind, comm, model, *pair, 2)
            comm.barrier()
    normed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    refused("without buffers", plain.DiLoCo, 2, model=normed)
    model = made()
    local = DiLoCo(comm, model, adamw(model), sgd(model, **OUTER), 2)
    train(local, model, world.rank, range(3))
    local.finish()
    once = [parameter.detach().clone() for parameter in model.parameters()]
    local.finish()  # momentum would move them again
    equal([parameter.detach() for parameter in model.parameters()], once)
    other = made()
    for kind in (plain.LocalSGD, LocalSGD):
        refuses("another model", kind, comm, other, sgd(nn.ModuleList([made(), other]), lr=0.1), 2)

    optimizer = sgd(normed, lr=0.1)
    local = LocalSGD(comm, normed, optimizer, 2)
    for _ in range(2):
        optimizer.zero_grad()
        normed(torch.full((2, 3), 1.0 + world.rank).double() * torch.tensor([[1.0], [2.0]]).double()).sum().backward()
        gradients = [parameter.grad.clone() for parameter in normed.parameters()]
        variance = normed[1].running_var.clone()
        local.step()
    equal([parameter.grad for parameter in normed.parameters()], gradients)
    equal([normed[1].running_var], [comm.all_reduce(variance, op="mean")])
