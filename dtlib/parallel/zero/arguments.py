"""What ZeroOptimizer may be given: which optimizers may have shards of parameters, and which numbers make sense."""

from inspect import unwrap

import torch
from torch import optim

from dtlib.errors import DtlibError

# Optimizers whose update of an element depends on nothing but that element: a shard of a parameter is like a whole one.
ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


def is_elementwise(optimizer_class: object) -> bool:
    """A subclass is so if it has the step of what it is derived from. (torch wraps ``step`` when one is made.)"""
    return isinstance(optimizer_class, type) and any(
        issubclass(optimizer_class, kind) and unwrap(optimizer_class.step) is unwrap(kind.step) for kind in ELEMENTWISE
    )


def check_elementwise(optimizer_class: object, who: str) -> None:
    """Refuse an optimizer that would see that it has shards of parameters."""
    if not is_elementwise(optimizer_class):
        name, known = getattr(optimizer_class, "__name__", optimizer_class), (kind.__name__ for kind in ELEMENTWISE)
        raise DtlibError(
            f"{who} cuts parameters anywhere, and {name} is not known to work element by element: choose one of "
            f"{', '.join(known)}, or a subclass that leaves step() as it is."
        )


def check_output(output: object, who: str) -> None:
    """Refuse a module that gives something else than one tensor."""
    if not isinstance(output, torch.Tensor):
        raise DtlibError(f"{who}: a module gave {type(output).__name__}, and has to give one tensor: join them.")


def check_arguments(optimizer_class: object, stage: int, bucket_cap_mb: float | None, progress: str | None) -> None:
    """Refuse what ``ZeroOptimizer`` cannot do."""
    check_elementwise(optimizer_class, "ZeroOptimizer")
    if stage not in (1, 2):
        raise DtlibError(
            f"ZeroOptimizer(stage={stage!r}): choose 1 or 2; stage 3 is fully_shard in dtlib.parallel.zero.sharded."
        )
    if bucket_cap_mb is not None and bucket_cap_mb <= 0:
        raise DtlibError(f"ZeroOptimizer(bucket_cap_mb={bucket_cap_mb}): pass a size above 0, such as 25.")
    if progress not in (None, "inline", "thread"):
        raise DtlibError(f"ZeroOptimizer(progress={progress!r}): choose 'inline' or 'thread'.")
