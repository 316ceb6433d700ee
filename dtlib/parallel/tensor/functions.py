"""How activations come to ranks and back, and what becomes of their gradients: two pairs, each the other's reverse.

                        forward                                 backward
    copy_to_ranks       x  ->  x on every rank                  all_reduce       Megatron-LM's f
    reduce_from_ranks   all_reduce                              dy  ->  dy       Megatron-LM's g

    scatter_to_ranks    [x0 x1 x2]  ->  rank r keeps xr         all_gather
    gather_from_ranks   all_gather                              [d0 d1 d2]  ->  rank r keeps dr

Sequence parallelism is Megatron-LM's word for ranks that have slices of the tokens, too, between the cut blocks, where
all features of a token are needed and other tokens are not (layer norm, dropout, the residual). f and g become

    gather_tokens       all_gather                              reduce_scatter
    scatter_tokens      reduce_scatter                          all_gather

and an all_reduce by ring is these two: as many bytes travel, and each rank keeps 1/N of what lies between the blocks.
V. Korthikanti et al., "Reducing activation recomputation in large transformer models", arXiv:2205.05198, section 4.2.

``comm`` is a dtlib communicator here: ``dtlib.comm.as_communicator`` makes one, once, of what a program has. Slices are
of the last dimension, in rank order, and differ by one element at most.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.backward import with_gradient


def copy_to_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Megatron-LM's f: ``x``, equal on all ranks, goes into computations that differ between ranks; the gradients of
    all of them are added up."""
    return _one_of_a_pair(x, comm, lambda x, comm: x, reduce_from_ranks)


def reduce_from_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Megatron-LM's g: the sum of all ranks' ``x``, on every rank; each ``x`` has the gradient of the sum."""
    return _one_of_a_pair(x, comm, _sum, copy_to_ranks)


def scatter_to_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's slice of ``x``, which is equal on all ranks: shape ``(..., n)`` to about ``(..., n / size)``."""
    back = partial(gather_from_ranks, count=x.shape[-1])
    return _one_of_a_pair(x, comm, _slice_of_this_rank, back)


def gather_from_ranks(x: torch.Tensor, comm: Communicator, count: int | None = None) -> torch.Tensor:
    """All ranks' slices ``x`` as one tensor on every rank: the reverse of ``scatter_to_ranks``.

    ``count`` is the length of the whole last dimension, to be given where slices differ in length.

    Raises:
        DtlibError: for a slice that is not as long as ``scatter_to_ranks`` makes it of so many.
    """
    if count is not None:
        slice_ = slice_of(count, comm.rank, comm.size)
        if x.shape[-1] != slice_.stop - slice_.start:
            raise DtlibError(
                f"gather_from_ranks(count={count}): rank {comm.rank} of {comm.size} has {x.shape[-1]} elements of the "
                f"last dimension, and {slice_.stop - slice_.start} is its slice."
            )
    there = partial(whole_of, count=x.shape[-1] * comm.size if count is None else count)
    return _one_of_a_pair(x, comm, there, scatter_to_ranks)


def gather_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """All ranks' tokens of ``x``, (..., tokens of this rank, width), for computations that differ between ranks: their
    gradients are added up, and each rank gets those of its tokens. All ranks have as many."""
    return _one_of_a_pair(x, comm, _tokens_of_all, scatter_tokens)


def scatter_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of the sum of all ranks' ``x``, (..., tokens, width): the reverse of ``gather_tokens``.

    Raises:
        DtlibError: where tokens do not divide by the ranks.
    """
    if x.dim() < 2 or x.shape[-2] % comm.size:
        raise DtlibError(
            f"Sequence parallelism cuts (..., tokens, width) into {comm.size} equal slices of tokens, but this is "
            f"{tuple(x.shape)}: pad the tokens."
        )
    return _one_of_a_pair(x, comm, _tokens_of_the_sum, gather_tokens)


def sum_over_ranks(module: nn.Module, comm: Communicator) -> nn.Module:
    """Parameters that every rank has, and uses for its tokens alone (a layer norm's): their gradients are added up over
    ``comm`` in each backward pass. Returns the module."""
    _add_up(module, comm)
    module.register_forward_pre_hook(lambda module, _: _add_up(module, comm))  # a copy of the module has it, too
    return module


_added_up = WeakTensorKeyDictionary()


def _add_up(module, comm) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and parameter not in _added_up:
            _added_up[parameter] = True
            parameter.register_hook(lambda gradient: with_operations(comm).all_reduce(gradient.clone()))


def _one_of_a_pair(x, comm, there, back):
    """``there(x, comm)``; the gradient goes ``back``, by the other one of the pair."""
    comm = with_operations(comm)
    return with_gradient(x, lambda x: there(x, comm), lambda gradient: back(gradient, comm))


def _sum(x, comm):
    # In memory of its own: the caller, or autograd, may need x as it is.
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _slice_of_this_rank(x, comm):
    # In memory of its own, also where the slice is all of x: what comes next may work in place.
    return x[..., slice_of(x.shape[-1], comm.rank, comm.size)].clone(memory_format=torch.contiguous_format)


def _tokens_of_all(x, comm):
    first = x.movedim(-2, 0).contiguous()
    whole = first.new_empty(comm.size * len(first), *first.shape[1:])
    return comm.all_gather(whole, first).movedim(0, -2)


def _tokens_of_the_sum(x, comm):
    first = x.movedim(-2, 0).contiguous()
    mine = first.new_empty(len(first) // comm.size, *first.shape[1:])
    return comm.reduce_scatter(mine, first).movedim(0, -2)


def slice_of(count: int, rank: int, ranks: int) -> slice:
    """Which of ``count`` elements a rank has; slices differ by one at most."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def whole_of(slice_: torch.Tensor, comm: Communicator, count: int, dim: int = -1) -> torch.Tensor:
    """All ranks' slices of ``count`` elements along ``dim``, one after the other; without gradients."""
    last = slice_.movedim(dim, -1)
    # all_gather carries equal chunks: the shorter ones are padded, and cut again.
    padded = nn.functional.pad(last, (0, -(-count // comm.size) - last.shape[-1])).contiguous()
    everyones = comm.all_gather(padded.new_empty(comm.size, *padded.shape), padded)
    slices = [slice_of(count, rank, comm.size) for rank in range(comm.size)]
    trimmed = [other[..., : piece.stop - piece.start] for other, piece in zip(everyones, slices, strict=True)]
    return torch.cat([slice_.movedim(-1, dim) for slice_ in trimmed], dim)


def with_operations(comm: Communicator) -> Communicator:
    if not hasattr(comm, "all_reduce"):
        raise DtlibError(
            f"comm={comm!r:.60} lacks dtlib's operations: create a communicator from it once, with "
            "dtlib.comm.as_communicator(comm), and pass this."
        )
    return comm
