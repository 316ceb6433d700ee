"""Many tensors in one contiguous memory: a few large messages instead of many small ones.

parameters   w1 (3, 2)      b1 (3,)   w2 (1, 3)
flat         [w1 w1 w1 w1 w1 w1 b1 b1 b1 w2 w2 w2 | extra]
              \\--- view ---/  ...
"""

import math

import torch

MEBIBYTE = 2**20
FIRST_BUCKET = MEBIBYTE  # as in torch: the first bucket is small, so that communication begins early


class FlatBuffer:
    """One zeroed tensor (``flat``) and a view of it for each of ``shapes`` (``views``), one after the other.

    ``extra`` elements at the end belong to no view: room for numbers that travel along (``tail``).
    """

    def __init__(self, shapes, dtype: torch.dtype, device="cpu", extra: int = 0):
        sizes = [math.prod(shape) for shape in shapes]
        self.numel = sum(sizes)
        self.flat = torch.zeros(self.numel + extra, dtype=dtype, device=device)
        self.tail = self.flat[self.numel :]
        pieces = self.flat[: self.numel].split(sizes)
        self.views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the views, without the extra elements."""
        return self.numel * self.flat.element_size()


def buckets_of(tensors, cap: int, first_cap: int = FIRST_BUCKET) -> list[list[int]]:
    """The indices of ``tensors`` in buckets of at most ``cap`` bytes, the first of at most ``first_cap``.

    Tensors keep their order; a bucket holds one dtype and one device; a tensor larger than the cap has one of its own.
    Counterpart: the buckets of torch's ``DistributedDataParallel`` (S. Li et al., VLDB 13(12), 2020, section 3.2.3).
    """
    buckets, of_kind = [], {}  # the bucket that is being filled, by dtype and device, with its bytes
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        bucket, filled = of_kind.get(kind, (None, 0))
        limit = first_cap if buckets and bucket is buckets[0] else cap
        if bucket is None or filled + tensor.nbytes > limit:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        of_kind[kind] = bucket, filled + tensor.nbytes
    return buckets
