"""Ulysses, to be read from top to bottom: an exchange, its reverse, and attention in between.

Every rank has a contiguous slice of each sequence. Heads are independent, so ranks exchange some tokens of all heads
for all tokens of some heads, compute ordinary attention, and exchange back. Two ranks, four heads a b c d:

              heads a b c d                    attention of             heads a b c d
    rank 0  tokens 0 1 --.                .-- a b: 0 1 2 3 --.                .-- 0 1
                         |-- all_to_all --|                  |-- all_to_all --|
    rank 1  tokens 2 3 --'                '-- c d: 0 1 2 3 --'                '-- 2 3

Q, K and V are sent as one tensor of 3n bytes, and the output has n bytes. Each rank sends 4n (N-1)/N bytes in 2 (N-1)
messages forward, and the same backward, because the reverse of an exchange is an exchange.
"""

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention


class Exchange(torch.autograd.Function):
    """Divide ``x`` along ``cut``, a piece per rank, and join the received pieces along ``join``. Backward: reverse."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.rest = group, join, cut
        pieces = torch.stack(x.chunk(group.size(), cut))
        dist.all_to_all_single(arrived := torch.empty_like(pieces), pieces, group=group)
        return torch.cat(arrived.unbind(), join)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple:
        return Exchange.apply(gradient, *ctx.rest), None, None, None


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None,
                      causal: bool = True) -> Tensor:  # fmt: skip
    """Compute softmax(Q K^T / sqrt(width)) V over all ranks' tokens, for this rank's queries.

    Contract: q, k, v of (batch, heads, tokens, width), with equal shapes and dtypes on all ranks; contiguous slices;
    the number of heads is a multiple of the ranks.
    """
    group = group or dist.group.WORLD
    q, k, v = Exchange.apply(torch.stack([q, k, v]), group, 2, 3)  # heads cut, tokens joined
    out = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return Exchange.apply(out, group, 2, 1)  # tokens cut, heads joined


# The full class (module.py) adds the same as for ring attention, except orders: the exchange makes sequences whole.
# Where dtlib is installed, checks.py checks the contract above. This file imports only torch.
