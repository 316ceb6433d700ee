"""ZeRO stages 1 and 2, and in plain.py all three, to be read in class; optimizer.py is what real models need."""

from dtlib.parallel.zero.optimizer import ELEMENTWISE, ZeroOptimizer

__all__ = ["ELEMENTWISE", "ZeroOptimizer"]
