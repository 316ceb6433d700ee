"""The order of samples in an epoch, and each rank's slice of it: pure functions, so every process computes the same.

    order       5 0 7 2 | 6 1 4 3 | 9 8      of all samples; depends on seed and epoch, not on ranks or workers
    step        0         1         2        each step takes ranks * batch_size samples from the front
    rank 0      5 0       6 1       9
    rank 1      7 2       4 3       8

The consumed samples are the front of the order, so *one number is the position in an epoch*. Any number of ranks, with
any number of workers, can continue from it.
"""

import numpy as np


def order(samples: int, seed: int, epoch: int, block: int = 1, window: int = 1) -> np.ndarray:
    """Return the numbers of all samples in the order of this epoch, int64.

    A block is ``block`` consecutive samples, which are adjacent in a file and are read together. First the blocks are
    shuffled, then the samples inside each group of ``window`` successive blocks. With ``block=1`` it is one shuffle of
    all samples.
    """
    blocks = -(-samples // block)
    shuffled = _shuffled(np.arange(blocks), seed, epoch, 0)
    if block == 1:
        return shuffled
    numbers = (shuffled[:, None] * block + np.arange(block)).reshape(blocks * block)
    windows = range(0, len(numbers), window * block)
    mixed = [_shuffled(numbers[at : at + window * block], seed, epoch, 1 + at) for at in windows]
    numbers = np.concatenate(mixed) if mixed else numbers
    return numbers[numbers < samples]  # the last block may be shorter


def _shuffled(numbers: np.ndarray, *key: int) -> np.ndarray:
    # numpy guarantees the raw bits of a generator across versions, but not the result of its ``shuffle``. So sort by
    # random keys.
    keys = np.random.PCG64(np.random.SeedSequence(key)).random_raw(len(numbers))
    return numbers[np.argsort(keys, kind="stable")]


def slice_of_rank(order: np.ndarray, taken: int, batch_size: int, rank: int, ranks: int) -> np.ndarray:
    """Return this rank's batch of the next step, after all ranks together have taken ``taken`` samples.

    The last samples of an epoch are divided evenly. Then batches are shorter, and those of the last ranks may be empty.
    """
    step = order[taken : taken + batch_size * ranks]
    each, more = divmod(len(step), ranks)  # the first ``more`` ranks get one more
    first = rank * each + min(rank, more)
    return step[first : first + each + (rank < more)]
