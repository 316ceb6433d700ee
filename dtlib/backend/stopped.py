"""torch's modules that were stopped in the middle of a step: they must be wrapped anew, and say so."""

import gc

from torch.nn.parallel import DistributedDataParallel

from dtlib.backend.group import Group
from dtlib.errors import DtlibError


def mark_stopped_modules() -> None:
    """Let every ``DistributedDataParallel`` on our groups that waits for the end of a step refuse to go on.

    Its C++ has counted gradients of which some never came, and nothing can make it forget them.
    """
    for module in _modules(DistributedDataParallel):
        if isinstance(module.process_group, Group) and _is_in_mid_step(module):
            module.register_forward_pre_hook(_refuse)


def _modules(kind) -> list:
    return [found for found in gc.get_objects() if isinstance(found, kind)]


def _is_in_mid_step(module) -> bool:
    try:
        module.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def _refuse(module, _inputs):
    raise DtlibError(
        f"This {type(module).__name__} was stopped in the middle of a step, and some of its gradients are lost: wrap "
        "the model anew, model = DistributedDataParallel(model.module), on all ranks."
    )
