"""Shared memory in which workers pass large batches to the loop. It is reused when a batch is no longer referenced.

New shared memory costs more time than reading into it: 6 ms for 8 MiB, mostly for page faults, against 1 ms for memory
that was used before. So all slots are allocated before the workers start. Each step that is sent to a worker names a
free slot.
"""

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import Dataset

from dtlib.errors import DtlibError

SHARED = 2**20  # the smallest batch, in bytes, that uses a slot; smaller batches are sent through the worker's pipe
ALIGNED = 64  # each field begins at a multiple of this many bytes


class Slots:
    """``count`` pieces of shared memory, each for a batch of ``samples`` samples of ``sample_bytes`` bytes."""

    def __init__(self, count: int, samples: int, sample_bytes: int):
        self._size = samples * sample_bytes + 64 * ALIGNED  # the second term is for the alignment of up to 64 fields
        wanted = count if samples * sample_bytes >= SHARED else 0
        self._memory = [torch.empty(self._size, dtype=torch.uint8).share_memory_() for _ in range(wanted)]
        self._free = list(range(wanted))

    def with_slots(self, steps: Iterable) -> Iterator[tuple]:
        """Yield each step with a free slot for its batch, or with None if all slots are in use."""
        for step in steps:
            yield step, self._free.pop() if self._free else None

    def put(self, batch: dict, slot: int | None) -> dict:
        """Copy a batch into ``slot``; return the place of each field in it. Workers call it, and send the result.

        A small batch is returned as numpy arrays. A batch that fits in no slot is returned as it is.
        """
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
        """Return the batch that a worker has sent, as tensors, or its error.

        The slot becomes free when the last of these tensors and their views is freed.
        """
        slot, got = sent
        if isinstance(got, DtlibError) or not any(isinstance(x, tuple) for x in got[0].values()):
            if slot is not None:
                self._free.append(slot)
            if isinstance(got, DtlibError):
                return got
            return {name: torch.as_tensor(values) for name, values in got[0].items()}, got[1]
        array = self._memory[slot].numpy()
        # The storage of ``memory``, which all views share, refers to the array. When the last view is freed, the array
        # is freed, and the finalizer frees the slot.
        weakref.finalize(array, self._free.append, slot).atexit = False
        memory = torch.from_numpy(array)
        return {name: _field(memory, *place) for name, place in got[0].items()}, got[1]


class SlotDataset(Dataset):
    """A data set, used in workers, that reads batches and puts them into slots."""

    def __init__(self, batches: Dataset, slots: Slots):
        self.batches, self.slots = batches, slots

    def __getitem__(self, item: tuple) -> object:
        step, slot = item
        got = self.batches[step]
        return slot, got if isinstance(got, DtlibError) else (self.slots.put(got[0], slot), got[1])


def _field(memory: torch.Tensor, at: int, dtype: torch.dtype, shape) -> torch.Tensor:
    return memory[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
