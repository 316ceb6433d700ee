"""The mean loss over the tokens of all ranks, when ranks have different numbers of tokens."""

from weakref import WeakSet

import torch

from dtlib.comm import Communicator

# Communicators whose loss in this step is already divided by the number of all tokens; preconditions.py reads it.
divided_by_all_tokens: WeakSet = WeakSet()


def mean_over_tokens(losses: torch.Tensor, comm: Communicator, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return a loss for this rank; its gradients, averaged over ``comm``, are those of the mean over all tokens.

    Args:
        losses: one number per token, of any shape.
        comm: all ranks over which gradients are averaged.
        mask: bool, of the shape of ``losses``; False for tokens that do not count.

    The result is ``comm.size`` times this rank's part of the mean, so the average over ranks is the mean.

    The loss is divided by the number of all tokens before the backward pass. A mean of the ranks' means would weight
    tokens differently if ranks have different numbers of tokens. If ranks share sequences, weights after the backward
    pass cannot correct this, because gradients of keys and values contain other ranks' losses.
    """
    divided_by_all_tokens.add(comm)
    count = torch.tensor([float(losses.numel() if mask is None else mask.sum())], dtype=torch.float64)
    total = float(comm.all_reduce(count))
    kept = losses if mask is None else losses.masked_fill(~mask, 0.0)
    return kept.sum() * (comm.size / max(total, 1.0))
