"""Translate torch's arguments for the communicator: tensors that it can send, and reductions by name."""

import torch
from torch.distributed import ReduceOp

from dtlib.comm import types
from dtlib.errors import CommunicationError

NAMES = (
    (ReduceOp.SUM, "sum"), (ReduceOp.AVG, "mean"), (ReduceOp.MAX, "max"), (ReduceOp.MIN, "min"),
    (ReduceOp.PRODUCT, "prod"), (ReduceOp.PREMUL_SUM, "sum"),
)  # fmt: skip
OF_BOOLEANS = {"sum": "max", "prod": "min"}  # any and all, as in NCCL


def named(op: ReduceOp, tensor: torch.Tensor) -> str:
    """Return the communicator's name of a reduction. (``op`` supports ``==`` but has no hash.)"""
    name = next((name for known, name in NAMES if op == known), None)
    if name is None:
        raise CommunicationError("The backend dtlib has the reductions SUM, AVG, MAX, MIN and PRODUCT: use one.")
    if tensor.is_complex() and name not in ("sum", "mean"):
        raise CommunicationError(f"{op} of complex numbers differs from {op} of their parts: reduce with SUM or AVG.")
    return OF_BOOLEANS.get(name, name) if tensor.dtype is torch.bool else name


def factor(op: ReduceOp) -> float | torch.Tensor | None:
    """Return the factor by which every rank multiplies before it adds, or None."""
    return None if op == ReduceOp.SUM or op != ReduceOp.PREMUL_SUM else op.factor


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor for a reduction: detached from the graph, and complex numbers as pairs of real ones."""
    tensor = tensor.detach()
    if tensor.is_conj():
        raise CommunicationError("A conjugate view shares the memory of another tensor: pass tensor.resolve_conj().")
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor for an operation without arithmetic: one-byte dtypes that the communicator lacks become bytes."""
    tensor = dense(tensor)
    known = types.dtype_name(tensor.dtype) in types.ALLOWED or tensor.element_size() > 1
    return tensor if known else tensor.view(torch.uint8)
