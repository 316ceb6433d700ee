"""Flat buffers, shards and buckets: many tensors in contiguous memory, sent as a few large messages.

parameters   w1 (3, 2)      b1 (3,)   w2 (1, 3)
flat         [w1 w1 w1 w1 w1 w1 b1 b1 b1 w2 w2 w2 | extra]
              \\--- view ---/  ...

With sharding, the same buffer is cut into equal shards, one per rank. A cut may be in the middle of a parameter:

flat         [w1 w1 w1 w1 w1 w1 b1 | b1 b1 w2 w2 w2 .. ]     .. padding, at the end of the last shard
rank 0        w1[0:6], b1[0:1]       rank 1: b1[1:3], w2[0:3]
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

MEBIBYTE = 2**20
LARGEST_BUCKET = 25 * MEBIBYTE  # as in torch's DistributedDataParallel
FIRST_BUCKET = MEBIBYTE  # as in torch: the first bucket is small, so that communication begins early
# The smallest default bucket of data parallelism: launching smaller ones costs more time than their overlap saves.
LEAST_BUCKET = 4 * MEBIBYTE


class FlatBuffer:
    """A one-dimensional tensor ``flat``, and ``views``: consecutive parts of it with the given ``shapes``.

    ``tail`` is the last ``extra`` elements, which belong to no view. They are padding, or numbers that are sent with
    the tensors. The buffer contains zeros; with ``zeroed=False`` it is not initialised.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, device: torch.device | str = "cpu",
                 extra: int = 0, zeroed: bool = True):  # fmt: skip
        sizes = [math.prod(shape) for shape in shapes]
        self.numel = sum(sizes)
        self.flat = (torch.zeros if zeroed else torch.empty)(self.numel + extra, dtype=dtype, device=device)
        self.tail = self.flat[self.numel :]
        pieces = self.flat[: self.numel].split(sizes)
        self.views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@dataclass(frozen=True)
class Slice:
    """One rank's part of a tensor of this ``shape``: elements ``start`` to ``stop`` of the flattened tensor.

    ``stop`` is excluded. The part is empty if ``start == stop``.
    """

    shape: tuple[int, ...]
    start: int
    stop: int


class Shards:
    """The layout of tensors of these ``shapes`` in a flat buffer that is cut into ``ranks`` equal shards.

    ``length`` is the number of elements per shard. ``padding`` is the number of elements at the end of the last shard
    that belong to no tensor. ``slices`` has the part of each tensor that is in the shard of rank ``rank``.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], rank: int, ranks: int):
        self.shapes = [tuple(shape) for shape in shapes]
        self.rank, self.ranks = rank, ranks
        sizes = [math.prod(shape) for shape in self.shapes]
        self.length = -(-sum(sizes) // ranks)
        self.padding = self.length * ranks - sum(sizes)
        # ``offset`` is the position of a tensor's first element, relative to the start of this rank's shard.
        self.slices, offset = [], -rank * self.length
        for shape, size in zip(self.shapes, sizes, strict=True):
            start, stop = (min(max(edge - offset, 0), size) for edge in (0, self.length))
            self.slices.append(Slice(shape, start, stop))
            offset += size

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a flat tensor, as a view."""
        return flat[self.rank * self.length : (self.rank + 1) * self.length]

    def views(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of each tensor as a one-dimensional view of its shard ``own``, perhaps empty."""
        sizes = [slice_.stop - slice_.start for slice_ in self.slices]
        return list(own[: sum(sizes)].split(sizes))


def bucket_bytes(tensors: Iterable[torch.Tensor], cap_mb: float | None, least: int = 0) -> int:
    """Return the largest size of a bucket in bytes: ``cap_mb`` MiB if it is set.

    By default it is the size of the largest tensor, but at least ``least`` and at most ``LARGEST_BUCKET``. The gradient
    of the largest tensor needs that much memory anyway.
    """
    if cap_mb is not None:
        return int(cap_mb * MEBIBYTE)
    return min(LARGEST_BUCKET, max([least, *(tensor.nbytes for tensor in tensors)]))


def buckets_of(
    tensors: Iterable[torch.Tensor], cap: int, first_cap: int = FIRST_BUCKET, alone_from: float = math.inf
) -> list[list[int]]:
    """Group ``tensors`` into buckets of at most ``cap`` bytes; return the indices of the tensors in each bucket.

    Tensors keep their order, and a bucket has one dtype and one device. The first bucket has at most ``first_cap``
    bytes. A tensor larger than the cap gets a separate bucket. A tensor of at least ``alone_from`` bytes also gets one,
    and the next tensors are added to the bucket that was open before it. Buckets are sorted by their last tensor.

    Counterpart: the buckets of torch's ``DistributedDataParallel`` (S. Li et al., VLDB 13(12), 2020, section 3.2.3).
    """
    buckets: list[list[int]] = []
    of_kind: dict[tuple, tuple] = {}  # (dtype, device) -> the open bucket, and its size in bytes
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        bucket, filled = of_kind.get(kind, (None, 0))
        if tensor.nbytes >= alone_from:
            buckets.append([index])
            continue
        limit = first_cap if buckets and bucket is buckets[0] else cap
        if bucket is None or filled + tensor.nbytes > limit:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        of_kind[kind] = bucket, filled + tensor.nbytes
    # A bucket can be launched when its last tensor is ready, so that is the order of the launches.
    return sorted(buckets, key=max)
