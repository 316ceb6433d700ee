"""Ring attention, to be read from top to bottom: token order, the ring, a block, merging two blocks, and attention.

Every rank has a slice of each sequence. All layers except attention work token by token. In attention, a query needs
the keys of all earlier tokens. So keys and values (K, V) are sent around a ring, and each rank merges its results. A
sequence has 2N chunks, two per rank. Attention of a rank's queries to one slice of K and V is four quarter blocks;
those with only later keys are skipped. Four ranks, causal, quarter blocks per step (diagonal blocks are half masked):

    contiguous   chunks of ranks  00112233           zigzag   chunks of ranks  01233210

    step         0      1      2      3              step         0      1      2      3
    rank 0      K0 2   K3 .   K2 .   K1 .            rank 0      K0 2   K3 2   K2 2   K1 2
    rank 1      K1 2   K0 4   K3 .   K2 .            rank 1      K1 2   K0 2   K3 2   K2 2
    rank 2      K2 2   K1 4   K0 4   K3 .            rank 2      K2 2   K1 2   K0 2   K3 2
    rank 3      K3 2   K2 4   K1 4   K0 4            rank 3      K3 2   K2 2   K1 2   K0 2

In the backward pass, K and V are sent again, and their gradients follow one step later. After N hops, the gradients are
back at the rank of K and V, with a summand from every rank.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import FunctionCtx as Context
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.profiler import record_function

CHUNKS = {"contiguous": lambda r, ranks: (2 * r, 2 * r + 1), "zigzag": lambda r, ranks: (r, 2 * ranks - 1 - r)}


def my_tokens(x: Tensor, group: ProcessGroup, order: str = "zigzag", dim: int = 1) -> Tensor:
    """Return this rank's two chunks of whole sequences: of inputs, of targets, or of positions."""
    chunks = x.chunk(2 * group.size(), dim)
    return torch.cat([chunks[chunk] for chunk in CHUNKS[order](group.rank(), group.size())], dim)


def pass_on(group: ProcessGroup, tensor: Tensor, tag: int = 0) -> Callable:
    """Start to send ``tensor`` to the next rank. Return a function that waits for the previous rank's tensor."""
    rank, ranks, arriving = group.rank(), group.size(), torch.empty_like(tensor)
    if ranks == 1:
        return lambda: tensor
    send = dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=(rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, arriving, group=group, tag=tag, group_peer=(rank - 1) % ranks)
    works = dist.batch_isend_irecv([receive, send])
    return lambda: ([work.wait() for work in works], arriving)[1]


def round_the_ring(group: ProcessGroup, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's index and its keys and values, step by step, while the next ones are in flight."""
    for step in range(group.size()):
        following = pass_on(group, kv) if step < group.size() - 1 else None
        yield (group.rank() - step) % group.size(), kv
        kv = following() if following else kv


def blocks(group: ProcessGroup, owner: int, length: int, causal: bool, order: str) -> Iterator[tuple]:
    """Yield quarter blocks with work: rows of this rank's queries, rows of ``owner``'s keys, and the masked pairs."""
    half = length // 2
    for i, query in enumerate(CHUNKS[order](group.rank(), group.size())):
        for j, key in enumerate(CHUNKS[order](owner, group.size())):
            if not causal or key <= query:
                later = torch.full((half, half), causal and key == query).triu(1)
                with record_function(f"chunk {query} looks at chunk {key}"):
                    yield slice(i * half, (i + 1) * half), slice(j * half, (j + 1) * half), later


def scores_of(q: Tensor, k: Tensor, later: Tensor) -> Tensor:
    """Return the scaled scores of a quarter block, with -inf for masked pairs."""
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later.to(q.device), -torch.inf)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two softmax averages of values, over different keys, into one; ``lse`` is log sum exp(scores)."""
    total = torch.logaddexp(lse, block_lse)
    return (lse - total).exp()[..., None] * out + (block_lse - total).exp()[..., None] * block_out, total


class RingAttention(torch.autograd.Function):
    """Attention over all ranks' tokens. The softmax is recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, causal: bool, order: str) -> Tensor:
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for owner, (k_there, v_there) in round_the_ring(group, torch.stack([k, v])):
            for rows, columns, later in blocks(group, owner, q.shape[-2], causal, order):
                scores = scores_of(q[..., rows, :], k_there[..., columns, :], later)
                block = scores.softmax(-1) @ v_there[..., columns, :], scores.logsumexp(-1)
                out[..., rows, :], lse[..., rows] = merge(out[..., rows, :], lse[..., rows], *block)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = group, causal, order
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, d_out: Tensor) -> tuple:
        (q, k, v, out, lse), (group, causal, order) = ctx.saved_tensors, ctx.rest
        d_q, delta, arriving = torch.zeros_like(q), (d_out * out).sum(-1, keepdim=True), None
        for owner, kv in round_the_ring(group, torch.stack([k, v])):
            d_kv = torch.zeros_like(kv)
            for rows, columns, later in blocks(group, owner, q.shape[-2], causal, order):
                q_here, d_here, (k_there, v_there) = q[..., rows, :], d_out[..., rows, :], kv[..., columns, :]
                p = (scores_of(q_here, k_there, later) - lse[..., rows, None]).exp()  # softmax over all ranks' keys
                d_scores = p * (d_here @ v_there.mT - delta[..., rows, :]) * q.shape[-1] ** -0.5
                d_q[..., rows, :] += d_scores @ k_there
                d_kv[:, ..., columns, :] += torch.stack([d_scores.mT @ q_here, p.mT @ d_here])
            arriving = pass_on(group, d_kv + arriving() if arriving else d_kv, tag=1)
        return d_q, *arriving(), None, None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None, causal: bool = True,
                   order: str = "zigzag") -> Tensor:  # fmt: skip
    """Compute softmax(Q K^T / sqrt(width)) V over all ranks' tokens, for this rank's queries.

    Contract: q, k, v of (batch, heads, tokens, width), float32 or float64, with equal shapes on all ranks and an even
    number of tokens, divided by ``my_tokens`` in the same order.
    """
    return RingAttention.apply(q, k, v, group or dist.group.WORLD, causal, order)


# The full class (module.py, attention.py) adds: grouped-query heads, slices of different lengths, 16
# bits with float32 statistics, recomputation, splitting and gathering of sequences, and torch's attention in any
# module. Where dtlib is installed, checks.py checks the contract above. This file imports only torch.
