"""Data parallelism: plain.py is read in class, full.py is what real models need."""

from dtlib.parallel.data.full import DataParallel, DataParallelNaive
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks

__all__ = ["DataParallel", "DataParallelBuckets", "DataParallelHooks", "DataParallelNaive"]
