"""Types of gradients that are not the whole average: shards, gradients of one rank's batch, and placeholders.

torch's ``clip_grad_norm_`` and ``GradScaler`` assume that ``parameter.grad`` is the whole gradient. On shards, each
rank would compute a different norm or find different overflows. Ranks would then scale or skip differently, without an
error. So tensors of these types raise an error in functions that need the whole gradient. In all other functions they
are ordinary tensors.
"""

from collections.abc import Callable

import torch

from dtlib.errors import DtlibError

NORM_FUNCTIONS = {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "dist", "_foreach_norm"}
OVERFLOW = "_amp_foreach_non_finite_check_and_unscale_"
CLAMP_FUNCTIONS = {"clamp", "clamp_", "clip", "clip_", "_foreach_clamp_min_", "_foreach_clamp_max_"}
SAME_GRADIENT = {"detach", "__get__"}  # the results of .detach() and .data are the same gradient, so they keep the type
CLIP = "clip with clip_grad_norm_ of ZeroOptimizer, of fully_shard, of dtlib.parallel.tensor or dtlib.parallel.expert"


class ShardedGradient(torch.Tensor):
    """This rank's part of a gradient: a ZeRO shard, a tensor-parallel shard, or an expert that other ranks lack.

    ``gradient.clone()`` is an ordinary tensor.
    """

    refused = NORM_FUNCTIONS
    what = "this rank's shards"

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        name = getattr(func, "__name__", "")
        if name == OVERFLOW:
            raise DtlibError(
                "GradScaler checks only the gradients of this rank for overflows, so ranks would skip different steps: "
                "train in bfloat16, or with fp16 in the config of dtlib.initialize, which checks all ranks."
            )
        if name in cls.refused:
            raise DtlibError(
                f"{name} of this gradient would be {name} of {cls.what}, as in torch.nn.utils.clip_grad_norm_: {CLIP}, "
                "or use gradient.clone()."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name in SAME_GRADIENT and isinstance(result, torch.Tensor) and type(result) is not cls:
            return result.as_subclass(cls)
        return result


class UnaveragedGradient(ShardedGradient):
    """The gradient of this rank's batch before averaging. Clipping it by value is wrong, too."""

    refused = NORM_FUNCTIONS | CLAMP_FUNCTIONS
    what = "this rank's batch"


class FreedGradient(ShardedGradient):
    """A placeholder for a gradient that was sent and freed in the backward pass. Reading its values is an error."""

    @classmethod
    def like(cls, parameter: torch.Tensor) -> "FreedGradient":
        """Return a placeholder for the gradient of ``parameter``: an empty sparse tensor, to which autograd can add."""
        empty = torch.sparse_coo_tensor(  # type: ignore[call-arg]  # the stub lacks the form without elements
            size=parameter.shape, dtype=parameter.dtype, device=parameter.device, check_invariants=True
        )
        return torch.Tensor._make_subclass(cls, empty)

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        name = getattr(func, "__name__", "")
        if name in ZEROES:  # zero_grad(set_to_none=False)
            return args[0]
        if name == "__repr__":
            return "FreedGradient()"
        if name not in WITHOUT_VALUES and name != OVERFLOW:
            raise DtlibError(
                f"{name or 'A function'} was called on a gradient that is not here any more: under ZeRO it left "
                f"during the backward pass, and each rank has its shard of the average. Before step(), {CLIP}."
            )
        return super().__torch_function__(func, types, args, kwargs)


ZEROES = {"zero_", "_foreach_zero_"}
WITHOUT_VALUES = {
    "__get__", "detach", "detach_", "requires_grad_", "size", "dim", "numel", "nelement", "element_size", "__len__",
    "is_floating_point", "is_complex", "is_inference", "_indices", "_values", "indices", "values", "is_coalesced",
    "add.Tensor",  # autograd's addition, under this name in a dispatch mode
}  # fmt: skip


def is_freed(gradient: torch.Tensor | None) -> bool:
    """Return whether ``gradient`` is None or a placeholder."""
    return gradient is None or isinstance(gradient, FreedGradient)


def drop_placeholder(parameter: torch.Tensor) -> None:
    """Set the gradient of ``parameter`` to None if it is a placeholder."""
    if is_freed(parameter.grad):
        parameter.grad = None
