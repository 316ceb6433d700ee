"""Mixture of experts, to be read from top to bottom: sending rows, routing, experts, and the balance loss.

A gate sends each token to one or two of E experts. Every rank has E/N of the experts. Tokens are sent to the ranks of
their experts, and the results are sent back:

    rank 0  a b c d --.              .-- expert 0: a d e g --.              .-- a b c d
                      |- all_to_all -|                       |- all_to_all -|    each times
    rank 1  e f g h --'              '-- expert 1: b c f h --'              '-- e f g h  its weight

The numbers of tokens are known only after the gate has chosen, so counts are sent first. With a capacity C, each expert
accepts C tokens of each rank, and all messages have the same length. Empty places are zeros. Tokens without a place are
dropped: their output is zero, and a residual connection keeps their values:

    C = 3   expert 0: [a d .] of rank 0, [e g .] of rank 1    expert 1: [b c .], [f h .]

Each rank's loss is a mean over its own tokens, and the loss of the whole batch is the mean over ranks. For a parameter
that every rank has, ranks average N gradients. An expert is on one rank, where backward sums the gradients of all N
losses. This sum is divided by N once, and must not be averaged again.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup


class Rows(torch.autograd.Function):
    """Send ``sent[r]`` rows of x to rank r and receive ``received[r]`` rows from it. Backward sends gradients back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.rest = group, received, sent
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        return Rows.apply(gradient, *ctx.rest), None, None, None


def through_experts(rows: Tensor, counts: Tensor, experts: Collection, group: ProcessGroup | None = None) -> Tensor:
    """Send rows (sorted by expert, ``counts[e]`` for expert e) to their experts; return the results in order."""
    dist.all_to_all_single(theirs := torch.empty_like(counts), counts, group=group)
    theirs = theirs.view(-1, len(experts))  # [rank, expert]
    sent, received = counts.view_as(theirs).sum(1).tolist(), theirs.sum(1).tolist()
    arrived = Rows.apply(rows, group, sent, received).split(theirs.flatten().tolist())
    done, here = list(arrived), len(experts)
    # Call each expert once with the rows of all ranks, even if there are none: its parameters then get a gradient.
    for e, expert in enumerate(experts):
        done[e::here] = expert(torch.cat(arrived[e::here])).split(theirs[:, e].tolist())
    return Rows.apply(torch.cat(done), group, received, sent)


class MixtureOfExperts(nn.Module):
    """``moe(x)`` for this rank's tokens (tokens, width). Add ``moe.balance`` of the last tokens to the loss.

    Contract: ``experts`` are this rank's, with the same number on all ranks. All ranks have the same number of tokens,
    because the loss is a mean over ranks. Average all gradients except the experts' over ``group``.
    """

    def __init__(self, width: int, experts: list, group: ProcessGroup | None = None, top: int = 1,
                 capacity: float | None = None):  # fmt: skip
        super().__init__()
        self.group, self.experts, self.top, self.capacity = group, nn.ModuleList(experts), top, capacity
        self.size = dist.get_world_size(group)
        self.count = len(self.experts) * self.size
        self.gate = nn.Linear(width, self.count, bias=False)
        dist.broadcast(self.gate.weight.detach(), group_src=0, group=group)
        for parameter in self.experts.parameters():
            parameter.register_hook(lambda gradient: gradient / self.size)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True) if self.top > 1 else weights
        self.balance = self.balance_of(probabilities, chosen)
        # Sort choices by expert; for each expert, first choices before second choices, each in the order of tokens.
        expert, weight = chosen.T.flatten(), weights.T.flatten()
        order = expert.argsort(stable=True)
        expert, token, weight = expert[order], order % len(x), weight[order]
        counts = expert.bincount(minlength=self.count)
        if self.capacity is None:
            back = through_experts(x[token], counts, self.experts, self.group)
        else:
            places = math.ceil(self.capacity * self.top * len(x) / self.count)
            # A choice's position in its expert's queue; positions beyond the capacity are dropped.
            place = torch.arange(len(expert), device=x.device) - (counts.cumsum(0) - counts)[expert]
            kept = place < places
            token, weight, at = token[kept], weight[kept], (expert * places + place)[kept]
            rows = x.new_zeros(self.count * places, x.shape[1]).index_copy(0, at, x[token])
            back = through_experts(rows, torch.full_like(counts, places), self.experts, self.group)[at]
        return torch.zeros_like(x).index_add(0, token, back * weight[:, None])

    def balance_of(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """Return E * sum over experts of (share of all ranks' choices) * (mean probability); 1 if all shares are equal.

        The share has no gradient. It covers all ranks' choices, so the mean of this over ranks is that of all tokens.
        """
        share = chosen.flatten().bincount(minlength=self.count).to(probabilities.dtype) / chosen.numel()
        dist.all_reduce(share, group=self.group)
        return self.count * (share / self.size * probabilities.mean(0)).sum()


# The full class (layer.py) adds: different numbers of tokens per rank, padding without capacity, shared experts, a loss
# of large logits (z-loss), jitter, copies of experts along a data axis, clipping and checkpoints. Where dtlib is
# installed, checks.py checks the contract above. This file imports only torch.
