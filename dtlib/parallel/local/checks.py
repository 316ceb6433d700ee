"""Checks for plain.py, which imports only torch. Importing this module adds the checks to the classes of plain.py.

With these checks, ``group`` may also be a dtlib communicator.
"""

from torch import nn
from torch.optim import Optimizer

from dtlib.comm import AnyCommunicator
from dtlib.errors import DtlibError
from dtlib.gradients.preconditions import around, group_and_communicator
from dtlib.gradients.same_model import check_same_model
from dtlib.parallel.local.plain import DiLoCo, LocalSGD


def _construct(original, self, group: AnyCommunicator | None, model, optimizer, sync_every):
    (group, comm), caller = group_and_communicator(group), type(self).__name__
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    check_same_model(named, comm, caller)
    if not isinstance(sync_every, int) or sync_every < 1:
        raise DtlibError(f"{caller}(sync_every={sync_every!r}): pass the number of steps per round, 1 or more.")
    if len({parameter.dtype for parameter in named.values()}) != 1 or any(True for _ in model.buffers()):
        raise DtlibError(f"{caller}: use a model of one dtype without buffers, or the full class.")
    check_optimizer(caller, model, optimizer)
    original(self, group, model, optimizer, sync_every)


def _construct_outer(original, self, group, model, inner_optimizer, outer_optimizer, sync_every):
    check_optimizer(type(self).__name__, model, outer_optimizer)
    original(self, group, model, inner_optimizer, outer_optimizer, sync_every)


def check_optimizer(caller: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that lacks trained parameters of the model, or has parameters of another model."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, one in model.named_parameters() if one.requires_grad and one not in known]
    if missing or known - set(model.parameters()):
        what = f"lacks {missing[0]}" if missing else "has parameters of another model"
        raise DtlibError(f"{caller}: {type(optimizer).__name__} {what}: give it all trained parameters of this model.")


around(LocalSGD, "__init__", _construct)
around(DiLoCo, "__init__", _construct_outer)
