"""The loader: batches for each rank, with workers, prefetch, and exact resume in the middle of an epoch.

    loader = Loader(open_samples(folder), batch_size=32, rank=world.rank, ranks=world.size, workers=2)
    for batch in loader:                     # one epoch; the next loop is the next epoch, in another order
        ...
        state = loader.state_dict()          # {"epoch": 0, "samples": 640, ...}

    loader.load_state_dict(state)            # on any number of ranks and workers

All ranks take their batches from the front of one order (``order.py``). So the position in an epoch is one number: how
many samples all ranks together have taken. Workers and threads read ahead, but a batch counts as taken only when the
loop receives it.
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

SHARED = 2**20  # bytes of the smallest batch that workers pass in shared memory


@runtime_checkable
class Source(Protocol):
    """The interface of a reader (readers.py). ``block`` and ``window`` describe its fastest order (order.py)."""

    block: int
    window: int

    def __len__(self) -> int: ...
    def read(self, numbers: Sequence[int]) -> tuple[dict[str, torch.Tensor], list]:
        """Return a batch of these samples, and an error for each sample that is skipped."""


class Loader:
    """An iterable over this rank's batches of one epoch, each a dict of tensors.

    Every rank gets the same number of batches, and each sample is in exactly one batch per epoch. The last batches may
    be shorter or empty, so weight them by their length. If a loop ends early, the next loop continues at that position.
    ``skipped`` lists the errors of samples that a reader with ``damaged="skip"`` has left out.

    Args:
        reader: the samples.
        batch_size: samples per batch of one rank.
        rank: this rank.
        ranks: the number of ranks.
        seed: of the shuffled order; the same on all ranks.
        workers: the number of processes that read; with 0, a thread reads.
        prefetch: batches that each worker, or the thread, reads ahead. With 0 workers and ``prefetch=0``, a batch is
            read when the loop needs it.
        shuffle: if false, the order is 0, 1, 2, ...
        drop_last: leave out the last samples if they do not fill a batch on every rank.

    Raises:
        DtlibError: for invalid arguments.
        StorageError: in the loop, if a sample cannot be read. A new loop tries the same batch again.
    """

    def __init__(
        self, reader: Source, batch_size: int, rank: int = 0, ranks: int = 1, *, seed: int = 0, workers: int = 0,
        prefetch: int = 2, shuffle: bool = True, drop_last: bool = False,
    ):  # fmt: skip
        number("batch_size", batch_size)
        number("ranks", ranks)
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
        self._epoch, self._taken = 0, 0  # _taken: samples of this epoch that all ranks together have taken
        self._begin = 0  # the value of _taken at which steps of the current size began: 0, or that of a loaded state
        self._order = {"seed": seed, "shuffle": shuffle, "block": reader.block, "window": reader.window}

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        rest = 0 if self.drop_last else self.batch_size * self.ranks - 1
        return (len(self.reader) + rest) // (self.batch_size * self.ranks)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position()[0]

    @property
    def _end(self) -> int:
        """The number of samples that all ranks take in this epoch; with ``drop_last`` perhaps fewer than all."""
        global_batch, rest = self.batch_size * self.ranks, len(self.reader) - self._begin
        return self._begin + rest // global_batch * global_batch if self.drop_last else len(self.reader)

    def _position(self) -> tuple[int, int]:
        return (self._epoch, self._taken) if self._taken < self._end else (self._epoch + 1, 0)

    def state_dict(self) -> dict:
        """Return the position in the epoch. It is the same on all ranks after the same number of batches."""
        epoch, taken = self._position()
        return {"epoch": epoch, "samples": taken, "of": len(self.reader), **self._order}

    def load_state_dict(self, state: dict | list[dict]) -> None:
        """Continue at the position of ``state``, which may be a list of the states of several ranks.

        Raises:
            DtlibError: if the state is of other samples or of another order, or if the states in a list differ.
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
                    f"The state has {name}={states[0].get(name)}, and this loader has {ours}, so samples would "
                    f"come twice, or not at all: make a loader with the state's {name}."
                )
        self._epoch = int(number("epoch", states[0].get("epoch"), 0))
        self._taken = int(number("samples", states[0].get("samples"), 0, len(self.reader)))
        self._begin = self._taken

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._epoch, self._taken = self._position()
        self._begin = min(self._begin, self._taken)
        numbers = self._numbers() if self._order["shuffle"] else np.arange(len(self.reader))
        global_batch = self.batch_size * self.ranks
        firsts = range(self._taken, self._end, global_batch)
        batches = self._read(self._steps(numbers, firsts))
        for first, got in zip(firsts, batches, strict=True):
            if isinstance(got, DtlibError):
                try:
                    raise got
                finally:
                    # The error's traceback refers to this frame. Drop the frame's references to the error and to the
                    # batches, so that the cycle is broken and the workers end at once.
                    del got, batches
            # Only now is the batch taken: if reading it failed, the next loop reads it again.
            self._taken = min(first + global_batch, self._end)
            batch, skipped = got
            self.skipped += skipped
            yield batch

    def _numbers(self) -> np.ndarray:
        """Return the order of this epoch."""
        return order(len(self.reader), self._order["seed"], self._epoch, self._order["block"], self._order["window"])

    def _slice(self, numbers, first: int):
        """Return this rank's samples of the step that begins at position ``first``."""
        return slice_of_rank(numbers, first, self.batch_size, self.rank, self.ranks)

    def _steps(self, numbers, firsts):
        """Yield, for each step, the samples that this rank reads, and samples that the system may read ahead.

        All samples of a window are announced together, with the first batch that needs one of them.
        """
        # With single-sample blocks, the samples of a batch are not adjacent, so nothing is announced.
        piece = self._order["block"] * self._order["window"]
        announced = self._taken // piece * piece
        for first in firsts:
            ahead = first + self.batch_size * self.ranks if self._order["block"] > 1 else 0
            until = max(announced, -(-ahead // piece) * piece)
            yield self._slice(numbers, first).tolist(), numbers[announced:until]
            announced = until

    def _read(self, steps):
        """Return an iterator over (batch, skipped errors), or an error, for each step; by workers or by a thread."""
        source = _Batches(self.reader)
        if self.workers:
            read_by_workers = DataLoader(
                source, batch_size=None, sampler=steps, num_workers=self.workers, prefetch_factor=self.prefetch,
                collate_fn=_sent,
            )  # fmt: skip
            return map(_received, _of_living(read_by_workers))
        return _in_thread(source.__getitem__, steps, self.prefetch)


class _Batches(Dataset):
    """A data set whose items are the batches of steps.

    Errors are returned, not raised: torch would convert an error that a worker raises to a long text.
    """

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


def _sent(got):
    """Return a worker's batch for its way: large ones use torch's shared memory, small ones a pipe, which is faster."""
    if isinstance(got, DtlibError) or sum(x.nbytes for x in got[0].values()) >= SHARED:
        return got
    return {name: x.numpy() for name, x in got[0].items()}, got[1]


def _received(got):
    if isinstance(got, DtlibError):
        return got
    return {name: torch.as_tensor(values) for name, values in got[0].items()}, got[1]


def _of_living(workers):
    """Yield the batches of the workers; convert torch's error about a dead worker to a ``DtlibError``."""
    try:
        yield from workers
    except RuntimeError as problem:
        why = str(problem).splitlines()[0]
        raise DtlibError(f"A worker of the loader has ended ({why}): try fewer workers, or smaller batches.") from None


def _in_thread(read, steps, ahead: int):
    """Yield each batch while a thread reads the next ones. System calls release Python's lock, so the loop can run."""
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
