"""Ulysses, to be read from top to bottom: an exchange, its reverse, and attention between the two.

Every rank has a contiguous slice of each sequence. Heads know nothing of each other: so ranks exchange some tokens of
all heads for all tokens of some heads, compute ordinary attention, and exchange back. Two ranks, four heads a b c d:

              heads a b c d                    attention of             heads a b c d
    rank 0  tokens 0 1 --.                .-- a b: 0 1 2 3 --.                .-- 0 1
                         |-- all_to_all --|                  |-- all_to_all --|
    rank 1  tokens 2 3 --'                '-- c d: 0 1 2 3 --'                '-- 2 3

Q, K and V travel as one tensor of 3n bytes, the output has n: each rank sends 4n (N-1)/N bytes in 2 (N-1) messages
forward, and as many backward, as the reverse of an exchange is an exchange.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.backward import with_gradient


def exchange(x: Tensor, comm: Communicator, cut: int, join: int) -> Tensor:
    """Cut along dimension ``cut``, a piece for each rank; join what arrives along ``join``. Backward: the reverse."""

    def there(x):
        pieces = torch.stack(x.chunk(comm.size, cut))
        return torch.cat(comm.all_to_all(torch.empty_like(pieces), pieces).unbind(), join)

    return with_gradient(x, there, lambda gradient: exchange(gradient, comm, join, cut))


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, comm: Communicator, causal: bool = True) -> Tensor:
    """softmax(Q K^T / sqrt(width)) V over all ranks' tokens, for this rank's queries.

    Contract: q, k, v of (batch, heads, tokens, width), of the same shape and dtype on all ranks; contiguous slices; as
    many heads as ranks, or a multiple.
    """
    asked = set(comm.all_gather_object((*((tuple(x.shape), x.dtype) for x in (q, k, v)), causal)))
    if len(asked) > 1 or len({*next(iter(asked))[:3]}) > 1 or q.dim() != 4:
        raise DtlibError(f"Ranks give q, k, v, causal {asked}: give all the same, of four dimensions.")
    if q.shape[1] % comm.size:
        raise DtlibError(f"{q.shape[1]} heads make no {comm.size} equal groups: take ring_attention.")
    q, k, v = exchange(torch.stack([q, k, v]), comm, 2, 3)  # heads cut, tokens joined
    out = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return exchange(out, comm, 2, 1)  # tokens cut, heads joined


# The full class (module.py) adds what ring attention's adds, but for orders: the exchange makes sequences whole.
