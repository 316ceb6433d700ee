"""DeepSpeed's names: ``from dtlib.moe.utils import split_params_into_different_moe_groups_for_optimizer``."""

from collections.abc import Iterable


def is_moe_param(param: object) -> bool:
    """False: no parameter here belongs to an expert."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict | Iterable[dict], max_group_size: int | None = None
) -> list[dict]:
    """The parameter groups, as a list: without experts there is nothing to split."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
