"""Gradients that mean less than they seem to: of this rank's batch alone, or a shard of the average.

torch's ``clip_grad_norm_`` and ``GradScaler`` take ``parameter.grad`` for the whole. Under ZeRO each rank would find
another norm, or another overflow, and ranks would scale or skip differently without a word. So these tensors refuse
what would look at a whole gradient; to torch they are otherwise ordinary ones.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch.nn.utils import clip_grad

from dtlib.errors import DtlibError

OF_THE_WHOLE = {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "dist", "_foreach_norm"}
OVERFLOW = "_amp_foreach_non_finite_check_and_unscale_"
ONE_BY_ONE = {"clamp", "clamp_", "clip", "clip_", "_foreach_clamp_min_", "_foreach_clamp_max_"}
KEEP = {"detach", "__get__"}  # .detach() and .data are still the same gradient


class ShardedGradient(torch.Tensor):
    """This rank's shard of an average. ``gradient.clone()`` is an ordinary tensor."""

    refused = OF_THE_WHOLE
    what = "this rank's shard of it"

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        name = getattr(func, "__name__", "")
        if name == OVERFLOW:
            raise DtlibError(
                "GradScaler would look for overflows in this rank's gradients alone, and ranks would skip different "
                "steps: train in bfloat16, or with fp16 in the config of dtlib.initialize, which asks all ranks."
            )
        if name in cls.refused:
            raise DtlibError(
                f"{name} of a gradient under ZeRO would be that of {cls.what}, as torch.nn.utils.clip_grad_norm_ would "
                f"take it: clip with clip_grad_norm_ of the ZeroOptimizer or of the fully_shard model, or look at "
                "gradient.clone()."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name in KEEP and isinstance(result, torch.Tensor) and type(result) is not cls:
            return result.as_subclass(cls)
        return result


class UnaveragedGradient(ShardedGradient):
    """That of this rank's batch, which is averaged later: to clip it value by value is wrong, too."""

    refused = OF_THE_WHOLE | ONE_BY_ONE
    what = "this rank's batch"


def refuse_torch_clipping(parameter: torch.Tensor) -> None:
    """Gradients of this parameter are gone when torch's functions would clip them: these raise from now on."""
    vars(parameter)["_gradients_leave"] = True


def _refusing(clip):
    @wraps(clip)
    def refuse_or_clip(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(len(getattr(parameter, "expert_parallel", ())) > 1 for parameter in parameters):
            raise DtlibError(
                "torch.nn.utils would clip by the norm of this rank's experts, and each rank by another: clip with "
                "dtlib.parallel.expert.clip_grad_norm_."
            )
        if any(hasattr(parameter, "_gradients_leave") for parameter in parameters):
            raise DtlibError(
                "torch.nn.utils cannot clip here: under ZeRO gradients are those of this rank, or have left with the "
                "backward pass. With a ZeroOptimizer, call optimizer.clip_grad_norm_(max_norm) before optimizer.step()."
            )
        return clip(parameters, *args, **kwargs)

    return refuse_or_clip


# torch's clip_grad_norm_ calls the first of these by its module's name, however a script has imported it.
clip_grad._clip_grads_with_norm_ = _refusing(clip_grad._clip_grads_with_norm_)
clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = _refusing(clip_grad.clip_grad_value_)
torch.nn.utils.clip_grads_with_norm_ = clip_grad._clip_grads_with_norm_
