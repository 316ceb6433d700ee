"""Mixed precision of a unit: the dtypes for computing and for averaging, separate from the optimizer's dtype."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dtlib.comm import types
from dtlib.errors import DtlibError


@dataclass(frozen=True)
class Policy:
    """The fields of torch's ``MixedPrecisionPolicy``. None keeps a dtype."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @classmethod
    def of(cls, given: object) -> "Policy":
        """Copy the fields of torch's policy, and refuse dtypes that cannot be sent."""
        fields = cls.__dataclass_fields__
        if any(not hasattr(given, field) for field in fields):
            raise DtlibError(
                f"fully_shard(mp_policy={given!r:.80}): pass torch.distributed.fsdp.MixedPrecisionPolicy("
                "param_dtype=..., reduce_dtype=...)."
            )
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            asked = getattr(given, field)
            if asked is not None and types.dtype_name(torch.empty(0, dtype=asked).dtype) not in types.FLOATS:
                raise DtlibError(f"mp_policy has {field}={asked}: choose one of {', '.join(types.FLOATS)}.")
        return cls(*(getattr(given, field) for field in fields))

    def cast_around(self, module: nn.Module) -> None:
        """Register hooks that cast the inputs and outputs of a module."""
        if self.param_dtype and self.cast_forward_inputs:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _cast((args, kwargs), self.param_dtype), with_kwargs=True
            )
        if self.output_dtype:
            module.register_forward_hook(lambda _, args, output: _cast(output, self.output_dtype))


def _cast(things, dtype):
    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, things)
