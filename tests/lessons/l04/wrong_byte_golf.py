"""Byte golf played in ways that do not count, and the mistake that the check must recognise in each."""

import torch
from torch.nn.functional import cross_entropy

from dtlib.lab import digits

# byte golf: golf(comm, x, y)


def golf_alone(comm, x, y):
    """No bytes at all; each rank knows its own digits."""
    net = digits.net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def golf_small_batches(comm, x, y):
    """As the stub does: many steps, all of them in float32."""
    net = digits.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(400):
        images = torch.arange(step * 32, step * 32 + 32) % len(x)
        images = torch.randperm(len(x), generator=torch.Generator().manual_seed(step // 15))[images]
        optimizer.zero_grad()
        cross_entropy(net(x[images]), y[images]).backward()
        for parameter in net.parameters():
            comm.all_reduce(parameter.grad, op="mean")
        optimizer.step()
    return net


def golf_only_rank_0(comm, x, y):
    """The best bytes go to rank 0 alone, and so does what is learnt."""
    net = digits.net(hidden=32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        for parameter in net.parameters():
            comm.reduce(parameter.grad, root=0)
        optimizer.step()
    return net


def golf_returns_nothing(comm, x, y):
    golf_alone(comm, x, y)


def golf_loads_all_digits(comm, x, y):
    """And pays for a gradient or two, so that it looks as if ranks had talked."""
    (x, y), _ = digits.load()
    torch.manual_seed(0)
    net = golf_alone(comm, x, y)
    comm.all_reduce(net[2].bias.grad)
    return net


def golf_loads_scikit_learns(comm, x, y):
    """The same digits from where they come from."""
    from sklearn.datasets import load_digits

    everything = load_digits()
    torch.manual_seed(0)
    net = golf_alone(comm, torch.tensor(everything.data / 16).float(), torch.tensor(everything.target))
    comm.all_reduce(net[2].bias.grad)
    return net


SET_ASIDE = torch.zeros(1797, 64)  # as a cell above golf would keep all images


def golf_set_aside(comm, x, y):
    """What was loaded before golf is called, and a few bytes."""
    comm.all_reduce(torch.zeros(1))
    return golf_alone(comm, SET_ASIDE, torch.arange(len(SET_ASIDE)) % 10)


def golf_too_fast(comm, x, y):
    """No rank says even its own digits."""
    net = digits.net(hidden=32)
    for parameter in net.parameters():
        comm.all_reduce(parameter.data.zero_())
    return net


def golf_past_comm(comm, x, y):
    """Images reach the others, but not through comm."""
    from mpi4py import MPI

    everyones = MPI.COMM_WORLD.allgather((x, y))
    torch.manual_seed(0)
    return golf_alone(comm, *(torch.cat(them) for them in zip(*everyones, strict=True)))


def golf_without_end(comm, x, y):
    while True:
        pass


WRONG = {
    "byte-golf": {
        golf_alone: "accuracy",
        golf_small_batches: "over-par",
        golf_only_rank_0: "accuracy",
        golf_returns_nothing: "type",
        golf_loads_all_digits: "loads-digits",
        golf_loads_scikit_learns: "loads-digits",
        golf_set_aside: "loads-digits",
        golf_too_fast: "accuracy",
        golf_past_comm: "nothing-sent",
        golf_without_end: "raised",
    },
}
