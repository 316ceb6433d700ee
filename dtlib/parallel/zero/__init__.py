"""ZeRO: plain.py has all three stages, to be read in class; optimizer.py is what real models need of stages 1 and 2,
and sharded/ of stage 3."""

from dtlib.parallel.zero import contract  # noqa: F401  # plain.py's, on import
from dtlib.parallel.zero.arguments import ELEMENTWISE, is_elementwise
from dtlib.parallel.zero.optimizer import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3

__all__ = ["ELEMENTWISE", "Stage1", "Stage2", "Stage3", "ZeroOptimizer", "is_elementwise"]
