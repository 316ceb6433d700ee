"""Load this rank's batches of ``training_data``, with the loader of ``dtlib.storage``, also from torch's data sets.

DeepSpeed's own loader repeats the order of the first epoch, so its losses differ from ours from the second epoch on.
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
    """An iterable over this rank's batches; each pass is one epoch, in a new order.

    ``dataset`` is a reader of ``dtlib.storage`` or a torch ``Dataset``. A reader is read in its own order, and its
    batches are tuples of its fields. A ``Dataset`` is read in the order of torch's ``DistributedSampler``. Every rank
    gets the same number of batches: the remaining samples are dropped, because a rank with one more batch would wait
    for the others. A pass that is left early counts as a complete epoch. The loader does not use torch's global random
    generator.

    Raises:
        DtlibError: for a data set without a length, or with fewer samples than one batch for each rank.
    """

    def __init__(self, dataset: AnyData, batch_size: int, rank: int, ranks: int, seed: int = 0,
                 collate_fn: Callable | None = None):  # fmt: skip
        # Samples in one batch of every rank.
        global_batch = batch_size * ranks
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise DtlibError(
                f"training_data is a {type(dataset).__name__}, but samples are divided by their indices: pass a data "
                "set with __len__ and __getitem__, or create batches yourself."
            )
        if len(dataset) < global_batch:
            raise DtlibError(
                f"training_data has {len(dataset)} samples, but {ranks} ranks need {global_batch} per step: use more, "
                "or a smaller train_micro_batch_size_per_gpu."
            )
        reader = dataset if isinstance(dataset, Source) else _Items(dataset, collate_fn)
        self._stored, self._fresh = reader is dataset, True
        self._collate = collate_fn or _fields if self._stored else _as_it_is
        super().__init__(reader, batch_size, rank, ranks, seed=seed, prefetch=0, drop_last=True)

    def __iter__(self) -> Iterator:
        # The previous pass was left early: start the next epoch.
        if not self._fresh and self._taken < self._end:
            self._epoch, self._taken = self._epoch + 1, 0
        self._fresh = False
        yield from map(self._collate, super().__iter__())

    def load_state_dict(self, state: dict | list[dict]) -> None:
        """Set the position in the data; the next pass continues from there."""
        super().load_state_dict(state)
        self._fresh = True

    def forever(self) -> Iterator:
        """Yield batches without end, epoch after epoch."""
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
    """A reader over a torch ``Dataset``."""

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
