"""DeepSpeed's names: ``from dtlib.utils import RepeatingLoader``."""

import logging
from collections.abc import Iterable, Iterator

logger = logging.getLogger("dtlib")


class RepeatingLoader:
    """An iterator without end over a loader: it begins anew where that ends. Counterpart:
    ``deepspeed.utils.RepeatingLoader``."""

    def __init__(self, loader: Iterable):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks alone, or on all where there is a -1; without ``ranks`` on rank 0."""
    from dtlib.world import init

    rank = init().rank
    if rank in (ranks or [0]) or -1 in (ranks or []):
        logger.log(level, "[Rank %d] %s", rank, message)
