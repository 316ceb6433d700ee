"""Memory claimed byte by byte: tensors are views of storages, and a byte counts once, for whoever claims it first."""

from collections.abc import Iterable, Iterator
from itertools import product

import torch


class Storages:
    """Bytes of storages, each counted once: for whoever claims it first."""

    def __init__(self):
        self._claimed = {}  # by storage: disjoint spans of bytes, in order
        self.tensors: dict[int, torch.Tensor] = {}  # one of each storage

    def claim(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of these tensors that nobody has claimed."""
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
        """Bytes around these tensors, in the same storages, that nobody has claimed."""
        gained = 0
        for key, storage in {storage_key(tensor): tensor.untyped_storage() for tensor in strided(tensors)}.items():
            gained += storage.nbytes() - _length(self._claimed.get(key, []))
            self._claimed[key] = [(0, storage.nbytes())]
        return gained


def storage_key(tensor: torch.Tensor) -> int:
    """Which storage it is. Its address will not do: it changes when a storage is resized."""
    return _local(tensor).untyped_storage()._cdata


def _local(tensor):
    """This rank's shard of what torch has sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def strided(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that have memory: of a sparse one its indices and values, of one on the meta device none."""
    for tensor in map(_local, tensors):
        if tensor.layout == torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        elif not tensor.is_meta:
            yield tensor


def _spans(tensor) -> list[tuple[int, int]]:
    """The bytes of its storage that a tensor has: one span where it is dense, else one for each run of elements."""
    if not tensor.numel():
        return []
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
