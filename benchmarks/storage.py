"""How well readers feed an emulated accelerator, cold: ours, a plain DataLoader, and the libraries that are installed.

Two contrasting workloads of MLPerf Storage, scaled: a few large samples (UNet3D), and many small ones (BERT). Each is
written in every format; before every run the cache of its files is emptied and looked at, and the runs of a repeat
come in an order drawn by chance. Seconds are those of the steps after the first, the accelerator's time included.
"""

import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import input_peers
from benchmarks.compare import Row, row
from dtlib.lab.course import folder as workshop_folder
from dtlib.storage import FORMATS, Loader, mlperf, open_samples, page_cache
from dtlib.storage.order import order
from dtlib.storage.utilisation import EmulatedAccelerator, measure

RANKS = 1
PER_SHARD = {"unet3d": 8, "bert": 512}
STEPS = {"unet3d": 10, "bert": 14}  # few, as thirty repeats are two and a half thousand runs


@dataclass
class StorageRow(Row):
    """Beside the ratio: utilisation in % (ours once more, taken by hand), samples a second, what was cached."""

    au: float
    peer_au: float
    au_by_hand: float
    samples_a_second: float
    peer_samples_a_second: float
    cached: str


class Watched(EmulatedAccelerator):
    """Notes when each step ended, with a clock of its own: utilisation by hand."""

    def __init__(self, seconds):
        super().__init__(seconds)
        self.ended = []

    def step(self, batch):
        super().step(batch)
        self.ended.append(time.time())

    def au_by_hand(self):
        return (len(self.ended) - 1) * self.seconds / (self.ended[-1] - self.ended[0])


def workloads():
    file = workshop_folder() / "data" / "mlperf_storage_workloads.csv"
    sizes = {"samples": 64, "record_bytes": 2**20, "batch": 4, "compute_seconds": 0.0075}
    yield mlperf.named(file, "unet3d", "v100").scaled(**sizes)
    sizes = {"samples": 20 * 48, "record_bytes": 2500, "batch": 48, "compute_seconds": 0.006}
    yield mlperf.named(file, "bert", "v100").scaled(**sizes)


def rows(world, repeats: int, wanted=("unet3d", "bert"), of_workers=(0, 1, 2)):
    for workload in workloads():
        if workload.name not in wanted:
            continue
        print(f"{workload.name}: {workload.scale}")
        folder = Path(tempfile.mkdtemp(prefix="dtlib-storage-"))
        try:
            input_peers.prepare(folder, workload, PER_SHARD[workload.name])
            for workers in of_workers:
                yield from _compared(folder, workload, workers, repeats)
        finally:
            shutil.rmtree(folder)


def _compared(folder, workload, workers: int, repeats: int):
    contestants = {}
    for form in FORMATS:
        contestants["ours", form] = folder / form, _ours(folder / form, workload, workers, ahead=2 * bool(workers))
        contestants["plain DataLoader", form] = (
            folder / form,
            _theirs(input_peers.plain, folder / form, workload, workers),
        )
        if not workers:  # its default, and what some of the libraries do
            contestants["ours, a thread ahead", form] = folder / form, _ours(folder / form, workload, 0, ahead=2)
    for name, (_, data, _, read) in input_peers.installed().items():
        contestants[name, data] = folder / data, _theirs(read, folder / data, workload, workers)
    seconds, used, left = {}, {}, {}
    for repeat in range(repeats):
        turn = list(contestants)
        random.Random(repeat).shuffle(turn)
        for who in turn:
            data, batches = contestants[who]
            left.setdefault(who, []).append(page_cache.drop(data))
            accelerator = Watched(workload.compute_seconds)
            found = measure(batches(), accelerator, STEPS[workload.name])
            assert found.steps == STEPS[workload.name], f"{who} had {found.steps} steps only"
            seconds.setdefault(who, []).append(found.seconds)
            used.setdefault(who, []).append((found.au, found.samples_a_second, accelerator.au_by_hand()))
    for ours, theirs in _pairs(contestants):
        times = [np.array(seconds[who]) for who in (ours, theirs)]
        (au, rate, by_hand), (peer_au, peer_rate, _) = (np.median(used[who], axis=0) for who in (ours, theirs))
        case = f"{workload.name}, {workers} workers, {ours[1]}: {ours[0]}"
        cached = left[ours] + left[theirs]
        cached = page_cache.in_words(None if None in cached else max(cached))
        compared = row(case, theirs[0], *times)
        yield StorageRow(
            **vars(compared), au=100 * au, peer_au=100 * peer_au, au_by_hand=100 * by_hand, samples_a_second=rate,
            peer_samples_a_second=peer_rate, cached=cached,
        )  # fmt: skip


def _pairs(contestants):
    """Ours beside theirs: on the same files, or on shards where they have a format of their own."""
    for name, form in contestants:
        if name.startswith("ours"):
            continue
        beside = form if name == "plain DataLoader" else input_peers.PEERS[name][2]
        for ours in ("ours", "ours, a thread ahead"):
            if (ours, beside) in contestants:
                yield (ours, beside), (name, form)


def _ours(folder, workload, workers, ahead):
    return lambda: Loader(open_samples(folder), workload.batch, workers=workers, prefetch=ahead, seed=1)


def _theirs(read, folder, workload, workers):
    """In the order in which ours reads, where they let one choose."""
    form = folder.name if folder.name in FORMATS else "shards"
    reader = open_samples(folder.parent / form)
    numbers = order(len(reader), 1, 0, reader.block, reader.window).tolist()
    return lambda: read(folder, workload, PER_SHARD[workload.name], numbers, workers)
