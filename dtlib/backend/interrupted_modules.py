"""Detection of torch modules that were stopped in the middle of a step; their next forward pass raises an error.

Only stops in a forward or backward pass are detected. A stop after the backward pass is not detected, because torch
does not record whether the optimizer has stepped.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from dtlib.errors import DtlibError

if TYPE_CHECKING:
    from dtlib.comm.torch.group_on_communicator import Group

_refusing: weakref.WeakSet = weakref.WeakSet()  # modules that an earlier reset has marked


def mark_stopped_modules(groups: Iterable[Group]) -> None:
    """Make a group's ``DistributedDataParallel`` and FSDP2 modules raise an error, if any rank was stopped in one.

    DDP's C++ code has counted gradients, some of which never arrived, and offers no way to reset the count. FSDP2 has
    stored partial gradients, and would add the next gradients to them. A module on a rank that had not begun the step
    is marked, too, because the other ranks will use new modules.
    """
    # torch keeps no list of wrapped modules, so they are searched among all objects.
    wrapped = {one: its for one in gc.get_objects() if (its := _groups_of(one)) and one not in _refusing}
    stopped = {one for one in wrapped if _is_in_mid_step(one)}
    for group in groups:
        modules = [one for one, its in wrapped.items() if any(each is group for each in its)]
        assert group.comm is not None  # it is in use
        if any(group.comm.all_gather_object(any(one in stopped for one in modules))):
            stopped.update(modules)
    for module in stopped:
        _refuse_from_now_on(module)


def _groups_of(one) -> list:
    """Return the process groups of a wrapped module; an empty list for any other object."""
    if type(one) is DistributedDataParallel:
        return [one.__dict__.get("process_group")]  # its __init__ may have failed
    if not _is_sharded(one):
        return []
    meshes = [group.mesh_info for state in _states(one) for group in state._fsdp_param_groups]
    names = ("shard_process_group", "replicate_process_group")
    return [getattr(mesh, name) for mesh in meshes for name in names if hasattr(mesh, name)]


def _is_sharded(one) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, no module is sharded
    return fsdp is not None and issubclass(type(one), fsdp.FSDPModule)


def _states(module) -> list:
    """Return the FSDP2 states of a module and of its submodules that are sharded separately."""
    return [one._get_fsdp_state() for one in module.modules() if _is_sharded(one)]


def _is_in_mid_step(module) -> bool:
    if _is_sharded(module):
        notes = [note for state in _states(module) for note in (state, *state._fsdp_param_groups)]
        return any(note._training_state.name != "IDLE" for note in notes)
    try:
        module.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def _refuse_from_now_on(module) -> None:
    _refusing.add(module)
    if _is_sharded(module):
        # Before FSDP2's own hook, which would gather parameters.
        module.register_forward_pre_hook(_refuse_sharded, prepend=True)
    else:
        module.register_forward_pre_hook(_refuse)
        # The old module may stay alive, for example in a notebook's last traceback. Its hooks must not react to the
        # gradients of a new module around the same parameters.
        module.reducer._remove_autograd_hooks()


def _refuse(module, _inputs):
    raise DtlibError(
        "A step of this DistributedDataParallel was interrupted, and its gradients are lost: on all ranks wrap the "
        "model again, model = DistributedDataParallel(model.module)."
    )


def _refuse_sharded(module, _inputs):
    raise DtlibError(
        "A step of this model was interrupted, and its gradients are lost: on all ranks build the model and its "
        "optimizer again, call fully_shard, and load the last checkpoint."
    )
