"""torch's modules that were stopped in the middle of a step: they must be wrapped anew, and say so.

What a stop leaves behind outside of a step's forward and backward pass cannot be seen: whether each rank has taken the
optimizer's step, torch does not write down.
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
    from dtlib.comm.torch.backend_group import Group

_refusing: weakref.WeakSet = weakref.WeakSet()  # those that were marked at an earlier reset


def mark_stopped_modules(groups: Iterable[Group]) -> None:
    """Let the ``DistributedDataParallel`` and FSDP2 modules of a group refuse to go on, if a rank was stopped in one.

    DDP's C++ has counted gradients of which some never arrived, and nothing can make it forget them; FSDP2 keeps some,
    to which it would add those of the next. Where a rank has not begun that step its own module could go on, but it
    would be out of step with those that are made anew elsewhere.
    """
    wrapped = {one: its for one in gc.get_objects() if (its := _groups_of(one)) and one not in _refusing}
    stopped = {one for one in wrapped if _is_in_mid_step(one)}
    for group in groups:
        modules = [one for one, its in wrapped.items() if any(each is group for each in its)]
        assert group.comm is not None  # it lives
        if any(group.comm.all_gather_object(any(one in stopped for one in modules))):
            stopped.update(modules)
    for module in stopped:
        _refuse_from_now_on(module)


def _groups_of(one) -> list:
    """The groups by which a wrapped module talks; none for anything else."""
    if type(one) is DistributedDataParallel:
        return [one.__dict__.get("process_group")]  # one may be only half made
    if not _is_sharded(one):
        return []
    meshes = [group.mesh_info for state in _states(one) for group in state._fsdp_param_groups]
    names = ("shard_process_group", "replicate_process_group")
    return [getattr(mesh, name) for mesh in meshes for name in names if hasattr(mesh, name)]


def _is_sharded(one) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it, nothing is sharded
    return fsdp is not None and issubclass(type(one), fsdp.FSDPModule)


def _states(module) -> list:
    """FSDP2's notes about a module and those inside, of which each may be a unit of its own."""
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
        module.register_forward_pre_hook(_refuse_sharded, prepend=True)  # before FSDP2's own
    else:
        module.register_forward_pre_hook(_refuse)
        # Something may hold it, as a notebook holds the last error: it must not count the new one's gradients.
        module.reducer._remove_autograd_hooks()


def _refuse(module, _inputs):
    raise DtlibError(
        "A step of this DistributedDataParallel was stopped in the middle, and gradients of it are lost: wrap the "
        "model anew on all ranks, model = DistributedDataParallel(model.module)."
    )


def _refuse_sharded(module, _inputs):
    raise DtlibError(
        "A step of this model was stopped in the middle, and gradients of it are lost: build the model and its "
        "optimizer anew on all ranks, call fully_shard, and load the last checkpoint."
    )
