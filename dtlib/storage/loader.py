"""Batches for a rank: workers, prefetch, and resuming in the middle of an epoch.

    loader = Loader(open_samples(folder), batch_size=32, rank=world.rank, ranks=world.size, workers=2)
    for batch in loader:                     # an epoch; the next loop is the next one, in another order
        ...
        state = loader.state_dict()          # {"epoch": 0, "samples": 640, ...}

    loader.load_state_dict(state)            # here, or on any other number of ranks and workers

All ranks take their batches off the front of one order (``order.py``), so where they are is one number: the samples
that all of them have taken. Workers and threads read ahead, but a batch counts from when the loop has got it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from dtlib.errors import DtlibError, number
from dtlib.storage.files import MOST_PROCESSES
from dtlib.storage.order import order, slice_of_rank
from dtlib.storage.slots import HandedOver, Slots


@runtime_checkable
class Source(Protocol):
    """Samples by their numbers (readers.py), and in which order they are best read (order.py)."""

    block: int
    window: int

    def __len__(self) -> int: ...
    def read(self, numbers: Sequence[int]) -> tuple[dict[str, torch.Tensor], list]: ...


class Loader:
    """An epoch of this rank's batches, each a dict of tensors; every rank gets the same number of batches.

    Each sample comes exactly once an epoch, on whatever rank. Where samples run out the last batches are shorter, or
    empty (weigh by their length), unless ``drop_last`` leaves out what is less than a batch for every rank. Whoever
    leaves a loop early goes on from there with the next one.

    ``workers``: processes that read; with none, a thread does. ``prefetch``: batches that each of them reads ahead; 0
    with no workers: a batch is read when it is asked for. ``block`` and ``window``: how the order is shuffled, if
    otherwise than the reader is best read; ``shuffle=False``: not at all.

    What a reader with ``damaged="skip"`` leaves out is in ``skipped``, a list of errors.

    Raises:
        DtlibError: for numbers that make no sense.
        StorageError: for a sample that cannot be read, in the loop; it goes on behind that batch.
    """

    def __init__(
        self, reader: Source, batch_size: int, rank: int = 0, ranks: int = 1, *, seed: int = 0, workers: int = 0,
        prefetch: int = 2, shuffle: bool = True, drop_last: bool = False, block: int | None = None,
        window: int | None = None,
    ):  # fmt: skip
        sizes = {"batch_size": batch_size, "ranks": ranks, "block": block or 1, "window": window or 1}
        for name, size in sizes.items():
            number(name, size)
        number("rank", rank, 0, ranks - 1)
        number("seed", seed, 0)
        number("workers", workers, 0, MOST_PROCESSES - 1)
        number("prefetch", prefetch, bool(workers))
        if drop_last and len(reader) < batch_size * ranks:
            raise DtlibError(
                f"{len(reader)} samples are fewer than {ranks} batches of {batch_size}, so drop_last would drop all "
                "of them: pass a smaller batch_size."
            )
        self.reader, self.batch_size, self.rank, self.ranks = reader, batch_size, rank, ranks
        self.workers, self.prefetch, self.drop_last = workers, prefetch, drop_last
        self.skipped: list[Exception] = []
        self._epoch, self._taken = 0, 0  # samples that all ranks have taken
        self._begin = 0  # of them, before the first step of this size
        self._order = {
            "seed": seed, "shuffle": shuffle, "block": block or reader.block, "window": window or reader.window,
        }  # fmt: skip

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        rest = 0 if self.drop_last else self.batch_size * self.ranks - 1
        return (len(self.reader) + rest) // (self.batch_size * self.ranks)

    @property
    def epoch(self) -> int:
        return self._position()[0]

    @property
    def _end(self) -> int:
        """How many samples of this epoch are taken."""
        together, rest = self.batch_size * self.ranks, len(self.reader) - self._begin
        return self._begin + rest // together * together if self.drop_last else len(self.reader)

    def _position(self) -> tuple[int, int]:
        return (self._epoch, self._taken) if self._taken < self._end else (self._epoch + 1, 0)

    def state_dict(self) -> dict:
        """Where the loop is, for all ranks: whichever rank saves it, after as many batches as the others."""
        epoch, taken = self._position()
        return {"epoch": epoch, "samples": taken, "of": len(self.reader), **self._order}

    def load_state_dict(self, state: dict | list[dict]) -> None:
        """Go on from there. Of a list, the states of several ranks, all have to be the same.

        Raises:
            DtlibError: for a state of other samples or another order, or of ranks that were not in step.
        """
        states = state if isinstance(state, list) else [state]
        if different := [one for one in states if one != states[0]]:
            raise DtlibError(
                f"One rank had taken {states[0]['samples']} samples of epoch {states[0]['epoch']}, another "
                f"{different[0]['samples']} of epoch {different[0]['epoch']}: save after the same number of batches."
            )
        for name, ours in {"of": len(self.reader), **self._order}.items():
            if states[0].get(name) != ours:
                raise DtlibError(
                    f"The state has {name}={states[0].get(name)} and this loader {ours}, so that its order is another "
                    "one and samples would come twice, or not at all: make the loader alike."
                )
        self._epoch = int(number("epoch", states[0].get("epoch"), 0))
        self._taken = int(number("samples", states[0].get("samples"), 0, len(self.reader)))
        self._begin = self._taken

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._epoch, self._taken = self._position()
        self._begin = min(self._begin, self._taken)
        numbers = self._numbers() if self._order["shuffle"] else np.arange(len(self.reader))
        together = self.batch_size * self.ranks
        firsts = range(self._taken, self._end, together)
        batches = self._read(self._steps(numbers, firsts))
        for first, got in zip(firsts, batches, strict=True):
            if isinstance(got, DtlibError):
                try:
                    raise got
                finally:  # the error holds this frame: without each other's hold, workers hear at once that they end
                    del got, batches
            self._taken = min(first + together, self._end)  # a batch that failed is read again
            batch, skipped = got
            self.skipped += skipped
            yield batch

    def _numbers(self) -> np.ndarray:
        """The order of this epoch."""
        return order(len(self.reader), self._order["seed"], self._epoch, self._order["block"], self._order["window"])

    def _slice(self, numbers, first: int):
        """This rank's samples of the step that begins there."""
        return slice_of_rank(numbers, first, self.batch_size, self.rank, self.ranks)

    def _steps(self, numbers, firsts):
        """For each step the numbers that this rank reads, and those that the system may read ahead.

        Pieces that lie together are announced together, with the first batch that needs some of them.
        """
        piece = self._order["block"] * self._order["window"]
        announced = self._taken // piece * piece
        for first in firsts:
            ahead = first + self.batch_size * self.ranks if self._order["block"] > 1 else 0
            until = max(announced, -(-ahead // piece) * piece)
            yield self._slice(numbers, first).tolist(), numbers[announced:until]
            announced = until

    def _read(self, steps):
        """(batch, what was skipped) for each step, or the error; by workers, by a thread, or when asked for."""
        source = _Batches(self.reader)
        if self.workers:
            # One slot for each batch that is read ahead, one for the loop's, and one for that which it gets next.
            ahead, sample_bytes = self.workers * self.prefetch, getattr(self.reader, "sample_bytes", 0)
            slots = Slots(ahead + 2, self.batch_size, sample_bytes)
            read_by_workers = DataLoader(
                HandedOver(source, slots), batch_size=None, sampler=slots.with_slots(steps),
                num_workers=self.workers, prefetch_factor=self.prefetch, collate_fn=_as_it_is,
            )  # fmt: skip
            return map(slots.take, _of_living(read_by_workers))
        return _in_thread(source.__getitem__, steps, self.prefetch)


class _Batches(Dataset):
    """A batch for each step; an error is returned, as one that is raised in a worker arrives as a page of text."""

    def __init__(self, reader):
        self.reader = reader

    def __getitem__(self, step):
        numbers, announced = step
        try:
            if len(announced):
                self.reader.will_need(announced)
            return self.reader.read(numbers)
        except DtlibError as error:
            return error


def _as_it_is(batch):
    return batch


def _of_living(workers):
    """What they read; an error of ours where one of them has ended."""
    try:
        yield from workers
    except RuntimeError as problem:
        why = str(problem).splitlines()[0]
        raise DtlibError(f"A worker of the loader has ended ({why}): try fewer workers, or smaller batches.") from None


def _in_thread(read, steps, ahead: int):
    """Each batch, while a thread reads the next ones: the system's calls leave Python's lock to the loop."""
    if not ahead:
        yield from map(read, steps)
        return
    thread = ThreadPoolExecutor(1)
    try:
        reading: deque[Future] = deque()
        for step in steps:
            reading.append(thread.submit(read, step))
            if len(reading) > ahead:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
