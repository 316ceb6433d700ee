"""Memory of activations: the storages that autograd saves for the backward pass."""

import torch

from dtlib.measure.storages import storage_key


class Activations:
    """A context manager that counts the storages that autograd saves, each once.

    ``now`` is their size in bytes, and ``most`` is the largest size so far. ``others`` are keys of storages that are
    not activations, such as parameters. Inside the block autograd does not detect in-place changes of saved tensors.
    """

    def __init__(self):
        self.others = set()
        self.now = self.most = 0  # bytes
        self._kept = {}  # storage key -> how many saved tensors use it
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> "Activations":
        self._hooks.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self._hooks.__exit__(*problem)

    def _pack(self, tensor):
        key = storage_key(tensor)
        if key in self.others:
            return tensor
        if key not in self._kept:
            self._kept[key] = 0
            self.now += tensor.untyped_storage().nbytes()
            self.most = max(self.most, self.now)
        self._kept[key] += 1
        return _Kept(tensor, self)

    def release(self, tensor: torch.Tensor) -> None:
        """Record that autograd has freed a saved tensor."""
        key = storage_key(tensor)
        self._kept[key] -= 1
        if not self._kept[key]:
            del self._kept[key]
            self.now -= tensor.untyped_storage().nbytes()


class _Kept:
    """A saved tensor. When autograd frees it, this object's destructor updates the count."""

    def __init__(self, tensor, activations: Activations):
        self.tensor, self._activations = tensor, activations

    def __del__(self):
        self._activations.release(self.tensor)


def _unpack(kept):
    return kept.tensor if isinstance(kept, _Kept) else kept
