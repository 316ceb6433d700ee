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
        self._loader = DataLoader(
            dataset, batch_size, sampler=self.sampler, drop_last=True, collate_fn=collate_fn, num_workers=workers
        )

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self._loader)

    def forever(self):
        """Batches without end, epoch after epoch."""
        while True:
            yield from self
