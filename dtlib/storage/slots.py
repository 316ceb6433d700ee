"""How workers hand over large batches: in memory that all of them share, used again once nobody holds a batch.

Fresh shared memory costs more than to read into it: 6 ms for 8 MiB, most of it for its pages, against 1 ms for memory
that was used before. So it is made before the workers start; who sends a worker a step says which piece is free.
"""

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import Dataset

from dtlib.errors import DtlibError

SHARED = 2**20  # bytes of a batch from which on it is worth while; smaller ones go through the pipe itself
ALIGNED = 64  # bytes


class Slots:
    """``count`` pieces of shared memory, each with room for a batch of ``samples`` times ``sample_bytes``."""

    def __init__(self, count: int, samples: int, sample_bytes: int):
        self._size = samples * sample_bytes + 64 * ALIGNED  # for a row of fields
        wanted = count if samples * sample_bytes >= SHARED else 0
        self._memory = [torch.empty(self._size, dtype=torch.uint8).share_memory_() for _ in range(wanted)]
        self._free = list(range(wanted))

    def with_slots(self, steps: Iterable) -> Iterator[tuple]:
        """Each step and a slot for its batch, or None where batches are held in all of them."""
        for step in steps:
            yield step, self._free.pop() if self._free else None

    def put(self, batch: dict, slot: int | None) -> dict:
        """In a worker: what is sent for a batch. With a slot, where each field lies in it."""
        if sum(x.nbytes for x in batch.values()) < SHARED:
            return {name: x.numpy() for name, x in batch.items()}
        places, at = {}, 0
        for name, x in batch.items():
            places[name] = at, x.dtype, x.shape
            at += -(-x.nbytes // ALIGNED) * ALIGNED
        if slot is None or at > self._size:
            return batch
        for name, x in batch.items():
            _field(self._memory[slot], *places[name]).copy_(x)
        return places

    def take(self, sent: tuple) -> object:
        """What a worker has read, as tensors. Its slot is free when the last of them, and of their views, is gone."""
        slot, got = sent
        if isinstance(got, DtlibError) or not any(isinstance(x, tuple) for x in got[0].values()):
            if slot is not None:
                self._free.append(slot)
            if isinstance(got, DtlibError):
                return got
            return {name: torch.as_tensor(values) for name, values in got[0].items()}, got[1]
        array = self._memory[slot].numpy()
        weakref.finalize(array, self._free.append, slot).atexit = False
        memory = torch.from_numpy(array)  # its storage holds the array, and so do all views
        return {name: _field(memory, *place) for name, place in got[0].items()}, got[1]


class HandedOver(Dataset):
    """In a worker: batches as ``Slots.put`` sends them, each beside its slot."""

    def __init__(self, batches: Dataset, slots: Slots):
        self.batches, self.slots = batches, slots

    def __getitem__(self, item: tuple) -> object:
        step, slot = item
        got = self.batches[step]
        return slot, got if isinstance(got, DtlibError) else (self.slots.put(got[0], slot), got[1])


def _field(memory: torch.Tensor, at: int, dtype: torch.dtype, shape) -> torch.Tensor:
    return memory[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
