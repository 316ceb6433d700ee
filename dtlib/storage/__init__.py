"""Feeding the accelerators: samples in files, readers of them, and how well an accelerator is used.

preprocessing.py   raw (image, JSON, text) to binary
formats.py         one set of samples as a file each, as one file, as shards, as tar files, as Parquet
readers.py         samples by their numbers, from each of these; parquet.py, by columns
order.py           the order of an epoch, and the slice of a rank: pure functions
loader.py          batches for a rank: workers, prefetch, exact resume
cache.py           kept in memory, or staged in a local folder
files.py           opened, read, counted; what is damaged is told with file and offset
page_cache.py      the system's cache of files: emptied, and looked at whether it is
utilisation.py     emulated accelerators, and for which fraction of the time they compute
mlperf.py          workloads of MLPerf Storage, scaled to a laptop

Samples have no checksums: files that are missing, cut short or of another length are told, flipped bits are not.
"""

from dtlib.storage.cache import Cached, stage
from dtlib.storage.files import StorageError
from dtlib.storage.formats import FORMATS, write
from dtlib.storage.loader import Loader
from dtlib.storage.opening import open_samples

__all__ = ["FORMATS", "Cached", "Loader", "StorageError", "open_samples", "stage", "write"]
