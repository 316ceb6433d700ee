"""Averaged gradients, observed: what a net begins with, which gradients it has in the end, and what was reduced."""

import math

EVEN = 4  # samples a rank, where all have as many
WIDTH = 6
CAP = 400  # bytes of a bucket: whoever closes one when it is over has 672 in it
FULL = 336  # bytes of a weight and a bias of the plain net: a bucket may be exactly full


def plain(seed: int):
    """Five layers: ten parameters in a few buckets."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def awkward(seed: int):
    """What real models have: tied weights, a frozen layer, an unused one, and a buffer."""
    import torch
    from torch import nn

    class Awkward(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(10, 10)
            self.frozen = nn.Linear(10, 10).requires_grad_(False)
            self.unused = nn.Linear(7, 3)
            self.outside = nn.Linear(10, 10, bias=False)
            self.outside.weight = self.inside.weight  # tied
            self.register_buffer("shift", torch.randn(10))
            self.register_buffer("scale", torch.rand(10), persistent=False)  # not in the state_dict

        def forward(self, x):
            return self.outside(torch.tanh(self.frozen(self.inside(x)))) * self.scale + self.shift

    torch.manual_seed(seed)
    return Awkward().double()


MODELS = {"plain": plain, "awkward": awkward}
WIDTHS = {"plain": WIDTH, "awkward": 10}
CASES = (("plain", "even"), ("plain", "again"), ("awkward", "even"), ("plain", "uneven"), ("plain", "regrouped"))
GOES_ON = ("again", "regrouped")  # with the net of the case before


def samples_of(rank: int, kind: str, ranks: int) -> int:
    """In the second uneven batch other ranks have more, and all together have more."""
    return {"uneven": 2 * rank + 1, "regrouped": 3 * (ranks - rank)}.get(kind, EVEN)


def cap_of(kind: str) -> int:
    """Bytes of a bucket."""
    return FULL if kind in ("uneven", "regrouped") else CAP


def batch_of(model: str, kind: str, rank: int, ranks: int):
    """The samples of a rank, the same wherever they are made."""
    import torch

    generator = torch.Generator().manual_seed(100 + rank + 50 * (kind in GOES_ON))
    return torch.randn(samples_of(rank, kind, ranks), WIDTHS[model], dtype=torch.float64, generator=generator)


def loss_of(net, x):
    return (net(x) - 1).square().mean()


def values_of(net) -> dict:
    return {name: tensor.flatten().tolist() for name, tensor in [*net.named_parameters(), *net.named_buffers()]}


def gradients_of(net) -> dict:
    return {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in net.named_parameters()}


def observe_hooks(wrap, comm):
    """``wrap(comm, module)`` has broadcast and set hooks; after ``backward()`` gradients are averaged."""
    return _observe(lambda comm, module, cap: wrap(comm, module), comm, hooks=True)


def observe_buckets(cls, comm):
    """``cls(comm, module, bucket_bytes)``; after ``average_gradients(samples)`` gradients are averaged."""
    return _observe(cls, comm, hooks=False)


def _observe(wrap, comm, hooks):
    from dtlib.comm.watch.recorder import recording
    from dtlib.lab.checks.sends import not_waited_for, watched_handles

    cases = []
    nets = {}
    for model, kind in CASES:
        if hooks and kind in ("uneven", "regrouped"):
            continue
        if kind not in GOES_ON:
            net = MODELS[model](seed=comm.rank)  # other values on every rank
            nets[model] = net, wrap(comm, net, cap_of(kind))
        net, wrapped = nets[model]
        x = batch_of(model, kind, comm.rank, comm.size)
        case = {"model": model, "kind": kind, "hooks": hooks, "samples": len(x)}
        case["begins"] = values_of(net)
        net.zero_grad()
        local = MODELS[model](seed=comm.rank)
        for mine, theirs in zip(*([*each.parameters(), *each.buffers()] for each in (local, net)), strict=True):
            mine.data.copy_(theirs.data)
        loss_of(local, x).backward()
        case["local"] = gradients_of(local)
        with recording() as events, watched_handles(comm, "all_reduce") as handles:
            loss_of(net, x).backward()
            if not hooks:
                wrapped.average_gradients(len(x))
        case["gradients"], case["not waited for"] = gradients_of(net), not_waited_for(handles)[0]
        case["reduced"] = [_reduced(event) for event in events if event.kind == "operation"]
        cases.append(case)
    cases[0]["moved"] = _moved(*nets["plain"], comm, hooks)
    return cases


def _reduced(event) -> tuple[str, int, int]:
    """Operation, bytes of its array, and bytes that this rank sent for it."""
    import torch

    size = 0 if event.shape is None else math.prod(event.shape) * getattr(torch, event.dtype).itemsize
    return event.name, size, event.bytes


def _moved(net, wrapped, comm, hooks) -> bool:
    """True if averaging changes parameters: they are set apart, and must stay so."""
    import torch

    with torch.no_grad():
        for parameter in net.parameters():
            parameter += comm.rank
    before = [parameter.detach().clone() for parameter in net.parameters()]
    net.zero_grad()
    loss_of(net, batch_of("plain", "even", comm.rank, comm.size)).backward()
    if not hooks:
        wrapped.average_gradients(EVEN)
    return any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def joined_gradients(model, kind, cases) -> dict:
    """The gradient that one process has on the batches of all ranks."""
    import torch

    net = MODELS[model](seed=0)
    ranks = len(cases)
    loss_of(net, torch.cat([batch_of(model, kind, rank, ranks) for rank in range(ranks)])).backward()
    return gradients_of(net)
