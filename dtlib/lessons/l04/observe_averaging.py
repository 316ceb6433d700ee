"""Runs of answers that average gradients: initial values, final gradients, and reductions."""

import math

EVEN = 4  # samples per rank in even batches
WIDTH = 6
# Bytes of a bucket. An answer that closes a bucket only after it exceeds CAP has 672 bytes in it.
CAP = 400
# Bytes of a weight and a bias of the plain net, so that a bucket is exactly full.
FULL = 336


def plain(seed: int):
    """Return a net of five layers, whose ten parameters need a few buckets."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def awkward(seed: int):
    """Return a net with tied weights, a frozen layer, an unused layer, and buffers, as real models have."""
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
GOES_ON = ("again", "regrouped")  # these cases use the net of the previous case


def samples_of(rank: int, kind: str, ranks: int) -> int:
    """Return the number of samples of a rank. "regrouped" has other numbers and a larger total than "uneven"."""
    return {"uneven": 2 * rank + 1, "regrouped": 3 * (ranks - rank)}.get(kind, EVEN)


def cap_of(kind: str) -> int:
    """Return the largest size of a bucket in bytes."""
    return FULL if kind in ("uneven", "regrouped") else CAP


def batch_of(model: str, kind: str, rank: int, ranks: int):
    """Return the samples of a rank; every caller gets the same ones."""
    import torch

    generator = torch.Generator().manual_seed(100 + rank + 50 * (kind in GOES_ON))
    return torch.randn(samples_of(rank, kind, ranks), WIDTHS[model], dtype=torch.float64, generator=generator)


def loss_of(net, x):
    """Return the loss of a net on the samples ``x``."""
    return (net(x) - 1).square().mean()


def values_of(net) -> dict:
    """Return all parameters and buffers as lists, by name."""
    return {name: tensor.flatten().tolist() for name, tensor in [*net.named_parameters(), *net.named_buffers()]}


def gradients_of(net) -> dict:
    """Return the gradients of all parameters as lists or None, by name."""
    return {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in net.named_parameters()}


def observe_hooks(wrap, comm):
    """Observe ``wrap(comm, module)``, whose hooks average gradients during ``backward()``."""
    return _observe(lambda comm, module, cap: wrap(comm, module), comm, hooks=True)


def observe_buckets(cls, comm):
    """Observe ``cls(comm, module, bucket_bytes)``, whose ``average_gradients(samples)`` averages gradients."""
    return _observe(cls, comm, hooks=False)


def _observe(wrap, comm, hooks):
    from dtlib.comm.watch.recorder import recording
    from dtlib.lab.checks.pending_handles import count_unfinished, watched_handles

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
        # A copy of the net without averaging gives this rank's own gradient, for comparison.
        local = MODELS[model](seed=comm.rank)
        for mine, theirs in zip(*([*each.parameters(), *each.buffers()] for each in (local, net)), strict=True):
            mine.data.copy_(theirs.data)
        loss_of(local, x).backward()
        case["local"] = gradients_of(local)
        with recording() as events, watched_handles(comm, "all_reduce") as handles:
            loss_of(net, x).backward()
            if not hooks:
                wrapped.average_gradients(len(x))
        case["gradients"], case["not waited for"] = gradients_of(net), count_unfinished(handles)[0]
        case["reduced"] = [_reduced(event) for event in events if event.kind == "operation"]
        cases.append(case)
    cases[0]["moved"] = _moved(*nets["plain"], comm, hooks)
    return cases


def _reduced(event) -> tuple[str, int, int]:
    """Return the operation, the bytes of its array, and the bytes that this rank sent for it."""
    import torch

    size = 0 if event.shape is None else math.prod(event.shape) * getattr(torch, event.dtype).itemsize
    return event.name, size, event.bytes


def _moved(net, wrapped, comm, hooks) -> bool:
    """Return whether averaging changes parameters, after making them different on each rank."""
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
    """Return the gradients of one process on the batches of all ranks together."""
    import torch

    net = MODELS[model](seed=0)
    ranks = len(cases)
    loss_of(net, torch.cat([batch_of(model, kind, rank, ranks) for rank in range(ranks)])).backward()
    return gradients_of(net)
