"""Checks of the arguments of ZeroOptimizer and fully_shard."""

from inspect import unwrap

import torch
from torch import optim

from dtlib.errors import DtlibError

# Optimizers that update each element independently of all others, so that they work on any shard of a parameter.
ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


def is_elementwise(optimizer_class: object) -> bool:
    """Return whether this is one of ``ELEMENTWISE``, or a subclass that inherits its ``step``."""
    # torch wraps ``step`` when an optimizer is constructed, so compare the unwrapped functions.
    return isinstance(optimizer_class, type) and any(
        issubclass(optimizer_class, kind) and unwrap(optimizer_class.step) is unwrap(kind.step) for kind in ELEMENTWISE
    )


def check_elementwise(optimizer_class: object, caller: str) -> None:
    """Refuse an optimizer whose update of a shard would differ from its update of the whole parameter."""
    if not is_elementwise(optimizer_class):
        name, known = getattr(optimizer_class, "__name__", optimizer_class), (kind.__name__ for kind in ELEMENTWISE)
        raise DtlibError(
            f"{caller} updates parts of parameters, but {name} may need whole parameters: choose one of "
            f"{', '.join(known)}, or a subclass that leaves step() as it is."
        )


def check_output(output: object, caller: str) -> None:
    """Refuse a module output that is not a single tensor."""
    if not isinstance(output, torch.Tensor):
        raise DtlibError(f"{caller}: a module returned {type(output).__name__}, but must return a single tensor.")


def check_arguments(optimizer_class: object, stage: int, bucket_cap_mb: float | None) -> None:
    """Refuse arguments that ``ZeroOptimizer`` does not support."""
    check_elementwise(optimizer_class, "ZeroOptimizer")
    if stage not in (1, 2):
        raise DtlibError(
            f"ZeroOptimizer(stage={stage!r}): choose 1 or 2; stage 3 is fully_shard in dtlib.parallel.zero.sharded."
        )
    if bucket_cap_mb is not None and bucket_cap_mb <= 0:
        raise DtlibError(f"ZeroOptimizer(bucket_cap_mb={bucket_cap_mb}): pass a size above 0, such as 25.")
