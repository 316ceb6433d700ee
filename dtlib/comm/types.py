"""Which values travel, and how they are combined: one table.

| type | moved | sum, prod | mean | max, min |
|---|---|---|---|---|
| float64, float32 | yes | yes | yes | yes |
| float16, bfloat16 | as 16 bits | in float32 at each hop, then rounded | likewise | yes |
| integers of 8 to 64 bits | yes | yes; wraps around, as torch does | refused: it would round | yes |
| bool | as bytes | refused | refused | any, all |
"""

from functools import cache

import numpy as np

from dtlib.comm.watch.call import type_name
from dtlib.errors import CommunicationError


def maximum(a, b, out):
    np.maximum(a, b, out=out)  # numpy wants out named here


def minimum(a, b, out):
    np.minimum(a, b, out=out)


REDUCTIONS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": maximum, "min": minimum}
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
ALLOWED = {
    **dict.fromkeys(FLOATS, ("sum", "mean", "prod", "max", "min")),
    **dict.fromkeys(INTEGERS, ("sum", "prod", "max", "min")),
    "bool": ("max", "min"),
}

# How numpy reads them: what it or MPI lacks travels as integers of its size.
CODES = {name: np.dtype({"float16": "i2", "bfloat16": "i2", "bool": "u1"}.get(name, name)).str for name in ALLOWED}


class Payload:
    """A tensor as MPI sees it: ``flat`` is one contiguous array. ``store()`` brings it back where it is a copy."""

    __slots__ = ("flat", "memory", "tensor")

    def __init__(self, tensor, memory: np.ndarray):
        self.tensor = tensor
        self.memory = memory  # the tensor's own memory, in its own shape; None where ``flat`` is it
        if memory.flags.c_contiguous:
            self.flat, self.memory = memory.reshape(-1), None
        else:
            self.flat = np.ascontiguousarray(memory).reshape(-1)

    def store(self):
        if self.memory is not None:
            self.memory[...] = self.flat.reshape(self.memory.shape)
        if not isinstance(self.tensor, np.ndarray):
            _tell_autograd(self.tensor)
        return self.tensor


def _tell_autograd(tensor) -> None:
    """It was written to behind torch's back: a backward pass that needs what was there must fail, not go wrong."""
    if not tensor.is_inference():
        _increment_version()(tensor)


@cache
def _increment_version():
    from torch.autograd.graph import increment_version

    return increment_version


def check_name(name: str, operation: str) -> None:
    """Refuse a type that is not in the table."""
    if name not in ALLOWED:
        raise CommunicationError(f"{operation} does not carry {name}: it carries {', '.join(ALLOWED)}.")


def host_memory(tensor, name: str, operation: str) -> np.ndarray:
    """The memory of a CPU tensor as numpy knows it."""
    try:
        pointer = None if tensor.is_neg() else tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        pointer = None
    if pointer is None or (not pointer and tensor.numel()):
        raise CommunicationError(f"{operation} needs a plain dense tensor, and {_what_it_is(tensor)}.")
    size = tensor.element_size()
    strides = None if tensor.is_contiguous() else tuple(size * step for step in tensor.stride())
    return np.asarray(_Memory(tensor, pointer, CODES[name], strides))


class _Memory:
    """A tensor's memory. ``tensor.numpy()`` would do, but leaves a storage that nobody can resize any more."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor, pointer: int, code: str, strides):
        self._tensor = tensor  # held while an array is in use
        self.__array_interface__ = {
            "data": (pointer, False), "typestr": code, "shape": tuple(tensor.shape), "strides": strides, "version": 3,
        }  # fmt: skip


def _what_it_is(tensor) -> str:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"this is a wrapper, {type(tensor).__name__}: pass the one inside, as to_local() gives it of a DTensor"
    if tensor.layout != torch.strided:
        return f"this one is {str(tensor.layout)[6:]}: pass tensor.to_dense()"
    return "this one is negated or conjugated when it is read: pass tensor.resolve_neg().resolve_conj()"


def combiner(tensor, op: str, operation: str):
    """The function ``combine(a, b, out)`` that adds (or ...) two arrays of this tensor's payload.

    Raises:
        CommunicationError: for an operation that the table refuses for this type.
    """
    return _combiner(type_name(tensor), op, operation)


@cache
def _combiner(name: str, op: str, operation: str):
    if op not in REDUCTIONS:
        raise CommunicationError(f"{operation} has no op {op!r}: choose one of {', '.join(REDUCTIONS)}.")
    if op not in ALLOWED.get(name, ()):
        if op == "mean" and name in INTEGERS:
            cure = "it would round: use op='sum' and divide, or convert with tensor.float()"
        else:
            cure = f"types that it takes are {', '.join(known for known in ALLOWED if op in ALLOWED[known])}"
        raise CommunicationError(f"{operation}(op={op!r}) does not take {name}; {cure}.")
    if name in ("float16", "bfloat16"):
        return _half_combiner(name, op)
    return REDUCTIONS[op]


def _half_combiner(name: str, op: str):
    import torch

    dtype = getattr(torch, name)
    operate = {"sum": torch.add, "mean": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}[op]

    def combine(a, b, out):
        # torch adds 16-bit floats in float32 and rounds once.
        a, b, out = (torch.from_numpy(array.view(np.int16)).view(dtype) for array in (a, b, out))
        operate(a, b, out=out)

    return combine


def divide(tensor, flat: np.ndarray, by: int) -> None:
    """Divide a payload of floats in place."""
    if type_name(tensor) in ("float16", "bfloat16"):
        import torch

        torch.from_numpy(flat.view(np.int16)).view(tensor.dtype).div_(by)
    else:
        np.divide(flat, by, out=flat)
