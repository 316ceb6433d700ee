"""What an answer holds: the tensors that live, counted from their storages, wherever they are kept.

An object that hides a tensor in a global name, a closure or on a function still holds it, so nobody is asked: the
garbage collector knows every tensor of this process.
"""

import gc


class Snapshot:
    """``with Snapshot() as before:`` the tensors of this process as they are; ``before.new()`` tells what came later.

    Meanwhile what was there before is frozen: the collector looks at nothing but what is new, which is fast. Where
    somebody else has frozen objects it is not, as they could not be told apart afterwards.
    """

    def __enter__(self) -> "Snapshot":
        gc.collect()  # what nobody holds any more is not what was there before
        self._tensors = _tensors()
        # Storages are kept until the end: the address of one that is freed could be given to a new one.
        self._before = {_key(tensor): tensor.untyped_storage() for tensor in self._tensors}
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._freezes = gc.get_freeze_count() == 0
        if self._freezes:
            gc.freeze()
        return self

    def __exit__(self, *problem) -> None:
        if self._freezes:
            gc.unfreeze()

    def new(self, also=()) -> list:
        """A flat tensor for each storage that came or was written to since, and for those of the tensors ``also``."""
        import torch

        gc.collect()  # what is held by nothing but a circle is not held
        changed = [t for t, version in zip(self._tensors, self._versions, strict=True) if _version(t) > version]
        wanted = {_key(tensor) for tensor in [*also, *changed]}
        found = {}
        for tensor in _with_gradients([*_tensors(), *self._tensors, *also]):
            if _key(tensor) in wanted or _key(tensor) not in self._before:
                found[_key(tensor)] = tensor
        return [torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for t in found.values()]


def _tensors() -> list:
    import torch

    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return _with_gradients([tensor for tensor in tensors if _has_storage(tensor)])


def _with_gradients(tensors) -> list:
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return tensors + [gradient for gradient in gradients if _has_storage(gradient)]


def _has_storage(tensor) -> bool:
    """Not so sparse ones, and those on other devices are not counted."""
    import torch

    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def _key(tensor) -> int:
    return tensor.untyped_storage()._cdata


def _version(tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def beside(storages, known) -> list:
    """What of these flat tensors is none of the values ``known``, for each of them that has such elements."""
    import torch

    rest = [s[~torch.isin(s, known)] if s.dtype == known.dtype else s for s in storages]
    return [storage for storage in rest if storage.numel()]


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)
