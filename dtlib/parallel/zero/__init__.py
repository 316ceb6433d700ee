"""ZeRO: plain.py has all three stages and is read in class.

For real models, optimizer.py implements stages 1 and 2, and sharded/ implements stage 3.
"""

from dtlib.parallel.zero import checks  # noqa: F401  # installs the checks of plain.py on import
from dtlib.parallel.zero.argument_checks import ELEMENTWISE, is_elementwise
from dtlib.parallel.zero.optimizer import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3

__all__ = ["ELEMENTWISE", "Stage1", "Stage2", "Stage3", "ZeroOptimizer", "is_elementwise"]
