"""Input data: file formats of samples, readers, loaders, caches, and how much time an accelerator waits for data.

preprocessing.py   convert raw images, JSON and text to binary records
formats.py         write samples as one file each, one large file, shards, tar files or Parquet
readers.py         read samples by number from each format; parquet.py reads single columns
order.py           the order of an epoch, and the slice of each rank: pure functions
loader.py          batches for a rank: workers, prefetch, exact resume
cache.py           keep samples in memory, or copy files to a local folder
files.py           open and read files, count reads, report damage with file and offset
page_cache.py      empty the operating system's page cache, and measure its contents
utilisation.py     emulated accelerators, and the fraction of time in which they compute
mlperf.py          workloads of MLPerf Storage, scaled to a laptop

Samples have no checksums. Files that are missing, truncated or of the wrong length are detected; flipped bits are not.
"""

from dtlib.storage.cache import Cached, stage
from dtlib.storage.files import StorageError
from dtlib.storage.formats import FORMATS, write
from dtlib.storage.loader import Loader
from dtlib.storage.opening import open_samples

__all__ = ["FORMATS", "Cached", "Loader", "StorageError", "open_samples", "stage", "write"]
