"""torch's modules that were stopped in the middle of a step: they must be wrapped anew, and say so."""

import gc
import weakref

from torch.nn.parallel import DistributedDataParallel

from dtlib.errors import DtlibError

_refusing = weakref.WeakSet()  # those that were marked at an earlier reset


def mark_stopped_modules(group) -> None:
    """Let each ``DistributedDataParallel`` of a group refuse to go on, if one of them was stopped on any rank.

    Its C++ has counted gradients of which some never came, and nothing can make it forget them. Where a rank has not
    begun that step its own module could go on, but it would be out of step with those that are made anew elsewhere.
    """
    wrapped = [one for one in gc.get_objects() if type(one) is DistributedDataParallel and one not in _refusing]
    modules = [one for one in wrapped if one.__dict__.get("process_group") is group]  # one may be only half made
    if any(group.comm.all_gather_object(any(map(_is_in_mid_step, modules)))):
        for module in modules:
            _refusing.add(module)
            module.register_forward_pre_hook(_refuse)
            # Something may hold it, as a notebook holds the last error: it must not count the new one's gradients.
            module.reducer._remove_autograd_hooks()


def _is_in_mid_step(module) -> bool:
    try:
        module.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def _refuse(module, _inputs):
    raise DtlibError(
        "A step of this DistributedDataParallel was stopped in the middle, and gradients of it are lost: wrap the "
        "model anew on all ranks, model = DistributedDataParallel(model.module)."
    )
