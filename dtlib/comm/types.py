"""Which values travel, and how: one table of element types and reductions."""

import numpy as np

from dtlib.errors import CommunicationError

OPERATIONS = ("sum", "mean", "max", "min", "prod")
ADDABLE = {"float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}


def as_array(tensor, verb: str) -> np.ndarray:
    """The memory of a CPU tensor (or numpy array) as a numpy array, without a copy.

    bfloat16, float16 and bool have no counterpart in MPI: they come back as integers of their size, which
    is enough to move them but not to add them (``check_reduction`` refuses that).
    """
    if isinstance(tensor, np.ndarray):
        array = tensor
    elif hasattr(tensor, "detach"):
        if tensor.device.type != "cpu":
            raise CommunicationError(
                f"{verb} carries tensors on the CPU and this one is on {tensor.device}: pass tensor.cpu()."
            )
        array = _torch_memory(tensor.detach())
    else:
        raise CommunicationError(
            f"{verb} carries a torch tensor or a numpy array and got {type(tensor).__name__} {tensor!r:.40}: "
            f"wrap it with torch.tensor(...), or use {verb}_object where there is one."
        )
    return array


def _torch_memory(tensor):
    import torch

    integers = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.bool: torch.uint8}
    return tensor.view(integers.get(tensor.dtype, tensor.dtype)).numpy()


def type_for_reduction(array: np.ndarray) -> np.dtype:
    """The type in which an array is combined: its own, but 64 bits for small integers.

    Open MPI's sums of 8 and 16 bits stop at the largest value or wrap around, depending on the length of the array;
    torch's always wrap, and so do these once they are converted back.
    """
    return np.dtype(np.int64) if array.dtype.kind in "iu" and array.dtype.itemsize < 4 else array.dtype


def check_reduction(tensor, op: str, verb: str) -> None:
    """Refuse an operation that is not in the table, or an element type that MPI would add wrongly."""
    as_array(tensor, verb)
    if op not in OPERATIONS:
        raise CommunicationError(f"{verb} has no op {op!r}: choose one of {', '.join(OPERATIONS)}.")
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ADDABLE:
        raise CommunicationError(
            f"{verb} reduces float32, float64 and integers, and this tensor is {name}: convert it first, "
            "for example with tensor.float()."
        )
    if op == "mean" and not name.startswith("float"):
        raise CommunicationError(
            f"{verb}(op='mean') of {name} would round: use op='sum' and divide, or convert with tensor.float()."
        )
