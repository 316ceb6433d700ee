"""What an answer holds: the tensors that live, counted from their storages, wherever they are kept.

An object that hides a tensor in a global name, a closure or on a function still holds it, so nobody is asked: the
garbage collector knows every tensor of this process. It does not know arrays of numpy, bytes and floats: those are
looked for in the attributes, closures and global names of the answer.
"""

import array
import gc
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace

from dtlib.lab.foreign import Tensor


class Snapshot:
    """``with Snapshot() as before:`` the tensors of this process as they are; ``before.new()`` tells what is new.

    ``Snapshot(answer)`` finds its arrays, bytes and lists of floats as well, and those of the things ``of``.

    Meanwhile what was there before is frozen: the collector looks at nothing but what is new, which is fast. Where
    somebody else has frozen objects it is not, as they could not be told apart afterwards.
    """

    def __init__(self, *answers: object):
        self._answers = answers
        self._old_buffers: dict = {}

    def __enter__(self) -> "Snapshot":
        gc.collect()  # what nobody holds any more is not what was there before
        self._tensors = _tensors()
        # Storages are kept until the end: the address of one that is freed could be given to a new one.
        self._before = {_key(tensor): tensor.untyped_storage() for tensor in self._tensors}
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._old_buffers = _buffers(self._answers)
        self._freezes = gc.get_freeze_count() == 0
        if self._freezes:
            gc.freeze()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._freezes:
            gc.unfreeze()

    def new(self, also: Sequence[Tensor] = (), of: Iterable = ()) -> list[Tensor]:
        """A flat tensor for each storage that is new or was written to, and for those of the tensors ``also``, and
        one of bytes for what is no tensor."""
        import torch

        gc.collect()  # what is held by nothing but a circle is not held
        changed = [t for t, version in zip(self._tensors, self._versions, strict=True) if _version(t) > version]
        wanted = {_key(tensor) for tensor in [*also, *changed]}
        found = {}
        for tensor in _with_gradients([*_tensors(), *self._tensors, *also]):
            if _key(tensor) in wanted or _key(tensor) not in self._before:
                found[_key(tensor)] = tensor
        tensors = [torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for t in found.values()]
        others = _buffers([*self._answers, *of]) if self._answers else {}
        return tensors + [_as_tensor(thing) for key, thing in others.items() if key not in self._old_buffers]


def _tensors() -> list:
    import torch

    from dtlib.comm.watch.in_step import living

    # What communicators keep from call to call is no answer's.
    kept = {_key(tensor) for comm in list(living) for tensor in comm.held()["communication"]}
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return _with_gradients([tensor for tensor in tensors if _has_storage(tensor) and _key(tensor) not in kept])


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


def _buffers(roots) -> dict:
    """What has bytes of its own and is no tensor, by its address: arrays, bytes and lists of floats that are reached
    from ``roots`` by way of containers, functions, and objects of the learner's own."""
    import numpy as np
    import torch

    kinds = [kind for root in roots for kind in (root if isinstance(root, type) else type(root)).__mro__]
    homes = {getattr(thing, "__module__", None) for thing in [*roots, *kinds]}
    libraries = ("builtins", "torch", "dtlib", "numpy")
    homes = {home for home in homes if home and home.split(".")[0] not in libraries}
    opened = (dict, list, tuple, set, frozenset, deque, MethodType, CellType, partial, SimpleNamespace)
    found, seen, todo = {}, set(), list(roots)
    while todo:
        thing = todo.pop()
        kind = type(thing)  # not isinstance: that may ask the thing itself, and some of torch's warn
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if issubclass(kind, (np.ndarray, memoryview)):
            owner = thing.base if issubclass(kind, np.ndarray) else thing.obj
            if owner is not None:
                todo.append(owner)
                continue
        if issubclass(kind, (np.ndarray, bytes, bytearray, array.array)) or _all_floats(thing):
            found[id(thing)] = thing
        elif issubclass(kind, torch.nn.Module):
            todo.append(vars(thing))
        elif issubclass(kind, opened) or (thing if kind in (type, FunctionType) else kind).__module__ in homes:
            todo += gc.get_referents(thing)
    return found


def _all_floats(thing) -> bool:
    return type(thing) in (list, tuple) and len(thing) > 0 and all(type(each) is float for each in thing)


def _as_tensor(thing):
    import torch

    if isinstance(thing, (list, tuple)):
        return torch.tensor(thing, dtype=torch.float64)
    data = bytearray(thing if isinstance(thing, (bytes, bytearray)) else thing.tobytes())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
