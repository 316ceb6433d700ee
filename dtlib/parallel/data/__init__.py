"""Data parallelism: plain.py is read in class, full.py is what real models need."""

from dtlib.parallel.data.full import DataParallel, DataParallelNaive

__all__ = ["DataParallel", "DataParallelNaive"]
