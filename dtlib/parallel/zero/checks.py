"""Checks for plain.py, which imports only torch. Importing this module adds the checks to the classes of plain.py.

With these checks, ``group`` may also be a dtlib communicator.
"""

from dtlib.comm import AnyCommunicator
from dtlib.gradients.preconditions import Preconditions, around, check_first, group_and_communicator
from dtlib.parallel.zero.argument_checks import check_elementwise, check_output
from dtlib.parallel.zero.plain import Stage1, Stage3


def _construct(original, self, group: AnyCommunicator | None, model, optimizer_class, units=None, **settings):
    (group, comm), modules = group_and_communicator(group), list(units or [model])
    check_elementwise(optimizer_class, type(self).__name__)
    self.contract = Preconditions(type(self).__name__, model, comm, modules)
    original(self, group, model, optimizer_class, modules, **settings)


around(Stage1, "__init__", _construct)
check_first(Stage1, "gradient_is_ready", lambda self, unit, parameter: self.contract.gradient_is_ready(parameter))
check_first(Stage1, "step", lambda self, closure=None: self.contract.check_step(closure))
check_first(Stage3, "forward_ends", lambda self, unit, module, x, output: check_output(output, type(self).__name__))
