"""DeepSpeed's names: ``from dtlib.moe.utils import split_params_into_different_moe_groups_for_optimizer``."""


def is_moe_param(param) -> bool:
    """False: no parameter here belongs to an expert."""
    return False


def split_params_into_different_moe_groups_for_optimizer(param_groups, max_group_size=None) -> list[dict]:
    """The parameter groups, as a list: without experts there is nothing to split."""
    return list(param_groups) if isinstance(param_groups, (list, tuple)) else [param_groups]
