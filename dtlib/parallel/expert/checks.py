"""Checks for plain.py, which imports only torch. Importing this module adds the checks to its class.

With these checks, ``group`` may also be a dtlib communicator.
"""

from torch import nn

from dtlib.comm import AnyCommunicator
from dtlib.errors import DtlibError
from dtlib.gradients.preconditions import around, check_first, group_and_communicator
from dtlib.gradients.same_model import check_same_arguments
from dtlib.gradients.shard_info import note
from dtlib.parallel.expert.plain import MixtureOfExperts


def _construct(original, self, width, experts, group: AnyCommunicator | None = None, top=1, capacity=None):
    (group, comm), experts = group_and_communicator(group), nn.ModuleList(experts)
    count = len(experts) * comm.size
    check_same_arguments(comm, "MixtureOfExperts", width=width, experts=len(experts), top=top, capacity=capacity)
    if not 1 <= top <= min(2, count) or (capacity is not None and not capacity > 0):
        raise DtlibError(f"top={top} of {count} experts, capacity={capacity}: pass top=1 or 2, and capacity above 0.")
    original(self, width, experts, group, top, capacity)
    self.comm = comm
    for parameter in experts.parameters():
        # Mark experts, which differ between ranks: functions that average gradients or compute norms read this note.
        note(parameter, experts=comm.members)


def _check_tokens(self, x) -> None:
    asked = set(self.comm.all_gather_object((len(x), self.gate.weight.sum().item())))
    if len(asked) > 1 or not len(x):
        raise DtlibError(
            f"Ranks have (tokens, sum of gate) {asked}: use equal ones, above 0 tokens; average gate gradients."
        )


around(MixtureOfExperts, "__init__", _construct)
check_first(MixtureOfExperts, "forward", _check_tokens)
