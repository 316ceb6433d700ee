"""A table of how ranks share each parameter. Strategies write it, so no attribute is set on a tensor.

    note(parameter, experts=comm.members)     a strategy, when it receives the parameter
    info_of(parameter).experts                later: another strategy, a norm or a checkpoint

The table has weak references to parameters. A copy of a parameter, or a parameter that replaces it, has no entry.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dtlib.gradients.buckets import Slice
from dtlib.gradients.local_gradient import ShardedGradient


@dataclass(frozen=True)
class ShardInfo:
    """How ranks share a parameter. Ranks are world ranks.

    Args:
        tensor: the ranks that have one shard of the parameter each (tensor parallelism).
        experts: the ranks that have different experts under this parameter's name.
        expert_copy: the number of this copy of the expert along the data axis; None if copies have no number.
        sequences: the ranks that share each sequence (context parallelism); gradients are of this rank's tokens only.
        slice: the elements of the whole parameter that this tensor contains (ZeRO stage 3).
        sharded_as: the parameter's name in the unit of ``fully_shard`` that has replaced it by shards.
    """

    tensor: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    expert_copy: int | None = None
    sequences: tuple[int, ...] = ()
    slice: Slice | None = None
    sharded_as: str = ""

    def differs(self) -> bool:
        """Return whether other ranks have different values of this parameter by design: shards or experts."""
        return len(self.tensor) > 1 or len(self.experts) > 1


NOTHING = ShardInfo()
_infos = WeakTensorKeyDictionary()
_handles = WeakTensorKeyDictionary()  # parameter -> handle of the hook that replace_hook registered


def info_of(parameter: torch.Tensor) -> ShardInfo:
    """Return the entry of a parameter; an empty ``ShardInfo`` if it has none."""
    return _infos.get(parameter, NOTHING)


def note(parameter: torch.Tensor, **what: object) -> None:
    """Set fields of a parameter's ``ShardInfo``; make gradients of shards and experts refuse torch's norms."""
    before = info_of(parameter)
    _infos[parameter] = now = replace(before, **what)  # type: ignore[arg-type]
    if parameter.requires_grad and now.differs() and not before.differs():
        parameter.register_post_accumulate_grad_hook(set_gradient_type)


def copy_info(old: torch.Tensor, *new: torch.Tensor) -> None:
    """Copy the entry of ``old`` to tensors that replace it. The caller must make their gradients refuse norms."""
    for parameter in new:
        _infos[parameter] = info_of(old)


def set_gradient_type(parameter: torch.Tensor) -> None:
    """Change the type of a shard's gradient to ``ShardedGradient``, which refuses norms."""
    if type(parameter.grad) is torch.Tensor and info_of(parameter).differs():
        parameter.grad = parameter.grad.as_subclass(ShardedGradient)


def replace_hook(parameter: torch.Tensor, hook: Callable) -> None:
    """Register a post-accumulate hook, and remove the hook that this function registered for an earlier optimizer."""
    if parameter in _handles:
        _handles[parameter].remove()
    _handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)


def hooks_of_others(parameter: torch.Tensor) -> list:
    """Return the post-accumulate hooks of a parameter, except the one that ``note`` registers."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return [hook for hook in hooks.values() if hook is not set_gradient_type]
