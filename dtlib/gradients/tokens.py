"""A mean over all ranks' tokens, of which each rank has some, or some that count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from dtlib.errors import DtlibError
from dtlib.gradients.shard_info import info_of

if TYPE_CHECKING:
    from dtlib.comm import Communicator


divided_by_all_tokens: WeakSet = WeakSet()  # communicators on which the loss of this step is divided so (contract.py)


def mean_over_tokens(losses: torch.Tensor, comm: Communicator, mask: torch.Tensor | None = None) -> torch.Tensor:
    """A loss for this rank whose gradients, averaged over ``comm``, are those of the mean over all ranks' tokens.

    ``losses`` is a number a token, of any shape; ``mask``, of that shape, is False where one does not count. ``comm``
    has all ranks over which gradients are averaged. The sum is divided before the backward pass: a mean of ranks' means
    weights tokens differently where ranks have different numbers of them, and where ranks share sequences no weight
    afterwards helps, as gradients of keys and values carry other ranks' losses.

    The value is ``size`` times this rank's part: its average over ranks is the mean.
    """
    divided_by_all_tokens.add(comm)
    count = torch.tensor([float(losses.numel() if mask is None else mask.sum())], dtype=torch.float64)
    total = float(comm.all_reduce(count))
    kept = losses if mask is None else losses.masked_fill(~mask, 0.0)
    return kept.sum() * (comm.size / max(total, 1.0))


def refuse_weights(parameters: Iterable[torch.Tensor], batch_size: float | None) -> None:
    """Weights after the backward pass are wrong where ranks share sequences; all ranks set ``batch_size``, or none."""
    if batch_size is not None and any(len(info_of(one).sequences) > 1 for one in parameters):
        raise DtlibError(
            f"batch_size is {batch_size}, and ranks share sequences: gradients of keys and values carry other ranks' "
            "losses, and no weight afterwards is right. Leave it out, and take the loss of mean_over_tokens."
        )
