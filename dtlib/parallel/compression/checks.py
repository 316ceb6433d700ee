"""Checks for plain.py, which imports only torch. Importing this module adds the checks to the states of plain.py.

With these checks, ``group`` may also be a dtlib communicator.
"""

from dtlib.comm import AnyCommunicator
from dtlib.errors import DtlibError
from dtlib.gradients.preconditions import around, group_and_communicator
from dtlib.parallel.compression.plain import EightBitState, PowerSGDState, TopKState


def _top_k(original, self, group: AnyCommunicator | None = None, fraction=0.01, feedback=True):
    if not 0 < fraction <= 1:
        raise DtlibError(f"TopKState(fraction={fraction}): pass the share of elements to send, above 0 and at most 1.")
    original(self, group_and_communicator(group)[0], fraction, feedback)


def _eight_bit(original, self, group: AnyCommunicator | None = None, block=256):
    if block < 1:
        raise DtlibError(f"EightBitState(block={block}): pass the number of elements per scale, such as 256.")
    original(self, group_and_communicator(group)[0], block)


def _power_sgd(original, self, group: AnyCommunicator | None = None, matrix_approximation_rank=1, *rest, **named):
    if matrix_approximation_rank < 1:
        raise DtlibError(f"PowerSGDState(matrix_approximation_rank={matrix_approximation_rank}): pass 1 or more.")
    original(self, group_and_communicator(group)[0], matrix_approximation_rank, *rest, **named)


around(TopKState, "__init__", _top_k)
around(EightBitState, "__init__", _eight_bit)
around(PowerSGDState, "__init__", _power_sgd)
