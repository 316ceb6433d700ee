"""How others read the same bytes: each function gives batches, uint8 of (samples, bytes).

``PEERS`` names them; those that are not installed are left out. Their data are written once, by ``prepare``.
"""

import os
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dtlib.storage.formats import FORMATS, write

SHUFFLED = 2**22  # bytes that are mixed, where a library shuffles in a buffer


def prepare(folder: Path, workload, per_shard: int) -> None:
    """All formats of ours and of others, of the same records."""
    for form in FORMATS:
        rows = max(1, min(per_shard, 2**18 // workload.record_bytes))
        write(folder / form, workload.records(), workload.dtype, form, per_shard - per_shard % rows, rows)
    if find_spec("litdata"):
        _write_litdata(folder / "litdata", workload, per_shard)
    if find_spec("streaming"):
        limit = per_shard * (workload.record_bytes + 16)
        with _streaming().MDSWriter(out=str(folder / "mosaic"), columns={"data": "bytes"}, size_limit=limit) as out:
            for record in workload.records():
                out.write({"data": record})


def _write_litdata(folder: Path, workload, per_shard: int) -> None:
    from litdata.streaming.cache import Cache

    folder.mkdir(parents=True)
    cache = Cache(str(folder), chunk_size=per_shard)
    for number, record in enumerate(workload.records()):
        cache[number] = {"data": record}
    cache.done()
    cache.merge()


def _streaming():
    """Without its ready-made data sets: they want torchvision, of which not every torch has one."""
    for name in ("vision", "multimodal", "text"):
        sys.modules.setdefault(f"streaming.{name}", ModuleType(f"streaming.{name}"))
    import streaming

    return streaming


class Plain(Dataset):
    """A data set as one writes it first: open, seek, read."""

    def __init__(self, folder: Path, workload, per_shard: int):
        self.folder, self.form, self.size, self.count = folder, folder.name, workload.record_bytes, workload.samples
        self.rows = max(1, min(per_shard, 2**18 // self.size))
        self.per_shard = per_shard - per_shard % self.rows
        self.opened = lru_cache(64)(lambda name: open(folder / name, "rb"))  # noqa: SIM115
        self.groups = lru_cache(4)(self._group)
        self.tables = lru_cache(64)(self._table)

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        shard, at = divmod(number, self.per_shard)
        if self.form == "files":
            data = (self.folder / f"sample-{number:07}.bin").read_bytes()
        elif self.form == "parquet":
            return self.groups(shard, at // self.rows)[at % self.rows]
        else:
            name, offset = f"shard-{shard:05}.bin", at * self.size
            if self.form == "one-file":
                name, offset = "samples.bin", number * self.size
            if self.form == "tar":
                name, offset = f"shard-{shard:05}.tar", 512 + at * (512 + -(-self.size // 512) * 512)
            file = self.opened(name)
            file.seek(offset)
            data = file.read(self.size)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _table(self, shard):
        from pyarrow import parquet

        return parquet.ParquetFile(self.folder / f"shard-{shard:05}.parquet")

    def _group(self, shard, group):
        rows = self.tables(shard).read_row_group(group)["data"].to_pylist()
        return [torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in rows]


def plain(folder, workload, per_shard, numbers, workers):
    data = Plain(folder, workload, per_shard)
    return DataLoader(data, workload.batch, sampler=numbers, num_workers=workers)


def webdataset(folder, workload, per_shard, numbers, workers):
    import webdataset as wds

    urls = sorted(str(path) for path in folder.glob("*.tar"))
    kept = max(2, SHUFFLED // workload.record_bytes)
    data = wds.WebDataset(urls, shardshuffle=len(urls), workersplitter=wds.split_by_worker, seed=1)
    data = (
        data.shuffle(kept, initial=kept // 2)
        .map(lambda x: np.frombuffer(x["bin"], np.uint8))
        .batched(workload.batch, collation_fn=np.stack)
    )
    return (torch.as_tensor(batch) for batch in wds.WebLoader(data, batch_size=None, num_workers=workers))


class _Bytes(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


def _stacked(samples):
    rows = [np.frombuffer(sample["data"], np.uint8) for sample in samples]
    return torch.from_numpy(np.stack(rows))


def litdata(folder, workload, per_shard, numbers, workers):
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(str(folder), shuffle=True, seed=1)
    return StreamingDataLoader(data, batch_size=workload.batch, num_workers=workers, collate_fn=_stacked)


def mosaic(folder, workload, per_shard, numbers, workers):
    streaming = _streaming()
    streaming.base.util.clean_stale_shared_memory()
    os.environ.update(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    data = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=workload.batch, shuffle_seed=1)
    return DataLoader(data, workload.batch, num_workers=workers, collate_fn=_stacked)


def spdl(folder, workload, per_shard, numbers, workers):
    """It reads in threads, of which it gets one, or as many as others get workers."""
    from spdl.pipeline import PipelineBuilder

    data = Plain(folder, workload, per_shard)
    size = workload.batch
    steps = [numbers[at : at + size] for at in range(0, len(numbers), size)]

    def read(step):
        return torch.stack([data[number] for number in step])

    builder = PipelineBuilder().add_source(steps).pipe(read, concurrency=max(1, workers)).add_sink(2)
    pipeline = builder.build(num_threads=max(1, workers))

    def batches():
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    return batches()


# What it is called -> (the package, the folder of its data, the format of ours beside which it is timed, how it reads)
PEERS = {
    "webdataset": ("webdataset", "tar", "tar", webdataset),
    "litdata": ("litdata", "litdata", "shards", litdata),
    "mosaicml-streaming": ("streaming", "mosaic", "shards", mosaic),
    "spdl": ("spdl", "shards", "shards", spdl),
}


def installed() -> dict:
    return {name: peer for name, peer in PEERS.items() if find_spec(peer[0])}
