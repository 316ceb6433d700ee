"""Measure the memory that an answer keeps: all living tensors, counted by their storages.

A tensor in a global name, a closure or a function's attribute still uses memory. So the garbage collector is asked,
which knows every tensor of this process. It does not know numpy arrays, bytes and floats: those are searched in the
attributes, closures and global names of the answer.
"""

import array
import gc
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace

from dtlib.lab.foreign import Tensor


class Snapshot:
    """A record of the tensors of this process, from which ``new`` finds later ones.

        with Snapshot() as before:
            ...
            before.new()

    ``Snapshot(answer)`` also finds the answer's arrays, bytes and lists of floats, and those of the objects ``of``.

    Older objects are frozen in the block, so that the collector looks only at new ones, which is fast. If other code
    has frozen objects already, nothing is frozen, because the two kinds could not be distinguished afterwards.
    """

    def __init__(self, *answers: object):
        self._answers = answers
        self._old_buffers: dict = {}

    def __enter__(self) -> "Snapshot":
        gc.collect()  # garbage does not count as older memory
        self._tensors = _tensors()
        # Keep the storages until the end: otherwise a new storage could get the address of a freed one.
        self._before = {_key(tensor): tensor.untyped_storage() for tensor in self._tensors}
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._old_buffers = _buffers(self._answers)
        # A program that has frozen objects itself has thousands of them. Python 3.12 counts some hundreds at its start.
        self._freezes = gc.get_freeze_count() < 1000
        if self._freezes:
            gc.freeze()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._freezes:
            gc.unfreeze()

    def new(self, also: Sequence[Tensor] = (), of: Iterable = ()) -> list[Tensor]:
        """Return one flat tensor for each storage that is new, was written to, or belongs to ``also``.

        Arrays, bytes and floats are appended as one tensor for each object.
        """
        import torch

        gc.collect()  # objects in unreachable cycles do not count
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

    from dtlib.comm.watch.call_counts import living

    # Buffers that communicators keep between calls do not belong to the answer.
    kept = {_key(tensor) for comm in list(living) for tensor in comm.tensors_by_kind()["communication"]}
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return _with_gradients([tensor for tensor in tensors if _has_storage(tensor) and _key(tensor) not in kept])


def _with_gradients(tensors) -> list:
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return tensors + [gradient for gradient in gradients if _has_storage(gradient)]


def _has_storage(tensor) -> bool:
    """Return whether a tensor is counted: dense and on the CPU."""
    import torch

    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def _key(tensor) -> int:
    return tensor.untyped_storage()._cdata


def _version(tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _buffers(roots) -> dict:
    """Return arrays, bytes and lists of floats that are reachable from ``roots``, by address.

    Containers, functions and objects of the learner's own classes are followed.
    """
    import numpy as np
    import torch

    kinds = [kind for root in roots for kind in (root if isinstance(root, type) else type(root)).__mro__]
    exercise_files = {getattr(thing, "__module__", None) for thing in [*roots, *kinds]}
    libraries = ("builtins", "torch", "dtlib", "numpy")
    exercise_files = {home for home in exercise_files if home and home.split(".")[0] not in libraries}
    opened = (dict, list, tuple, set, frozenset, deque, MethodType, CellType, partial, SimpleNamespace)
    found, seen, todo = {}, set(), list(roots)
    while todo:
        thing = todo.pop()
        kind = type(thing)  # not isinstance, which may run code of the object; some of torch's warn
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
        elif issubclass(kind, opened) or (thing if kind in (type, FunctionType) else kind).__module__ in exercise_files:
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
    """Return the total size of tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors)
