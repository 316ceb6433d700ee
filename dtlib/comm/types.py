"""Which values travel, and how they are combined: one table.

| type | moved | sum, prod | mean | max, min |
|---|---|---|---|---|
| float64, float32 | yes | yes | yes | yes |
| float16, bfloat16 | as 16 bits | in float32 at each hop, then rounded | likewise | yes |
| integers of 8 to 64 bits | yes | yes; wraps around, as torch does | refused: it would round | yes |
| bool | as bytes | refused | refused | any, all |

Where a tensor lives decides how it travels: from its own memory on the CPU; from a GPU by a copy in host memory,
GPU -> pinned host memory -> MPI -> pinned host memory -> GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from dtlib.comm.call import AnyTensor, dtype_name
from dtlib.errors import CommunicationError

if TYPE_CHECKING:
    import torch


# An operation returns what it was given.
T = TypeVar("T", bound=AnyTensor)
No = Literal[False]  # to async_op: it returns the tensor, and else a handle
Yes = Literal[True]
Name = str | None  # of an algorithm
Sizes = Sequence[int] | None


def maximum(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    np.maximum(a, b, out=out)  # numpy wants out named here


def minimum(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
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

STAGED = ("cuda",)  # kinds of devices whose tensors go through host memory


class Payload:
    """A tensor as MPI sees it: ``flat`` is one contiguous array. ``store()`` brings it back where it is a copy."""

    __slots__ = ("flat", "memory", "tensor")

    def __init__(self, tensor: AnyTensor, memory: np.ndarray):
        self.tensor = tensor
        self.memory: np.ndarray | None = memory  # the tensor's own memory, in its own shape; None where ``flat`` is it
        if memory.flags.c_contiguous:
            self.flat, self.memory = memory.reshape(-1), None
        else:
            self.flat = np.ascontiguousarray(memory).reshape(-1)

    def store(self) -> AnyTensor:
        if self.memory is not None:
            self.memory[...] = self.flat.reshape(self.memory.shape)
        if not isinstance(self.tensor, np.ndarray):
            _tell_autograd(self.tensor)
        return self.tensor

    def finisher(self, op: str, size: int) -> Callable[[], AnyTensor]:
        """What brings home the values of ``size`` ranks combined with ``op``."""
        return partial(self._store_mean, size) if op == "mean" else self.store

    def _store_mean(self, size):
        if self.flat.dtype.kind == "f":
            np.divide(self.flat, size, out=self.flat)
        else:  # 16 bits
            import torch

            dtype: Any = self.tensor.dtype
            torch.from_numpy(self.flat).view(dtype).div_(size)
        return self.store()


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


def host_memory(tensor: torch.Tensor, name: str, operation: str) -> np.ndarray:
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


def payload(tensor: AnyTensor, operation: str, writes: bool) -> Payload:
    """The memory of a CPU tensor or numpy array, without a copy where it is contiguous; a copy of a CUDA tensor's.

    Raises:
        CommunicationError: for anything else, for types that are not in the table, and for read-only memory where
            the operation writes.
    """
    it: Any = tensor
    is_array = isinstance(tensor, np.ndarray)
    if not is_array and not hasattr(tensor, "detach"):
        cure = f", or use {operation}_object" if operation in ("broadcast", "all_gather") else ""
        raise CommunicationError(
            f"{operation} carries a torch tensor or a numpy array and got {type(tensor).__name__} {tensor!r:.40}: "
            f"wrap it with torch.tensor(...){cure}."
        )
    name = dtype_name(tensor.dtype)
    if name not in ALLOWED:
        check_name(name, operation)
    if not is_array and not it.is_cpu:
        return staged(it, name, operation)
    if is_array and isinstance(tensor, np.ma.MaskedArray):
        raise CommunicationError(f"{operation} does not know of masks: pass array.filled(...).")
    memory = it.view(np.ndarray) if is_array else host_memory(it, name, operation)
    if not writes or memory.flags.carray:  # contiguous, and to be written to
        return Payload(tensor, memory)
    if not memory.flags.writeable:
        raise CommunicationError(f"{operation} writes into its argument, but this array is read-only: pass a copy.")
    if _overlaps_itself(memory):
        raise CommunicationError(
            f"{operation} writes into its argument, and elements of this one share memory, as expand() makes them: "
            "pass tensor.clone()."
        )
    return Payload(tensor, memory)


def _overlaps_itself(memory: np.ndarray) -> bool:
    """True where two elements may lie in the same place: a step in one dimension is less than the others' extent."""
    if memory.flags.forc or not memory.size:
        return False
    extent = memory.itemsize
    for step, length in sorted((abs(step), length) for step, length in zip(memory.strides, memory.shape, strict=True)):
        if length > 1 and step < extent:
            return True
        extent += step * (length - 1)
    return False


def staged(tensor: torch.Tensor, name: str, operation: str) -> StagedPayload:
    """A tensor that is not on the CPU as MPI sees it: a copy in host memory.

    Raises:
        CommunicationError: for tensors on anything but a CUDA device.
    """
    if tensor.device.type not in STAGED:
        raise CommunicationError(
            f"{operation} carries tensors on the CPU or a CUDA device and this one is on {tensor.device}: pass "
            "tensor.cpu()."
        )
    return StagedPayload(tensor, name, operation)


class StagedPayload(Payload):
    """A copy of a tensor in pinned host memory, from which a GPU copies fastest; ``store()`` brings it back."""

    __slots__ = ("_host",)
    tensor: torch.Tensor

    def __init__(self, tensor: torch.Tensor, name: str, operation: str):
        import torch

        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with _transfers(tensor):
            self._host.copy_(tensor.detach(), non_blocking=True)
        super().__init__(tensor, host_memory(self._host, name, operation))

    def store(self) -> torch.Tensor:
        with _transfers(self.tensor, after_others=False):
            self.tensor.detach().copy_(self._host, non_blocking=True)
        return self.tensor


_streams: dict = {}  # of torch, by device


@contextmanager
def _transfers(tensor, after_others: bool = True):
    """Copies between host and device, done when the block is left.

    They run on a stream of their own, so that the host does not wait for what the program queues meanwhile. On the
    way out of the device they come after what is queued already, which may still be computing the tensor. On the
    way back nothing that is queued may use it: the operation is not over.
    """
    if not tensor.is_cuda:
        yield
        return
    import torch

    stream = _streams.get(tensor.device)
    if stream is None:
        stream = _streams[tensor.device] = torch.cuda.Stream(tensor.device)
    if after_others:
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def combiner(tensor: AnyTensor, op: str, operation: str) -> Callable[[np.ndarray, np.ndarray, np.ndarray], object]:
    """The function ``combine(a, b, out)`` that adds (or ...) two arrays of this tensor's payload.

    Raises:
        CommunicationError: for an operation that the table refuses for this type.
    """
    return _combiner(dtype_name(tensor.dtype), op, operation)


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
    operate = getattr(torch, {"sum": "add", "mean": "add", "prod": "mul", "max": "maximum", "min": "minimum"}[op])

    def combine(a, b, out):
        # torch adds 16-bit floats in float32 and rounds once.
        a, b, out = (torch.from_numpy(array.view(np.int16)).view(dtype) for array in (a, b, out))
        operate(a, b, out=out)

    return combine
