"""The two blocks of a transformer, sharded by columns and then by rows, so that each block needs f and g once.

M. Shoeybi et al., arXiv:1909.08053, section 3 and figure 3.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.same_model import check_same_arguments
from dtlib.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nn.Module):
    """Two linear layers around an activation, sharded along the hidden features.

    Args:
        width, hidden: features of input and output, and of the hidden layer; ``hidden`` need not be divisible by the
            ranks.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        activation: an element-wise function.
        sequence_parallel: input and output are only this rank's tokens, an equal slice of dimension -2.

    Cost for an input of B bytes on N ranks: one all_reduce of B forward and one backward. With a ring, each sends 2 B
    (N-1) / N per rank. With ``sequence_parallel``, an all_gather and a reduce_scatter in each direction send the same
    number of bytes. Without tensor parallelism, nothing is sent, but every rank has all weights.
    """

    def __init__(self, width: int, hidden: int, comm: AnyCommunicator, activation: Callable = functional.gelu,
                 sequence_parallel: bool = False):  # fmt: skip
        super().__init__()
        comm = as_communicator(comm)
        self.activation = activation
        self.linear1 = ColumnParallelLinear(width, hidden, comm, gather_output=False)
        self.linear2 = RowParallelLinear(hidden, width, comm, input_is_parallel=True)
        self.linear1.sequence_parallel = self.linear2.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.activation(self.linear1(x)))


class ParallelAttention(nn.Module):
    """Multi-head self-attention, sharded by heads: each rank computes ``heads / size`` heads without communication.

    Args:
        width: features of input and output, a multiple of ``heads``.
        heads: a multiple of the number of ranks.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``.
        causal: a token attends only to itself and earlier tokens.
        sequence_parallel: input and output are only this rank's tokens, an equal slice of dimension -2.

    Input and output have shape ``(..., tokens, width)`` and are equal on all ranks. Rows of ``in_proj`` are ordered by
    head, each with query, key and value, so that equal shards contain whole heads. There is no dropout.

    Cost for an input of B bytes on N ranks: one all_reduce of B forward and one backward, as for ``ParallelMLP``.
    Counterpart: ``torch.nn.MultiheadAttention``, which stores all queries first, then keys, then values.

    Raises:
        DtlibError: on every rank, if heads are not divisible by ranks, or the width by heads.
    """

    recompute = False  # True to recompute the core of attention in the backward pass

    def __init__(self, width: int, heads: int, comm: AnyCommunicator, causal: bool = False,
                 sequence_parallel: bool = False):  # fmt: skip
        self._build(lambda: (nn.Linear(width, 3 * width), nn.Linear(width, width)), width, heads, comm, causal)
        self.in_proj.sequence_parallel = self.out_proj.sequence_parallel = sequence_parallel

    @classmethod
    def from_attention(cls, attention: nn.MultiheadAttention, comm: AnyCommunicator,
                       causal: bool = False) -> "ParallelAttention":  # fmt: skip
        """Shard an existing self-attention; rank 0's values are used."""
        only_self = attention.in_proj_weight is not None and attention.bias_k is None and not attention.add_zero_attn
        if not only_self or not attention.batch_first or attention.dropout:
            raise DtlibError(
                "ParallelAttention is self-attention of (batch, tokens, width) without dropout: build the "
                "nn.MultiheadAttention with batch_first=True and dropout=0, and without kdim, vdim, add_bias_kv and "
                "add_zero_attn."
            )
        width, heads = attention.embed_dim, attention.num_heads
        in_proj = nn.Linear(width, 3 * width, bias=attention.in_proj_bias is not None, device="meta")
        for name, rows in (("weight", attention.in_proj_weight), ("bias", attention.in_proj_bias)):
            if rows is not None:
                setattr(in_proj, name, nn.Parameter(_by_heads(rows.detach(), heads), rows.requires_grad))
        made = cls.__new__(cls)
        made._build(lambda: (in_proj, attention.out_proj), width, heads, comm, causal)
        return made

    def _build(self, whole, width, heads, comm, causal) -> None:
        super().__init__()
        comm = as_communicator(comm)
        check_same_arguments(comm, "ParallelAttention", width=width, heads=heads, causal=causal)
        if heads < 1 or heads % comm.size:
            raise DtlibError(
                f"ParallelAttention: {heads} heads cannot be divided equally among {comm.size} ranks: choose a "
                f"multiple of {comm.size}."
            )
        if width % heads:
            raise DtlibError(f"ParallelAttention: width={width} is not a multiple of {heads} heads.")
        in_proj, out_proj = whole()
        self.heads_here, self.head_width, self.causal = heads // comm.size, width // heads, causal
        self.in_proj = ColumnParallelLinear.from_linear(in_proj, comm, gather_output=False)
        self.out_proj = RowParallelLinear.from_linear(out_proj, comm, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        of_heads = self.in_proj(x)
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(self.mixed, of_heads, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self.mixed(of_heads)
        return self.out_proj(mixed)

    def mixed(self, of_heads: Tensor) -> Tensor:
        """Compute the core of attention: (..., tokens, 3 x features of the local heads) to (..., tokens, features)."""
        by_heads = of_heads.unflatten(-1, (self.heads_here, 3, self.head_width))
        query, key, value = (each.transpose(-3, -2) for each in by_heads.unbind(-2))  # (..., heads, tokens, head_width)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return mixed.transpose(-3, -2).flatten(-2)


def _by_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows from all queries, all keys, all values to the order of ``in_proj``: head by head."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
