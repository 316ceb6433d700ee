"""The other verbs, which move rows: allgather, broadcast, alltoall, reducescatter, and reductions of sparse tensors.

In the backward pass gradients follow Horovod's convention: each rank's loss is a share of the average.
Counterpart: ``horovod.torch.mpi_ops``.
"""

import torch

from dtlib.horovod.basics import Average, Sum, check_op, check_process_set, rank, size
from dtlib.horovod.compression import Compression
from dtlib.horovod.reductions import allreduce
from dtlib.horovod.submission import Handle, checked, differentiable, submit, synchronize, with_rows


def sparse_allreduce_async(tensor, name, op, process_set=None):
    """The sum or average of sparse tensors, by gathering everyone's indices and values."""
    check_op(op, "sparse_allreduce", (Average, Sum))
    own = tensor.detach().coalesce()
    indices = allgather_async(own.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(own.values(), f"{name}.values", process_set)

    def result(outputs):
        indices, values = outputs
        total = torch.sparse_coo_tensor(indices.t(), values / size() if op == Average else values, tensor.shape)
        return total.coalesce()

    return Handle([*indices.operations, *values.operations], result)


def reducescatter_async(tensor, name=None, op=Average, process_set=None, prescale_factor=1.0, postscale_factor=1.0):
    check_process_set(process_set, "reducescatter")
    own = with_rows(tensor, "reducescatter")
    way = {"op": check_op(op, "reducescatter", (Average, Sum))}
    scales = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return submit("reducescatter", name, own, **way, **scales)


def reducescatter(
    tensor, name=None, compression=Compression.none, op=Average, process_set=None, prescale_factor=1.0,
    postscale_factor=1.0,
):  # fmt: skip
    """This rank's rows of the reduction of every rank's ``tensor``: the first dimension is divided by ranks, and a
    remainder goes to the lower ones. Gradients flow through it."""

    def forward(tensor):
        short, ctx = compression.compress(tensor)
        handle = reducescatter_async(short, name, op, process_set, prescale_factor, postscale_factor)
        return compression.decompress(synchronize(handle), ctx)

    def backward(gradient):
        whole = allgather(gradient.contiguous()) * (prescale_factor * postscale_factor)
        return whole / size() if op == Average else whole

    return differentiable(tensor, forward, backward)


def allgather_async(tensor, name=None, process_set=None):
    check_process_set(process_set, "allgather")
    return submit("allgather", name, with_rows(tensor, "allgather"))


def allgather(tensor, name=None, process_set=None):
    """Every rank's ``tensor`` one after the other, on all ranks: first dimensions may differ, the others must agree.
    Gradients flow through it."""
    own = with_rows(tensor, "allgather")

    def backward(gradient):
        rows = allgather(torch.tensor([len(own)])).tolist()
        return allreduce(gradient.contiguous()).split(rows)[rank()]

    return differentiable(tensor, lambda tensor: synchronize(allgather_async(tensor, name, process_set)), backward)


def broadcast_async(tensor, root_rank, name=None, process_set=None):
    own = checked(tensor, "broadcast")
    return _broadcast(own, torch.empty_like(own), root_rank, name, process_set)


def broadcast_async_(tensor, root_rank, name=None, process_set=None):
    own = checked(tensor, "broadcast")
    return _broadcast(own, own, root_rank, name, process_set, lambda outputs: tensor)


def broadcast(tensor, root_rank, name=None, process_set=None):
    """The ``tensor`` of rank ``root_rank``, as a new tensor on all ranks. Gradients flow through it."""

    def backward(gradient):
        average = allreduce(gradient.contiguous())
        return average if rank() == root_rank else torch.zeros_like(average)

    def forward(tensor):
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    return differentiable(tensor, forward, backward)


def broadcast_(tensor, root_rank, name=None, process_set=None):
    """``broadcast`` into its argument."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(tensor, splits=None, name=None, process_set=None):
    check_process_set(process_set, "alltoall")
    own = with_rows(tensor, "alltoall")
    if splits is None:
        if len(own) % size():
            raise ValueError(
                f"alltoall without splits divides the first dimension by {size()} ranks, and it is {len(own)}: pass "
                "splits=, the number of rows for each rank."
            )
        rows = (len(own) // size(),) * size()
        return submit("alltoall", name, own, splits=rows)
    rows = tuple(int(one) for one in splits)
    if len(rows) != size() or min(rows) < 0 or sum(rows) > len(own):
        raise ValueError(
            f"alltoall(splits={list(rows)}): give {size()} numbers of rows, one a rank, of at most {len(own)} together."
        )
    return submit("alltoall", name, own, splits=rows)


def alltoall(tensor, splits=None, name=None, process_set=None):
    """Rows of ``tensor`` for each rank, and theirs for this one: ``splits`` says how many go to each rank.

    Returns the rows received, in rank order; with ``splits`` also how many came from each rank. Gradients flow
    through it.
    """
    received = None

    def forward(tensor):
        nonlocal received
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        return output

    def backward(gradient):
        home, _ = alltoall(gradient.contiguous(), received)
        # Rows that went nowhere have no gradient.
        return torch.cat([home, home.new_zeros(len(tensor) - len(home), *home.shape[1:])])

    output = differentiable(tensor, forward, backward)
    return output if splits is None else (output, received)


def _broadcast(own, output, root_rank, name, process_set, result=None) -> Handle:
    check_process_set(process_set, "broadcast")
    if not 0 <= root_rank < size():
        raise ValueError(f"broadcast(root_rank={root_rank}): the ranks are 0 to {size() - 1}.")
    return submit("broadcast", name, own, output, result, root=int(root_rank))
