"""Data parallelism: plain.py is read in class, full.py is what real models need."""

from dtlib.parallel.data import contract  # noqa: F401  # plain.py's, on import
from dtlib.parallel.data.full import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive

__all__ = ["DataParallel", "DataParallelBuckets", "DataParallelHooks", "DataParallelNaive"]
