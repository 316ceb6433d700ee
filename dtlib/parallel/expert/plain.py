"""Mixture of experts, to be read from top to bottom: rows there and back, who goes where, experts, and their balance.

A gate sends each token to one or two of E experts, of which every rank has E/N. Tokens travel to the ranks that have
their experts, and what these compute of them travels back:

    rank 0  a b c d --.              .-- expert 0: a d e g --.              .-- a b c d
                      |- all_to_all -|                       |- all_to_all -|    each times
    rank 1  e f g h --'              '-- expert 1: b c f h --'              '-- e f g h  its weight

How many go where is known only when the gate has chosen, and so counts travel first. With a capacity C, each rank has
C places for each expert, and all messages are equally long: empty places are zeros, and tokens without a place are
dropped. Their output is zero, and a residual connection carries them on:

    C = 3   expert 0: [a d .] of rank 0, [e g .] of rank 1    expert 1: [b c .], [f h .]

Each rank's loss is of its own tokens, and an experiment's is the mean of all ranks'. A weight that every rank has gets
the mean of N gradients. An expert is on one rank, and backward sends it gradients of all N losses: they arrive as a sum
already, which is divided by N once, and no rank may average it again.
"""

import math

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup


class Rows(torch.autograd.Function):
    """``sent[r]`` rows of x to rank r, ``received[r]`` rows from it. Backward: their gradients, the same way back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.rest = group, received, sent
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        return Rows.apply(gradient, *ctx.rest), None, None, None


class MixtureOfExperts(nn.Module):
    """``moe(x)`` for this rank's tokens (tokens, width); ``moe.balance``, to be added to the loss, is of the last ones.

    Contract: the same number of experts on all ranks, ``experts`` are this rank's; as many tokens on all ranks, as the
    loss is a mean over ranks. Average the gradients of all parameters but the experts' over ``group``.
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
        # All first choices, then all second ones; in order of experts, and for one expert in order of tokens.
        expert, weight = chosen.T.flatten(), weights.T.flatten()
        order = expert.argsort(stable=True)
        expert, token, weight = expert[order], order % len(x), weight[order]
        counts = expert.bincount(minlength=self.count)
        if self.capacity is None:
            back = self.through_experts(x[token], counts)
        else:
            places = math.ceil(self.capacity * self.top * len(x) / self.count)
            place = torch.arange(len(expert), device=x.device) - (counts.cumsum(0) - counts)[expert]  # in a queue
            kept = place < places
            token, weight, at = token[kept], weight[kept], (expert * places + place)[kept]
            rows = x.new_zeros(self.count * places, x.shape[1]).index_copy(0, at, x[token])
            back = self.through_experts(rows, torch.full_like(counts, places))[at]
        return torch.zeros_like(x).index_add(0, token, back * weight[:, None])

    def through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows in order of experts, ``counts[e]`` of them for expert e: there, through the experts, and back."""
        dist.all_to_all_single(theirs := torch.empty_like(counts), counts, group=self.group)
        theirs = theirs.view(self.size, -1)  # [rank, expert]
        sent, received = counts.view(self.size, -1).sum(1).tolist(), theirs.sum(1).tolist()
        arrived = Rows.apply(rows, self.group, sent, received).split(theirs.flatten().tolist())
        done, here = [None] * len(arrived), len(self.experts)
        for e, expert in enumerate(self.experts):  # its rows of every rank
            done[e::here] = expert(torch.cat(arrived[e::here])).split(theirs[:, e].tolist())
        return Rows.apply(torch.cat(done), self.group, received, sent)

    def balance_of(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """E * sum over experts of (share of all ranks' choices) * (mean probability): 1 where all experts get as much.

        The share has no gradient. It is that of all ranks, and so the mean of this over ranks is that of all tokens.
        """
        share = chosen.flatten().bincount(minlength=self.count).to(probabilities.dtype) / chosen.numel()
        dist.all_reduce(share, group=self.group)
        return self.count * (share / self.size * probabilities.mean(0)).sum()


# The full class (layer.py) adds ranks with different numbers of tokens, padding that takes no places, experts that all
# tokens share, a loss of large logits (z-loss), jitter, copies of experts along a data axis, clipping and checkpoints.
# contract.py refuses what lies outside of the contract above, where dtlib is installed: this file needs torch alone.
