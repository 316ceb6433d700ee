"""Counting of memory: tensors are views of storages, and each byte of a storage is counted once."""

from collections.abc import Iterable, Iterator
from itertools import product

import torch


class Storages:
    """A record of the bytes of storages that are already counted; each byte belongs to the first claim."""

    def __init__(self):
        self._claimed = {}  # storage key -> sorted, disjoint spans of bytes
        self.tensors: dict[int, torch.Tensor] = {}  # storage key -> one of its tensors

    def claim(self, tensors: Iterable[torch.Tensor]) -> int:
        """Claim the bytes of these tensors; return how many were not claimed before."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for tensor in strided(tensors):
            spans.setdefault(storage_key(tensor), []).extend(_spans(tensor))
            self.tensors[storage_key(tensor)] = tensor
        gained = 0
        for key, new in spans.items():
            before = self._claimed.get(key, [])
            self._claimed[key] = _merged(before + new)
            gained += _length(self._claimed[key]) - _length(before)
        return gained

    def rest(self, tensors: Iterable[torch.Tensor]) -> int:
        """Claim all other bytes of these tensors' storages; return how many were not claimed before."""
        gained = 0
        for key, storage in {storage_key(tensor): tensor.untyped_storage() for tensor in strided(tensors)}.items():
            gained += storage.nbytes() - _length(self._claimed.get(key, []))
            self._claimed[key] = [(0, storage.nbytes())]
        return gained


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of the tensor's storage. It is not the address, which changes when a storage is resized."""
    return _local(tensor).untyped_storage()._cdata


def _local(tensor):
    """Return this rank's part of a DTensor, otherwise the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def strided(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that have memory: indices and values of a sparse tensor; nothing for a meta tensor."""
    for tensor in map(_local, tensors):
        if tensor.layout == torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        elif not tensor.is_meta:
            yield tensor


def _spans(tensor) -> list[tuple[int, int]]:
    """Return the spans of bytes that a tensor has in its storage: one if it is dense, else one per contiguous run."""
    if not tensor.numel():
        return []
    # ``run`` is the length of a contiguous run of elements. The other dimensions repeat it with their strides.
    run, outer = 1, []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= run:
            run += stride * (size - 1)
        elif size > 1:
            outer.append(range(0, stride * size, stride))
    starts = (tensor.storage_offset() + sum(offsets) for offsets in product(*outer))
    end = tensor.untyped_storage().nbytes()
    return [(min(at * tensor.itemsize, end), min((at + run) * tensor.itemsize, end)) for at in starts]


def _merged(spans) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _length(spans) -> int:
    return sum(stop - start for start, stop in spans)
