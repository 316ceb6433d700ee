"""Checks for plain.py, which imports only torch. Importing this module adds the checks to the classes of plain.py.

With these checks, ``group`` may also be a dtlib communicator.
"""

from dtlib.comm import AnyCommunicator
from dtlib.errors import DtlibError
from dtlib.gradients.preconditions import Preconditions, around, check_first, group_and_communicator
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive


def _construct(original, self, module, group: AnyCommunicator | None = None):
    group, comm = group_and_communicator(group)
    contract = Preconditions(type(self).__name__, module, comm)
    # One bucket is one flat tensor, so its parameters need one dtype and one device.
    kinds = {(parameter.dtype, parameter.device) for parameter in module.parameters() if parameter.requires_grad}
    if isinstance(self, DataParallelBuckets) and len(kinds) > 1:
        raise DtlibError("DataParallelBuckets: parameters have several dtypes or devices: use DataParallel.")
    original(self, module, group)
    self.contract = contract


def _all_at_once(self):
    """Check every gradient at the end of the backward pass, because ``DataParallelNaive`` has no hooks."""
    for parameter in self.trained:
        if parameter.grad is not None:
            self.contract.gradient_is_ready(parameter)
    self.contract.check_step()


def _check_averaged(self, *inputs, **named):
    """Refuse a forward pass if an optimizer has stepped since the last one, and the gradients were not averaged."""
    versions = [parameter._version for parameter in self.trained]
    if self.in_a_step and versions != self.versions:
        raise DtlibError(
            f"{type(self).__name__}: parameters changed after a forward pass whose gradients were not averaged: call "
            "loss.backward() and average_gradients() before optimizer.step(), and load parameters before the first "
            "forward pass."
        )
    self.versions = versions


around(DataParallelNaive, "__init__", _construct)
check_first(DataParallelNaive, "forward", _check_averaged)
check_first(DataParallelNaive, "average_gradients", _all_at_once)
check_first(DataParallelHooks, "gradient_is_ready", lambda self, parameter: self.contract.gradient_is_ready(parameter))
check_first(DataParallelHooks, "average_gradients", lambda self: self.contract.check_step())
