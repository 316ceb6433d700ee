"""Batches for this rank: a share of the data set, reshuffled for every epoch, alike on all ranks."""

from torch.utils.data import DataLoader, DistributedSampler


class RankLoader:
    """A ``DataLoader`` of this rank's share; each pass over it is another epoch, in another order.

    ``epoch`` counts the passes begun; set it to go on where a run was left. Every rank gets the same number of batches:
    what is left over is dropped, as a rank with a batch more would wait for the others.
    """

    def __init__(
        self, dataset, batch_size: int, rank: int, ranks: int, seed: int = 0, collate_fn=None, workers: int = 0
    ):
        self.sampler = DistributedSampler(dataset, ranks, rank, shuffle=True, seed=seed, drop_last=True)
        self.epoch = 0
        self._together = batch_size * ranks  # samples that all ranks take with one batch each
        self._taken = 0  # batches of the pass under way
        self._loader = DataLoader(
            dataset, batch_size, sampler=self.sampler, drop_last=True, collate_fn=collate_fn, num_workers=workers
        )

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        skipped, self._taken = self._taken, 0
        for batch in self._loader:
            self._taken += 1
            if self._taken > skipped:
                yield batch
        self._taken = 0

    def state_dict(self) -> dict:
        """Where it is: passes begun, and samples that all ranks together have taken of the one under way."""
        return {"epoch": self.epoch, "samples": self._taken * self._together}

    def load_state_dict(self, state: dict) -> None:
        """Go on there: the next pass begins behind those samples, also on another number of ranks, to a batch."""
        self.epoch = state["epoch"] - (state["samples"] > 0)
        self._taken = state["samples"] // self._together

    def forever(self):
        """Batches without end, epoch after epoch."""
        while True:
            yield from self
