"""Averages and sums over ranks: ``allreduce`` in its forms. Counterpart: ``horovod.torch.mpi_ops``.

Every verb has a form that returns a handle at once (``allreduce_async``), and some write into their argument
(``allreduce_``). ``process_set`` may only be the global one.
"""

import torch

from dtlib.comm import types
from dtlib.horovod.basics import check_op, check_process_set, op_or_average
from dtlib.horovod.compression import Compression
from dtlib.horovod.submission import Handle, checked, differentiable, submit, synchronize, unnamed_of


def allreduce_async(
    tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=None
):
    op = op_or_average(op, average)
    return _reduce(tensor, checked(tensor, "allreduce"), None, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=None
):
    op, own = op_or_average(op, average), checked(tensor, "allreduce")
    return _reduce(tensor, own, own, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=None,
):  # fmt: skip
    """The average (or ``op``) of every rank's ``tensor``, as a new tensor; ``prescale_factor`` and
    ``postscale_factor`` multiply before and after. ``average=`` is deprecated. Gradients flow through it."""
    op = op_or_average(op, average)
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "process_set": process_set}

    def forward(tensor, name=name):
        short, ctx = compression.compress(tensor)
        return compression.decompress(synchronize(allreduce_async(short, name=name, op=op, **scales)), ctx)

    return differentiable(tensor, forward, lambda gradient: forward(gradient.contiguous(), None))


def allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=None):
    """``allreduce`` into its argument."""
    op = op_or_average(op, average)
    return synchronize(allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(
    tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=None
):
    op = op_or_average(op, average)
    return _group(allreduce_async, tensors, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=None
):
    op = op_or_average(op, average)
    return _group(allreduce_async_, tensors, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0,
    process_set=None,
):  # fmt: skip
    """``allreduce`` of several tensors; returns a list. No gradients flow through it."""
    op = op_or_average(op, average)
    short, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    outputs = synchronize(
        grouped_allreduce_async(short, None, name, op, prescale_factor, postscale_factor, process_set)
    )
    return [compression.decompress(output, ctx) for output, ctx in zip(outputs, ctxs, strict=True)]


def grouped_allreduce_(
    tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=None
):
    """``grouped_allreduce`` into its arguments."""
    op = op_or_average(op, average)
    return synchronize(
        grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    )


def _reduce(tensor, own, output, name, op, prescale_factor, postscale_factor, process_set) -> Handle:
    check_process_set(process_set, "allreduce")
    op = check_op(op, "allreduce")
    if types.type_name(own) == "bool" and op not in ("min", "max"):
        raise ValueError(f"allreduce({op}) of a bool tensor: use op=hvd.Min or hvd.Max, or convert it with .int().")
    scales = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    result = None if output is None else lambda outputs: tensor
    output = torch.empty_like(own) if output is None else output
    return submit("allreduce", name, own, output, result, op=op, **scales)


def _group(one_by_one, tensors, name, op, *scales_and_process_set) -> Handle:
    tensors = list(tensors)
    if not tensors:
        raise ValueError("grouped_allreduce: pass at least one tensor.")
    name = f"grouped.noname.{next(unnamed_of('grouped'))}" if name is None else name
    handles = [
        one_by_one(tensor, None, f"{name}_{i + 1}of{len(tensors)}", op, *scales_and_process_set)
        for i, tensor in enumerate(tensors)
    ]
    operations = [operation for handle in handles for operation in handle.operations]
    return Handle(operations, lambda outputs: [h.result([o]) for h, o in zip(handles, outputs, strict=True)])
