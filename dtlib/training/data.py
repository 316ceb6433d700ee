"""Batches for this rank: a slice of the data set, reshuffled for every epoch, alike on all ranks.

DeepSpeed's own loader keeps the order of the first epoch, so from the second one on its losses are others.
"""

from itertools import islice

import torch
from torch.utils.data import DataLoader, DistributedSampler

from dtlib.errors import DtlibError


class RankLoader:
    """A ``DataLoader`` of this rank's slice; each pass over it is another epoch, in another order.

    ``epoch`` counts the passes begun; set it to go on where a run was left. Every rank gets the same number of batches:
    what is left over is dropped, as a rank with a batch more would wait for the others. A pass that was left early is
    over. It draws no numbers from torch's own generator.

    Raises:
        DtlibError: for a data set without a length, or with less than a batch for each rank.
    """

    def __init__(
        self, dataset, batch_size: int, rank: int, ranks: int, seed: int = 0, collate_fn=None, workers: int = 0
    ):
        together = batch_size * ranks  # samples that all ranks take with one batch each
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DtlibError(
                f"training_data is a {type(dataset).__name__}, and samples are shared out by their numbers: give a "
                "data set with __len__ and __getitem__, or make batches yourself."
            )
        if len(dataset) < together:
            raise DtlibError(
                f"training_data has {len(dataset)} samples, and {ranks} ranks take {together} at a time: give more, or "
                "a smaller train_micro_batch_size_per_gpu."
            )
        self.sampler = _Sampler(dataset, ranks, rank, shuffle=True, seed=seed, drop_last=True)
        self.epoch = 0
        self._batch_size, self._together = batch_size, together
        self._taken = 0  # batches of the pass under way
        self._behind = 0  # samples of the next pass that all ranks took before a checkpoint
        self._loader = DataLoader(
            dataset, batch_size, sampler=self.sampler, drop_last=True, collate_fn=collate_fn, num_workers=workers,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        self._taken, self._behind = self._behind // self._together, 0
        self.sampler.start = self._taken * self._batch_size
        for batch in self._loader:
            self._taken += 1
            yield batch
        self._taken = 0

    def state_dict(self) -> dict:
        """Where it is: passes begun, and samples that all ranks together have taken of the one under way."""
        samples = self._behind or self._taken * self._together
        return {"epoch": self.epoch + (self._behind > 0), "samples": samples}

    def load_state_dict(self, state: dict) -> None:
        """Go on there: the next pass begins behind those samples, also on another number of ranks, to a batch."""
        self._behind, self._taken = state["samples"], 0
        self.epoch = state["epoch"] - (self._behind > 0)

    def forever(self):
        """Batches without end, epoch after epoch."""
        while True:
            yield from self


class _Sampler(DistributedSampler):
    """The numbers of this rank's samples, from ``start`` on."""

    start = 0

    def __iter__(self):
        return islice(super().__iter__(), self.start, None)
