"""ZeRO stages 1 and 2: an optimizer whose states, and gradients, are shared out among ranks."""

from dtlib.parallel.zero.arguments import ELEMENTWISE, is_elementwise
from dtlib.parallel.zero.optimizer import ZeroOptimizer

__all__ = ["ELEMENTWISE", "ZeroOptimizer", "is_elementwise"]
