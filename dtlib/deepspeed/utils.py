"""``from dtlib.deepspeed.utils import RepeatingLoader``."""

from collections.abc import Iterable, Iterator


class RepeatingLoader:
    """An endless iterator over a loader, which restarts the loader at its end.

    Counterpart: ``deepspeed.utils.RepeatingLoader``.
    """

    def __init__(self, loader: Iterable):
        self.loader, self.data_iter = loader, iter(loader)

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
