"""Which dtypes can be sent, and how they are combined.

| type | moved | sum, prod | mean | max, min |
|---|---|---|---|---|
| float64, float32 | yes | yes | yes | yes |
| float16, bfloat16 | as 16 bits | in float32 at each hop, then rounded | likewise | yes |
| integers of 8 to 64 bits | yes | yes; wraps around, as torch does | refused: it would round | yes |
| bool | as bytes | refused | refused | any, all |

A CPU tensor is sent from its own memory. A GPU tensor is copied through host memory:
GPU -> pinned host memory -> MPI -> pinned host memory -> GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from dtlib.comm.call import AnyTensor, dtype_name
from dtlib.errors import CommunicationError

if TYPE_CHECKING:
    import torch


# An operation returns the type of tensor that it receives.
T = TypeVar("T", bound=AnyTensor)
# Types of `async_op`: with False an operation returns the tensor, with True a handle.
No = Literal[False]
Yes = Literal[True]
Name = str | None  # an algorithm's name
Sizes = Sequence[int] | None


def maximum(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Write the element-wise maximum to ``out``."""
    np.maximum(a, b, out=out)  # numpy accepts `out` only by keyword


def minimum(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Write the element-wise minimum to ``out``."""
    np.minimum(a, b, out=out)


REDUCTIONS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": maximum, "min": minimum}
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
ALLOWED = {
    **dict.fromkeys(FLOATS, ("sum", "mean", "prod", "max", "min")),
    **dict.fromkeys(INTEGERS, ("sum", "prod", "max", "min")),
    "bool": ("max", "min"),
}

# numpy's type for the memory of each dtype. A dtype that numpy or MPI lacks is sent as integers of the same size.
CODES = {name: np.dtype({"float16": "i2", "bfloat16": "i2", "bool": "u1"}.get(name, name)).str for name in ALLOWED}

STAGED = ("cuda",)  # device types with tensors that are copied through host memory


class Payload:
    """A tensor as MPI sends it: ``flat`` is one contiguous array, a view of the tensor or a copy."""

    __slots__ = ("flat", "memory", "tensor")

    def __init__(self, tensor: AnyTensor, memory: np.ndarray):
        self.tensor = tensor
        # The tensor's own memory in its own shape, or None if `flat` is a view.
        self.memory: np.ndarray | None = memory
        if memory.flags.c_contiguous:
            self.flat, self.memory = memory.reshape(-1), None
        else:
            self.flat = np.ascontiguousarray(memory).reshape(-1)

    def store(self) -> AnyTensor:
        """Copy ``flat`` back into the tensor if it is a copy; return the tensor."""
        if self.memory is not None:
            self.memory[...] = self.flat.reshape(self.memory.shape)
        if not isinstance(self.tensor, np.ndarray) and not self.tensor.is_inference():
            # A backward pass that needs the old values must fail instead of being wrong.
            sys.modules["torch"].autograd.graph.increment_version(self.tensor)
        return self.tensor

    def finisher(self, op: str, size: int) -> Callable[[], AnyTensor]:
        """Return the function that stores the result, after it was combined over ``size`` ranks with ``op``."""
        return partial(self._store_mean, size) if op == "mean" else self.store

    def _store_mean(self, size):
        if self.flat.dtype.kind == "f":
            np.divide(self.flat, size, out=self.flat)
        else:
            # numpy cannot divide 16-bit floats stored as integers: use torch.
            import torch

            dtype: Any = self.tensor.dtype
            torch.from_numpy(self.flat).view(dtype).div_(size)
        return self.store()


def check_name(name: str, operation: str) -> None:
    """Raise CommunicationError for a dtype that is not in the table."""
    if name not in ALLOWED:
        raise CommunicationError(f"{operation} does not support {name}: use one of {', '.join(ALLOWED)}.")


def host_memory(tensor: torch.Tensor, name: str, operation: str) -> np.ndarray:
    """Return a CPU tensor's memory as a numpy array, without a copy."""
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
    """A tensor's memory for ``np.asarray``.

    ``tensor.numpy()`` would work too, but after it torch refuses to resize the tensor's storage.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor, pointer: int, code: str, strides):
        self._tensor = tensor  # keeps the memory alive while an array uses it
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
    """Return the memory of a CPU tensor or numpy array, without a copy if it is contiguous; for a CUDA tensor, a copy.

    Raises:
        CommunicationError: for other objects, for dtypes that are not in the table, and for read-only memory that the
            operation writes.
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
        return StagedPayload(it, name, operation)
    if is_array and isinstance(tensor, np.ma.MaskedArray):
        raise CommunicationError(f"{operation} does not support masks: pass array.filled(...).")
    memory = it.view(np.ndarray) if is_array else host_memory(it, name, operation)
    if not writes or memory.flags.carray:  # contiguous and writeable
        return Payload(tensor, memory)
    if not memory.flags.writeable:
        raise CommunicationError(f"{operation} writes into its argument, but this array is read-only: pass a copy.")
    if _overlaps_itself(memory):
        raise CommunicationError(
            f"{operation} writes into its argument, but elements of this one share memory, as after expand(): pass "
            "tensor.clone()."
        )
    return Payload(tensor, memory)


def _overlaps_itself(memory: np.ndarray) -> bool:
    """Return True if two elements may have the same address: one stride is smaller than the extent of the others."""
    if memory.flags.forc or not memory.size:
        return False
    # From the smallest stride up: without overlap, each stride is at least the extent of all dimensions before it.
    extent = memory.itemsize
    for step, length in sorted((abs(step), length) for step, length in zip(memory.strides, memory.shape, strict=True)):
        if length > 1 and step < extent:
            return True
        extent += step * (length - 1)
    return False


class StagedPayload(Payload):
    """A copy of a GPU tensor in pinned host memory, the fastest source and target of GPU copies.

    Raises:
        CommunicationError: for tensors on other devices than CPU and CUDA.
    """

    __slots__ = ("_host",)
    tensor: torch.Tensor

    def __init__(self, tensor: torch.Tensor, name: str, operation: str):
        import torch

        if tensor.device.type not in STAGED:
            raise CommunicationError(
                f"{operation} carries tensors on the CPU or a CUDA device and this one is on {tensor.device}: pass "
                "tensor.cpu()."
            )
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with _transfers(tensor):
            self._host.copy_(tensor.detach(), non_blocking=True)
        super().__init__(tensor, host_memory(self._host, name, operation))

    def store(self) -> torch.Tensor:
        """Copy the values back to the GPU tensor; return it."""
        with _transfers(self.tensor, after_others=False):
            self.tensor.detach().copy_(self._host, non_blocking=True)
        return self.tensor


_streams: dict = {}  # torch device -> CUDA stream


@contextmanager
def _transfers(tensor, after_others: bool = True):
    """Run the copies of the block on a separate CUDA stream, and wait for them at the end of the block.

    On a separate stream, the host does not wait for kernels that the program queues meanwhile. Copies from the device
    start after the kernels that are already queued, because these may still compute the tensor. Copies back to the
    device need no such wait: no queued kernel may use the tensor before the operation is complete.
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
    """Return the function ``combine(a, b, out)`` that reduces two arrays of this tensor's payload.

    Raises:
        CommunicationError: if the table has no such operation for this dtype.
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
