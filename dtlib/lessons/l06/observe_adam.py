"""Runs of Adam with sharded states: parameters, bytes sent and memory."""

from functools import cache

from dtlib.lab.checks.answer_memory import Snapshot, nbytes
from dtlib.lab.checks.equality import NUMBER

STEPS = 3
SETTINGS = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}  # each one changes the result
WIDTHS = {"even": (15, 24, 12), "uneven": (16, 23, 6)}  # 684 parameters divide by 2, 3 and 4; 535 by none of them


def make_net(kind: str):
    """Return the net of this kind."""
    return net_of(*WIDTHS[kind])


def net_of(inside: int, hidden: int, outside: int):
    """Return a perceptron of these sizes in float64, the same on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inside, hidden), nn.Tanh(), nn.Linear(hidden, outside)).double()


def make_batch(kind: str, rank: int, step: int):
    """Return the samples of a rank; every caller gets the same ones."""
    import torch

    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    return torch.randn(4, WIDTHS[kind][0], dtype=torch.float64, generator=generator)


def loss_of(net, x):
    """Return the loss of a net on the samples ``x``."""
    return (net(x) - 1).square().mean()


def flat_of(tensors):
    """Return all tensors as one flat tensor."""
    import torch

    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def length_of(elements: int, ranks: int) -> int:
    """Return the number of elements in a rank's shard, padding included."""
    return -(-elements // ranks)


def own_shard(flat, rank: int, ranks: int):
    """Return the shard of a rank, without padding."""
    length = length_of(len(flat), ranks)
    return flat[rank * length : (rank + 1) * length]


def attempt(run, kind: str):
    """Return the result of ``run()``; for sizes that do not divide by the ranks, return an error as text.

    Errors with the size "even" are raised.
    """
    from mpi4py import MPI

    try:
        return run()
    except (Exception, MPI.Exception) as error:
        if kind == "even":
            raise
        return {"error": f"{type(error).__name__}: {error}", "waited": "Wait" in type(error).__name__}


# build: ShardedAdam(comm, parameters, **settings) with step()


def observe_adam(cls, comm):
    """Return for each net the parameters after each step, bytes sent, and final memory."""
    return [attempt(lambda kind=kind: _train(cls, comm, kind), kind) for kind in WIDTHS]


def _train(cls, comm, kind: str) -> dict:
    from dtlib.comm.watch.recorder import recording

    moments = in_one_process(kind, comm.size)[1]
    start = flat_of(make_net(kind).parameters())
    seen = {"kind": kind, "after": [], "sent": []}
    with Snapshot(cls) as before:
        net = make_net(kind)
        mine = cls(comm, net.parameters(), **SETTINGS)
        for step in range(STEPS):
            net.zero_grad()
            loss_of(net, make_batch(kind, comm.rank, step)).backward()
            with recording() as events:
                mine.step()
            seen["after"].append(flat_of(net.parameters()).tolist())
            seen["sent"].append(sum(event.bytes for event in events if event.kind == "operation"))
        net.zero_grad()
        held = before.new(of=[mine])
    end = flat_of(net.parameters())
    seen["held"] = nbytes(held)
    seen["states"] = nbytes(one for one in held if _has(moments, one))
    seen["copies"] = nbytes(one for one in held if _has(end, one))
    seen["old"] = nbytes(one for one in held if _has(start, one) and not _has(end, one))
    seen["zeros"] = max((one.nbytes for one in held if not one.any()), default=0)
    return seen


@cache  # called with the same arguments for each rank
def in_one_process(
    kind: str,
    ranks: int,
    factor: float = 1,
    only: int | None = None,
    steps: int = STEPS,
    optimizer="AdamW",
    but=(),
    **added,
):
    """Return one process's parameters after each step, and its moments.

    The gradients are those of all ranks, or of rank ``only``, times ``factor``. ``optimizer`` names the class. The
    settings ``but`` have torch's defaults, and ``added`` are more settings.
    """
    import torch

    net = make_net(kind)
    settings = {key: value for key, value in SETTINGS.items() if key not in but} | added
    adam = getattr(torch.optim, optimizer)(net.parameters(), **settings)
    after = []
    for step in range(steps):
        adam.zero_grad()
        for rank in range(ranks) if only is None else [only]:
            (loss_of(net, make_batch(kind, rank, step)) * factor / (ranks if only is None else 1)).backward()
        adam.step()
        after.append(flat_of(net.parameters()))
    states = [adam.state[parameter] for parameter in net.parameters()]
    return after, flat_of([state[key] for key in ("exp_avg", "exp_avg_sq") for state in states])


def _has(numbers, memory) -> bool:
    """Return whether at least half of the nonzero values in ``memory`` are among ``numbers``."""
    import torch

    if memory.dtype == torch.uint8 and len(memory) % NUMBER == 0:
        memory = memory.view(torch.float64)  # memory of an array or of bytes
    values, known = memory[memory != 0].double(), numbers.sort().values
    places = torch.searchsorted(known, values).clamp(1, len(known) - 1)
    distance = torch.minimum((known[places] - values).abs(), (known[places - 1] - values).abs())
    return len(values) > 0 and (distance <= 1e-8 * values.abs()).double().mean().item() >= 0.5
