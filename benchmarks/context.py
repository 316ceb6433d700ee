"""Long sequences and experts: zigzag beside contiguous, exchanges that travel meanwhile, experts beside gloo's.

Two of the four ranks compute where times are real; on all four computing is EMULATED: a quarter block of work sleeps.
Bounds by counting quarter blocks: zigzag over contiguous is 2N / (4N - 2), 2/3 on two ranks and 4/7 on four.
"""

import time

import torch
from torch import nn

from benchmarks.compare import compare
from benchmarks.peers import torch_group
from dtlib.parallel.context.attention import Sequence, ring_attention
from dtlib.parallel.expert.plain import MixtureOfExperts

RANKS = 4
REPEATS = 9
TOKENS, HEADS, WIDTH = 4096, 4, 64
QUARTER = 0.02  # seconds of emulated work
LATENCY, BANDWIDTH = 0.001, 1e6  # of the emulated network: a slice travels about as long as a quarter block takes
FEATURES, HIDDEN, BATCH = 256, 1024, 1024


class Emulated(Sequence):
    """Work that sleeps; half as long where half is masked."""

    def blocks(self, owner):
        for rows, columns, later in super().blocks(owner):
            time.sleep(QUARTER * (1 if later is None else 0.5))
            yield rows, columns, later


class InTurn(Emulated):
    """Exchanges that end before the work begins."""

    def pass_on(self, pair, next_owner, tag=0):
        arrived = super().pass_on(pair, next_owner, tag)()
        return lambda: arrived


def rows(world, repeats: int):
    torch.set_num_threads(1)
    pair = world.comm.split(world.rank // 2)
    if world.rank < 2:
        ways = {order: _attention(Sequence(pair, TOKENS, order, True), TOKENS, HEADS, WIDTH) for order in ORDERS}
        case = f"zigzag, forward and backward, {TOKENS} tokens, 2 ranks"
        yield compare(pair, case, "contiguous (bound 0.667)", ways["zigzag"], ways["contiguous"], repeats)
        yield from _experts(world, pair, repeats)
    else:
        torch_group(world)
    world.comm.barrier()
    ways = {order: _attention(Emulated(world.comm, 64, order, True), 64, 1, 4, backward=False) for order in ORDERS}
    case = "zigzag, forward, EMULATED work, 4 ranks"
    yield compare(world.comm, case, "contiguous (bound 0.571)", ways["zigzag"], ways["contiguous"], repeats)
    slow = world.comm.emulate_network(LATENCY, BANDWIDTH)
    overlapped, not_overlapped = (
        _attention(kind(slow, 1024, "zigzag", True), 1024, 1, 8, backward=False) for kind in (Emulated, InTurn)
    )
    case = "exchange during the work, EMULATED work and network, 4 ranks"
    yield compare(world.comm, case, "exchange, then work", overlapped, not_overlapped, repeats)


ORDERS = ("zigzag", "contiguous")


def _attention(sequence, tokens, heads, width, backward=True):
    torch.manual_seed(0)
    here = len(sequence.positions[sequence.comm.rank])
    q, k, v = (torch.randn(1, heads, here, width, requires_grad=backward) for _ in range(3))

    def step():
        out = ring_attention(q, k, v, sequence)
        if backward:
            out.backward(torch.ones_like(out))

    return step


def _experts(world, pair, repeats):
    """A step of a layer of four experts, top-2: beside the same on gloo, and beside one process with all tokens."""
    group = torch_group(world)
    gloo = torch.distributed.new_group([0, 1], use_local_synchronization=True) if group else None
    torch.manual_seed(0)
    ours = MixtureOfExperts(FEATURES, [_expert(), _expert()], pair, top=2)
    theirs = OnGloo([_expert(), _expert()], gloo)
    alone = MixtureOfExperts(FEATURES, [_expert() for _ in range(4)], pair.split(pair.rank), top=2)
    torch.manual_seed(world.rank)
    x = torch.randn(BATCH, FEATURES)
    whole = torch.cat([x, x])

    def step(layer, x):
        def run():
            (layer(x.requires_grad_()).square().mean() + 0.01 * layer.balance).backward()

        return run

    case = f"layer of experts, {BATCH} tokens a rank, 2 ranks"
    yield compare(pair, case, "torch all_to_all_single, gloo", step(ours, x), step(theirs, x), repeats)
    one = step(alone, whole)
    yield compare(
        pair, case, "one process, all tokens", step(ours, x), lambda: one() if pair.rank == 0 else None, repeats
    )


def _expert():
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES))


class OnGloo(nn.Module):
    """What somebody writes in forty lines on torch: top-2 without capacity."""

    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group, self.ranks = nn.ModuleList(experts), group, group.size()
        self.gate = nn.Linear(FEATURES, len(experts) * self.ranks, bias=False)

    def forward(self, x):
        from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        share = chosen.flatten().bincount(minlength=self.gate.out_features) / chosen.numel()
        torch.distributed.all_reduce(share, group=self.group)
        self.balance = self.gate.out_features * (share / self.ranks * probabilities.mean(0)).sum()
        expert, token = chosen.flatten(), torch.arange(len(x)).repeat_interleave(2)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=self.gate.out_features)
        theirs = torch.empty_like(counts)
        torch.distributed.all_to_all_single(theirs, counts, group=self.group)
        theirs = theirs.view(self.ranks, -1)
        sent, come = counts.view(self.ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        rows = exchange(x[token[order]], come, sent, self.group)
        pieces, done = rows.split(theirs.flatten().tolist()), [None] * theirs.numel()
        here = len(self.experts)
        for e, layer in enumerate(self.experts):
            done[e::here] = layer(torch.cat(pieces[e::here])).split(theirs[:, e].tolist())
        back = exchange(torch.cat(done), sent, come, self.group)
        return torch.zeros_like(x).index_add(0, token[order], back * weights.flatten()[order, None])
