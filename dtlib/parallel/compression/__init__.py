"""Gradient compression: communication hooks for ``DataParallel.register_comm_hook`` and for torch's DDP.

A limit without an error: after one gradient with an infinity or a NaN, the error feedback of PowerSGD and top-k stays
NaN. Then create a new state and wrap the model again.
"""

from dtlib.parallel.compression import checks  # noqa: F401  # installs the checks of plain.py on import
from dtlib.parallel.compression.plain import (
    EightBitState,
    PowerSGDState,
    TopKState,
    eight_bit_hook,
    powerSGD_hook,
    top_k_hook,
)

__all__ = ["EightBitState", "PowerSGDState", "TopKState", "eight_bit_hook", "powerSGD_hook", "top_k_hook"]
