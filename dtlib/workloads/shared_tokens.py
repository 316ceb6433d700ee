"""Sequences for context parallelism: each rank reads some sequences, and then gets some tokens of all sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtlib.errors import DtlibError
from dtlib.parallel.context.attention import Sequence
from dtlib.parallel.context.module import METHODS
from dtlib.parallel.context.order import ORDERS, positions_of

if TYPE_CHECKING:
    from dtlib.comm import Communicator


class Shared:
    """A context axis, whose ranks share each sequence.

    Two ranks with one sequence each, a and b, of four tokens, in zigzag order:

        rank 0   a0 a1 a2 a3   .--  a0 a3, b0 b3
        rank 1   b0 b1 b2 b3   '--  a1 a2, b1 b2

    All ranks have equally many tokens. So the average over ranks of their means is the mean over all tokens.
    """

    def __init__(self, comm: Communicator, order: str = "zigzag", method: str = "ring"):
        if order not in ORDERS or method not in METHODS:
            raise DtlibError(
                f"context_parallel has order {order!r} and method {method!r}: choose an order from "
                f"{', '.join(ORDERS)}, and a method from {', '.join(METHODS)}."
            )
        self.comm, self.order, self.method = comm, order, method

    def check(self, seq: int, heads: int) -> None:
        """Raise an error if the ranks cannot divide sequences of ``seq`` tokens, or, with ulysses, the heads."""
        ranks = self.comm.size
        if seq % (2 * ranks):
            raise DtlibError(
                f"seq is {seq}, but {ranks} context ranks need equal parts: use a multiple of {2 * ranks}."
            )
        if self.method == "ulysses" and heads % ranks:
            raise DtlibError(f"{heads} heads do not divide into {ranks} groups: use method 'ring' of context_parallel.")

    def positions(self, seq: int, rank: int | None = None) -> Tensor:
        """Return the positions of the tokens that ``rank`` (by default this rank) has of each sequence."""
        return positions_of(self.comm.rank if rank is None else rank, self.comm.size, seq, self.order)

    def tokens(self, x: Tensor) -> Tensor:
        """Exchange whole sequences of this rank, (batch, seq), for its tokens of all: (ranks * batch, seq / ranks)."""
        pieces = torch.stack([x[:, self.positions(x.shape[1], rank)] for rank in range(self.comm.size)])
        return self.comm.all_to_all(torch.empty_like(pieces), pieces).flatten(0, 1)

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention over all ranks' tokens; shapes are (batch, heads, tokens of this rank, width)."""
        sequence = Sequence(self.comm, query.shape[-2] * self.comm.size, self.order, True)
        return METHODS[self.method](query, key, value, sequence, None)
