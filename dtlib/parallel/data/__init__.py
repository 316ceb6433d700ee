"""Data parallelism: plain.py is read in class, full.py supports real models."""

from dtlib.parallel.data import checks  # noqa: F401  # installs the checks of plain.py on import
from dtlib.parallel.data.full import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive

__all__ = ["DataParallel", "DataParallelBuckets", "DataParallelHooks", "DataParallelNaive"]
