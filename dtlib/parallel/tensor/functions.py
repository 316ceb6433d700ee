"""Send activations between ranks, with gradients: two pairs of functions, each the reverse of the other.

                        forward                                 backward
    copy_to_ranks       x  ->  x on every rank                  all_reduce       Megatron-LM's f
    reduce_from_ranks   all_reduce                              dy  ->  dy       Megatron-LM's g

    scatter_to_ranks    [x0 x1 x2]  ->  rank r keeps xr         all_gather
    gather_from_ranks   all_gather                              [d0 d1 d2]  ->  rank r keeps dr

With sequence parallelism (Megatron-LM's term), ranks also have slices of the tokens between the sharded blocks. There,
each token needs all its features, but no other tokens (layer norm, dropout, the residual). f and g become

    gather_tokens       all_gather                              reduce_scatter
    scatter_tokens      reduce_scatter                          all_gather

A ring all_reduce consists of these two, so the same number of bytes is sent, and each rank keeps only 1/N of the
activations between the blocks. V. Korthikanti et al., "Reducing activation recomputation in large transformer models",
arXiv:2205.05198, section 4.2.

``comm`` is a dtlib communicator here; ``dtlib.comm.as_communicator`` converts other kinds. Slices are along the last
dimension, in rank order, and their lengths differ by at most one.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.backward import with_gradient


def copy_to_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return ``x``, which is equal on all ranks; its gradient is the sum of all ranks' gradients. Megatron-LM's f.

    Use it where computations start to differ between ranks.
    """
    return _one_of_a_pair(x, comm, lambda x, comm: x, reduce_from_ranks)


def reduce_from_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return the sum of all ranks' ``x`` on every rank; each ``x`` has the gradient of the sum. Megatron-LM's g."""
    return _one_of_a_pair(x, comm, _sum, copy_to_ranks)


def scatter_to_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return this rank's slice of ``x``, which is equal on all ranks: ``(..., n)`` to about ``(..., n / size)``."""
    back = partial(gather_from_ranks, count=x.shape[-1])
    return _one_of_a_pair(x, comm, _slice_of_this_rank, back)


def gather_from_ranks(x: torch.Tensor, comm: Communicator, count: int | None = None) -> torch.Tensor:
    """Return all ranks' slices ``x`` as one tensor on every rank: the reverse of ``scatter_to_ranks``.

    ``count`` is the length of the whole last dimension. Pass it if slices differ in length.

    Raises:
        DtlibError: if the slice does not have the length that ``scatter_to_ranks`` gives for ``count``.
    """
    if count is not None:
        slice_ = slice_of(count, comm.rank, comm.size)
        if x.shape[-1] != slice_.stop - slice_.start:
            raise DtlibError(
                f"gather_from_ranks(count={count}): rank {comm.rank} of {comm.size} has {x.shape[-1]} elements in the "
                f"last dimension, but needs {slice_.stop - slice_.start}."
            )
    there = partial(whole_of, count=x.shape[-1] * comm.size if count is None else count)
    return _one_of_a_pair(x, comm, there, scatter_to_ranks)


def gather_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return all ranks' tokens, from this rank's ``x`` of shape (..., local tokens, width).

    The gradients of all ranks are summed, and each rank receives those of its tokens. All ranks have the same number of
    tokens.
    """
    return _one_of_a_pair(x, comm, _tokens_of_all, scatter_tokens)


def scatter_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return this rank's tokens of the sum of all ranks' ``x``, (..., tokens, width): the reverse of ``gather_tokens``.

    Raises:
        DtlibError: if the number of tokens is not divisible by the ranks.
    """
    if x.dim() < 2 or x.shape[-2] % comm.size:
        raise DtlibError(
            f"Sequence parallelism cuts (..., tokens, width) into {comm.size} equal slices of tokens, but this is "
            f"{tuple(x.shape)}: pad the tokens."
        )
    return _one_of_a_pair(x, comm, _tokens_of_the_sum, gather_tokens)


def sum_over_ranks(module: nn.Module, comm: Communicator) -> nn.Module:
    """Sum the gradients of this module's parameters over ``comm`` in each backward pass, and return the module.

    Use it for parameters that every rank has but applies only to its own tokens, such as a layer norm's.
    """
    _add_up(module, comm)
    # The forward hook is for copies of the module, whose parameters have no gradient hooks yet.
    module.register_forward_pre_hook(lambda module, _: _add_up(module, comm))
    return module


_added_up = WeakTensorKeyDictionary()


def _add_up(module, comm) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and parameter not in _added_up:
            _added_up[parameter] = True
            parameter.register_hook(lambda gradient: with_operations(comm).all_reduce(gradient.clone()))


def _one_of_a_pair(x, comm, there, back):
    """Return ``there(x, comm)``, with ``back(gradient, comm)`` as its gradient."""
    comm = with_operations(comm)
    return with_gradient(x, lambda x: there(x, comm), lambda gradient: back(gradient, comm))


def _sum(x, comm):
    # Copy first: all_reduce works in place, and the caller or autograd may still need x.
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _slice_of_this_rank(x, comm):
    # Copy, even if the slice is all of x: the next operation may work in place.
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
    """Return this rank's slice of ``count`` elements; lengths differ by at most one."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def whole_of(slice_: torch.Tensor, comm: Communicator, count: int, dim: int = -1) -> torch.Tensor:
    """Concatenate all ranks' slices of ``count`` elements along ``dim``; without gradients."""
    last = slice_.movedim(dim, -1)
    # all_gather needs chunks of equal length, so pad the shorter slices and trim them afterwards.
    padded = nn.functional.pad(last, (0, -(-count // comm.size) - last.shape[-1])).contiguous()
    everyones = comm.all_gather(padded.new_empty(comm.size, *padded.shape), padded)
    slices = [slice_of(count, rank, comm.size) for rank in range(comm.size)]
    trimmed = [other[..., : piece.stop - piece.start] for other, piece in zip(everyones, slices, strict=True)]
    return torch.cat([slice_.movedim(-1, dim) for slice_ in trimmed], dim)


def with_operations(comm: Communicator) -> Communicator:
    """Return ``comm``, or raise an error that says how to convert it."""
    if not hasattr(comm, "all_reduce"):
        raise DtlibError(
            f"comm={comm!r:.60} lacks dtlib's operations: create a communicator from it once, with "
            "dtlib.comm.as_communicator(comm), and pass this."
        )
    return comm
