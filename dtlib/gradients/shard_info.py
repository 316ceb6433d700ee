"""What strategies note about parameters, in one table beside them: no attribute is set on a tensor.

    note(parameter, experts=comm.members)     a strategy, when it is given the parameter
    info_of(parameter).experts                another strategy, a norm or a checkpoint, later

The table holds parameters weakly. A parameter that takes another one's place, such as a copy, has no entry.
"""

from dataclasses import dataclass, replace

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dtlib.gradients.buckets import Slice
from dtlib.gradients.local_gradient import ShardedGradient


@dataclass(frozen=True)
class ShardInfo:
    """How ranks share a parameter. Ranks are world ranks; without a note there are none.

    Args:
        tensor: ranks with the shards of it, one each (tensor parallelism).
        experts: ranks with different experts in its place.
        expert_copy: number of this copy of the expert along the data axis; None if copies are not numbered.
        sequences: ranks with other tokens of the same sequences (context parallelism): its gradients are of this
            rank's tokens alone.
        slice: the elements of the whole parameter that this tensor has (ZeRO stage 3).
        sharded_as: its name in the unit of ``fully_shard`` that has put shards in its place.
    """

    tensor: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    expert_copy: int | None = None
    sequences: tuple[int, ...] = ()
    slice: Slice | None = None
    sharded_as: str = ""

    def differs(self) -> bool:
        """Whether other ranks have other values in its place."""
        return len(self.tensor) > 1 or len(self.experts) > 1


NOTHING = ShardInfo()
_infos = WeakTensorKeyDictionary()


def info_of(parameter: torch.Tensor) -> ShardInfo:
    """What strategies have noted about a parameter."""
    return _infos.get(parameter, NOTHING)


def note(parameter: torch.Tensor, **what: object) -> None:
    """Note fields of ``ShardInfo``. The gradients of a parameter that other ranks do not have refuse torch's norms."""
    before = info_of(parameter)
    _infos[parameter] = now = replace(before, **what)  # type: ignore[arg-type]
    if parameter.requires_grad and now.differs() and not before.differs():
        parameter.register_post_accumulate_grad_hook(give_kind)


def copy_info(old: torch.Tensor, *new: torch.Tensor) -> None:
    """Note the same about tensors that take a parameter's place; what takes their norms is up to the caller."""
    for parameter in new:
        _infos[parameter] = info_of(old)


def give_kind(parameter: torch.Tensor) -> None:
    """Have the gradient of a shard refuse norms."""
    if type(parameter.grad) is torch.Tensor and info_of(parameter).differs():
        parameter.grad = parameter.grad.as_subclass(ShardedGradient)


def hooks_of_others(parameter: torch.Tensor) -> list:
    """Post-accumulate hooks of a parameter, without the one that ``note`` has registered."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return [hook for hook in hooks.values() if hook is not give_kind]
