"""Many tensors in one contiguous memory: a few large messages instead of many small ones.

parameters   w1 (3, 2)      b1 (3,)   w2 (1, 3)
flat         [w1 w1 w1 w1 w1 w1 b1 b1 b1 w2 w2 w2 | extra]
              \\--- view ---/  ...

Sharded, the same memory is cut into equal shards, one a rank, wherever the parameters begin and end:

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
LEAST_BUCKET = 4 * MEBIBYTE  # of data parallelism: more and smaller buckets cost more than they hide


class FlatBuffer:
    """One tensor (``flat``) and a view of it for each of ``shapes`` (``views``), one after the other.

    ``extra`` elements at the end belong to no view: room for numbers that travel along, or padding (``tail``). All is
    zero, unless ``zeroed`` is false: then the caller writes each view and the tail.
    """

    def __init__(
        self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, device: torch.device | str = "cpu", extra: int = 0,
        zeroed: bool = True,
    ):  # fmt: skip
        sizes = [math.prod(shape) for shape in shapes]
        self.numel = sum(sizes)
        self.flat = (torch.zeros if zeroed else torch.empty)(self.numel + extra, dtype=dtype, device=device)
        self.tail = self.flat[self.numel :]
        pieces = self.flat[: self.numel].split(sizes)
        self.views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@dataclass(frozen=True)
class Slice:
    """What one rank has of a tensor of this ``shape``: elements ``start`` to ``stop`` of it, flattened; maybe none."""

    shape: tuple[int, ...]
    start: int
    stop: int


class Shards:
    """How tensors of these ``shapes``, one after the other, are cut into ``ranks`` equal shards.

    ``length`` elements are each rank's, ``padding`` those at the end of the last that belong to no tensor, and
    ``slices`` what rank ``rank`` has of each tensor.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], rank: int, ranks: int):
        self.shapes = [tuple(shape) for shape in shapes]
        self.rank, self.ranks = rank, ranks
        sizes = [math.prod(shape) for shape in self.shapes]
        self.length = -(-sum(sizes) // ranks)
        self.padding = self.length * ranks - sum(sizes)
        self.slices, offset = [], -rank * self.length  # of a tensor's first element, from that of this rank's shard
        for shape, size in zip(self.shapes, sizes, strict=True):
            start, stop = (min(max(edge - offset, 0), size) for edge in (0, self.length))
            self.slices.append(Slice(shape, start, stop))
            offset += size

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a flat tensor."""
        return flat[self.rank * self.length : (self.rank + 1) * self.length]

    def views(self, own: torch.Tensor) -> list[torch.Tensor]:
        """This rank's slice of each tensor, out of its shard ``own``: one-dimensional, and empty where it has none."""
        sizes = [slice_.stop - slice_.start for slice_ in self.slices]
        return list(own[: sum(sizes)].split(sizes))


def bucket_bytes(tensors: Iterable[torch.Tensor], cap_mb: float | None, least: int = 0) -> int:
    """A size of buckets in bytes: ``cap_mb`` MiB, or that of the largest tensor, whose gradient is there at a time
    anyway; from ``least`` to LARGEST_BUCKET."""
    if cap_mb is not None:
        return int(cap_mb * MEBIBYTE)
    return min(LARGEST_BUCKET, max([least, *(tensor.nbytes for tensor in tensors)]))


def buckets_of(
    tensors: Iterable[torch.Tensor], cap: int, first_cap: int = FIRST_BUCKET, alone_from: float = math.inf
) -> list[list[int]]:
    """The indices of ``tensors`` in buckets of at most ``cap`` bytes, the first of at most ``first_cap``.

    Tensors keep their order; a bucket holds one dtype and one device; a tensor larger than the cap has one of its own,
    and so has one of ``alone_from`` bytes, while another bucket goes on to fill. Buckets are in the order in which they
    are full.
    Counterpart: the buckets of torch's ``DistributedDataParallel`` (S. Li et al., VLDB 13(12), 2020, section 3.2.3).
    """
    buckets: list[list[int]] = []
    of_kind: dict[tuple, tuple] = {}  # the bucket that is being filled, by dtype and device, with its bytes
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
    return sorted(buckets, key=max)
