"""Gradients made small before they travel: hooks for ``register_comm_hook`` of ``DataParallel`` and of torch's DDP.

A limit that nothing refuses: after one gradient with an infinity or a NaN, the feedback of PowerSGD and top-k stays
NaN. Make a new state, and wrap the model again.
"""

from dtlib.parallel.compression import contract  # noqa: F401  # plain.py's, on import
from dtlib.parallel.compression.plain import (
    EightBitState,
    PowerSGDState,
    TopKState,
    eight_bit_hook,
    powerSGD_hook,
    top_k_hook,
)

__all__ = ["EightBitState", "PowerSGDState", "TopKState", "eight_bit_hook", "powerSGD_hook", "top_k_hook"]
