"""Where a tensor lives decides how it travels: from its own memory on the CPU, by a copy in host memory from a GPU."""

import numpy as np

from dtlib.comm import types
from dtlib.comm.torch.staging import staged
from dtlib.errors import CommunicationError


def payload(tensor, operation: str, writes: bool) -> types.Payload:
    """The memory of a CPU tensor or numpy array, without a copy where it is contiguous; a copy of a CUDA tensor's.

    Raises:
        CommunicationError: for anything else, for types that are not in the table, and for read-only memory where
            the operation writes.
    """
    is_array = isinstance(tensor, np.ndarray)
    if not is_array and not hasattr(tensor, "detach"):
        cure = f", or use {operation}_object" if operation in ("broadcast", "all_gather") else ""
        raise CommunicationError(
            f"{operation} carries a torch tensor or a numpy array and got {type(tensor).__name__} {tensor!r:.40}: "
            f"wrap it with torch.tensor(...){cure}."
        )
    name = types.type_name(tensor)
    if name not in types.ALLOWED:
        types.check_name(name, operation)
    if not is_array and not tensor.is_cpu:
        return staged(tensor, name, operation)
    if is_array and isinstance(tensor, np.ma.MaskedArray):
        raise CommunicationError(f"{operation} does not know of masks: pass array.filled(...).")
    memory = tensor.view(np.ndarray) if is_array else types.host_memory(tensor, name, operation)
    if not writes or memory.flags.carray:  # contiguous, and to be written to
        return types.Payload(tensor, memory)
    if not memory.flags.writeable:
        raise CommunicationError(f"{operation} writes into its argument, and this array is read-only: pass a copy.")
    if _overlaps_itself(memory):
        raise CommunicationError(
            f"{operation} writes into its argument, and elements of this one share memory, as expand() makes them: "
            "pass tensor.clone()."
        )
    return types.Payload(tensor, memory)


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
