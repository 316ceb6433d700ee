"""Batches for this rank of ``training_data``: ``dtlib.storage``'s loader, for torch's data sets too.

DeepSpeed's own loader keeps the order of the first epoch, so from the second one on its losses are others.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import TypeAlias

import torch
from torch.utils.data import Dataset, default_collate

from dtlib.errors import DtlibError
from dtlib.storage import Loader
from dtlib.storage.loader import Source

AnyData: TypeAlias = Dataset | Sequence | Source


class RankLoader(Loader):
    """This rank's batches; each pass over it is another epoch, in another order.

    ``dataset``: a reader of ``dtlib.storage``, read in its own order, whose batches are tuples of its fields; or a
    torch ``Dataset``, in the order of torch's ``DistributedSampler``. Every rank gets the same number of batches: what
    is left over is dropped, as a rank with a batch more would wait for the others. A pass that was left early is over.
    It draws no numbers from torch's own generator.

    Raises:
        DtlibError: for a data set without a length, or with less than a batch for each rank.
    """

    def __init__(
        self, dataset: AnyData, batch_size: int, rank: int, ranks: int, seed: int = 0,
        collate_fn: Callable | None = None,
    ):  # fmt: skip
        together = batch_size * ranks  # samples that all ranks take with one batch each
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise DtlibError(
                f"training_data is a {type(dataset).__name__}, but samples are divided by their indices: pass a data "
                "set with __len__ and __getitem__, or create batches yourself."
            )
        if len(dataset) < together:
            raise DtlibError(
                f"training_data has {len(dataset)} samples, and {ranks} ranks take {together} at a time: give more, or "
                "a smaller train_micro_batch_size_per_gpu."
            )
        reader = dataset if isinstance(dataset, Source) else _Items(dataset, collate_fn)
        self._stored, self._fresh = reader is dataset, True
        self._collate = collate_fn or _fields if self._stored else _as_it_is
        super().__init__(reader, batch_size, rank, ranks, seed=seed, prefetch=0, drop_last=True)

    def __iter__(self) -> Iterator:
        if not self._fresh and self._taken < self._end:  # left early
            self._epoch, self._taken = self._epoch + 1, 0
        self._fresh = False
        yield from map(self._collate, super().__iter__())

    def load_state_dict(self, state: dict | list[dict]) -> None:
        super().load_state_dict(state)
        self._fresh = True

    def forever(self) -> Iterator:
        """Batches without end, epoch after epoch."""
        while True:
            yield from self

    def _numbers(self):
        if self._stored:
            return super()._numbers()
        generator = torch.Generator().manual_seed(self._order["seed"] + self._epoch)
        return torch.randperm(len(self.reader), generator=generator).numpy()

    def _slice(self, numbers, first: int):
        if self._stored:
            return super()._slice(numbers, first)
        return numbers[first + self.rank : first + self.batch_size * self.ranks : self.ranks]


class _Items:
    """A torch ``Dataset`` as a reader."""

    block = window = 1

    def __init__(self, dataset, collate_fn):
        self.dataset, self.collate = dataset, collate_fn or default_collate

    def __len__(self):
        return len(self.dataset)

    def read(self, numbers):
        return self.collate([self.dataset[number] for number in numbers]), []


def _fields(batch: dict) -> tuple:
    return tuple(batch.values())


def _as_it_is(batch):
    return batch
