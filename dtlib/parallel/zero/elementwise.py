"""Which optimizers may be given parts of parameters."""

from inspect import unwrap

from torch import optim

from dtlib.errors import DtlibError

# Optimizers whose update of an element depends on nothing but that element: a part of a parameter is like a whole one.
ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


def is_elementwise(optimizer_class) -> bool:
    """A subclass is so if it has the step of what it is derived from. (torch wraps ``step`` when one is made.)"""
    step = unwrap(getattr(optimizer_class, "step", None))
    return isinstance(optimizer_class, type) and any(
        issubclass(optimizer_class, kind) and step is unwrap(kind.step) for kind in ELEMENTWISE
    )


def refuse_unless_elementwise(optimizer_class) -> None:
    if not is_elementwise(optimizer_class):
        name, known = getattr(optimizer_class, "__name__", optimizer_class), (kind.__name__ for kind in ELEMENTWISE)
        raise DtlibError(
            f"ZeroOptimizer cuts parameters anywhere, and {name} is not known to work element by element: choose one of "
            f"{', '.join(known)}, or a subclass that leaves step() as it is."
        )
