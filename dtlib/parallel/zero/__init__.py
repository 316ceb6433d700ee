"""ZeRO: plain.py has all three stages, to be read in class; optimizer.py is what real models need of stages 1 and 2."""

from dtlib.parallel.zero.optimizer import ELEMENTWISE, ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3

__all__ = ["ELEMENTWISE", "Stage1", "Stage2", "Stage3", "ZeroOptimizer"]
