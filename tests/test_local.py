"""Steps alone, then a message, beside their values (test_parity.py): bytes, fragments and refusals."""

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


def alone(ranks: int, steps: int, sync_every: int, outer=None, parts=None, delay=0, alpha=0.0):
    """One process that plays all ranks with AdamW; returns each rank's parameters. ``parts`` are indices of parameters
    that travel together.

    The outer step is written out: v = m v + way, start -= rate (way + m v).
    """
    models = [made() for _ in range(ranks)]
    inner = [adamw(model) for model in models]
    parameters = [list(model.parameters()) for model in models]
    starts = [parameter.detach().clone() for parameter in parameters[0]]
    speeds = [torch.zeros_like(start) for start in starts]
    parts = parts or [range(len(starts))]
    under_way, turn = None, 0
    for step in range(steps):
        for rank in range(ranks):
            gradient_of(models[rank], rank, step)
            inner[rank].step()
        with torch.no_grad():
            if (step + 1) % (sync_every // len(parts)) == 0:
                ways = {i: [starts[i] - parameters[rank][i] for rank in range(ranks)] for i in parts[turn % len(parts)]}
                under_way, turn = (step + delay, {i: sum(way) / ranks for i, way in ways.items()}), turn + 1
            if under_way and under_way[0] == step:
                for i, way in under_way[1].items():
                    if outer:
                        speeds[i] = outer["momentum"] * speeds[i] + way
                        way = outer["lr"] * (way + outer["momentum"] * speeds[i])
                    starts[i] = starts[i] - way
                    for rank in range(ranks):
                        parameters[rank][i].copy_(alpha * parameters[rank][i] + (1 - alpha) * starts[i])
                under_way = None
    return [[parameter.detach() for parameter in each] for each in parameters]


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


@on_ranks(2, 3, 4, slow=(4,))
def test_fragments_travel_while_the_next_steps_are_computed(world):
    for progress in ("inline", "thread"):
        fragments_travel(world, progress)


def fragments_travel(world, progress):
    comm, steps = world.comm, 23
    settings = {"fragments": 2, "fragment_sync_delay": 2, "fragment_update_alpha": 0.4, "progress": progress}
    parts = [[0], [1, 2, 3]]
    expected = alone(comm.size, steps, 6, OUTER, parts, 2, 0.4)[comm.rank]

    def begin():
        model = made()
        return model, adamw(model), sgd(model, **OUTER)

    model, inner, outer = begin()
    local = DiLoCo(comm, model, inner, outer, 6, **settings)
    names = {parameter: i for i, parameter in enumerate(model.parameters())}
    assert [[names[parameter] for parameter in part] for part in local.fragments] == parts
    equal(train(local, model, world.rank, range(steps)), expected)

    # The same with a checkpoint while a fragment is in flight, from which others go on.
    model, inner, outer = begin()
    local = DiLoCo(comm, model, inner, outer, 6, **settings)
    train(local, model, world.rank, range(10))
    saved = [local.state_dict(), model.state_dict(), inner.state_dict()]
    assert saved[0]["sent"] is not None
    model, inner, outer = begin()
    local_2 = DiLoCo(comm, model, inner, outer, 6, **settings)
    model.load_state_dict(saved[1])
    inner.load_state_dict(saved[2])
    local_2.load_state_dict(saved[0])
    equal(train(local_2, model, world.rank, range(10, steps)), expected)
    refuses("in flight", local.load_state_dict, saved[0])


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
    refused("evenly spaced", DiLoCo, 4, fragments=3)
    refused("evenly spaced", DiLoCo, 8, fragments=8)
    refused("before the next", DiLoCo, 4, fragments=2, fragment_sync_delay=2)
    refused("alpha", DiLoCo, 4, fragment_update_alpha=2)

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
