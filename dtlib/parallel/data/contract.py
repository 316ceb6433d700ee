"""The contracts of plain.py, which needs torch alone: on import, its classes learn to refuse what lies outside.

Their group may also be a communicator of dtlib.
"""

from dtlib.comm import AnyCommunicator
from dtlib.errors import DtlibError
from dtlib.gradients.contract import Contract, around, beforehand, group_and_communicator
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive


def _construct(plainly, self, module, group: AnyCommunicator | None = None):
    group, comm = group_and_communicator(group)
    contract = Contract(type(self).__name__, module, comm)
    kinds = {(parameter.dtype, parameter.device) for parameter in module.parameters() if parameter.requires_grad}
    if isinstance(self, DataParallelBuckets) and len(kinds) > 1:
        raise DtlibError("DataParallelBuckets: parameters have several dtypes or devices: use DataParallel.")
    plainly(self, module, group)
    self.contract = contract


def _all_at_once(self):
    for parameter in self.trained:
        if parameter.grad is not None:
            self.contract.gradient_is_ready(parameter)
    self.contract.check_step()


around(DataParallelNaive, "__init__", _construct)
beforehand(DataParallelNaive, "average_gradients", _all_at_once)
beforehand(DataParallelHooks, "gradient_is_ready", lambda self, parameter: self.contract.gradient_is_ready(parameter))
beforehand(DataParallelHooks, "average_gradients", lambda self: self.contract.check_step())
