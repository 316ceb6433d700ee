"""The order of an epoch, and who gets what of it: pure functions, the same on every rank and in every process.

    order       5 0 7 2 | 6 1 4 3 | 9 8      of all samples, from (seed, epoch) alone: no rank, no worker
    step        0         1         2        a step takes ranks x batch samples off its front
    rank 0      5 0       6 1       9
    rank 1      7 2       4 3       8

So what has been consumed is the front of the order, and *one number says where an epoch is*. Who goes on from there
may be any number of ranks with any number of workers.
"""

import numpy as np


def order(samples: int, seed: int, epoch: int, block: int = 1, window: int = 1) -> np.ndarray:
    """The numbers of all samples in this epoch's order, int64.

    ``block``: so many successive samples are read together, as they lie in one piece of a file. Blocks are shuffled,
    then the samples of ``window`` blocks that follow one another; with blocks of 1 it is one large shuffle.
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
    # The bits of a generator stay the same in every version of numpy; what its shuffle makes of them may not.
    keys = np.random.PCG64(np.random.SeedSequence(key)).random_raw(len(numbers))
    return numbers[np.argsort(keys, kind="stable")]


def slice_of_rank(order: np.ndarray, taken: int, batch_size: int, rank: int, ranks: int) -> np.ndarray:
    """This rank's batch, where ``taken`` samples are behind all ranks.

    What is left at the end is dealt evenly: batches get shorter, and the last ranks' may be empty.
    """
    step = order[taken : taken + batch_size * ranks]
    each, more = divmod(len(step), ranks)  # the first ``more`` ranks get one more
    first = rank * each + min(rank, more)
    return step[first : first + each + (rank < more)]
