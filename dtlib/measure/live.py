"""``Live``: the bytes of all live tensors on this rank: now, at the peak, and by the line that allocated them.

    with Live(*model.parameters()) as live:     these tensors are counted from the start
        loss_of(model, batch).backward()        live.now: bytes at this moment
        optimizer.step()                        live.peak: the most so far
    for bytes_, place, text in live.by_line(): ...

Each storage is counted once, even if it has many views. It is counted from the operation that allocates it until
nothing refers to it. Activations, gradients and temporaries are storages. Message buffers are storages, too, because
communicators allocate them through torch.
"""

import linecache
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtlib.measure.storages import strided

Place = tuple[str, int]  # file name and line number
BEFORE: Place = ("before", 0)
SKIPPED_FILES = f"{torch.__path__[0]}/", __file__  # skip frames of these files to find the allocating line


class Live(TorchDispatchMode):
    """A context manager that counts the storages of ``tensors``, and those that this thread allocates in the block.

    ``now`` and ``peak`` are bytes. If ``changed`` is set, it is called with ``now`` after each change. Two kinds of
    memory are not counted: temporaries inside an operation of torch, and other tensors from before the block.

    Counterpart: ``torch.distributed._tools.mem_tracker.MemTracker``.
    """

    def __init__(self, *tensors: torch.Tensor):
        super().__init__()
        self.now = self.peak = 0
        self.changed: Callable[[int], object] | None = None
        self._alive: dict[int, tuple[weakref.ref, int, Place]] = {}  # storage key -> reference, bytes, line
        self._by_line: Counter[Place] = Counter()
        self._at_peak: Counter[Place] = Counter()
        for storage in set(_storages(tensors)):
            self._set(storage, storage.nbytes(), BEFORE)

    def __enter__(self) -> "Live":
        super().__enter__()
        # ``resize_`` of a storage is not an operation of torch's dispatcher, so replace the method in the block.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore
        return self

    def __exit__(self, *problem: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*problem)

    def by_line(self, at_peak: bool = False) -> list[tuple[int, str, str]]:
        """Return, for each line, live bytes, ``file:line``, and the line's text; the largest number of bytes first."""
        lines = (self._at_peak if at_peak else self._by_line).most_common()
        return [
            (count, f"{file.rpartition('/')[2]}:{line}", linecache.getline(file, line).strip())
            for (file, line), count in lines
            if count
        ]

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        # A result in a storage of the arguments is a view or an in-place result. Any other storage is new.
        before = {storage._cdata for storage in _storages(tree_leaves((args, kwargs)))}
        for storage in _storages(tree_leaves(result)):
            if storage._cdata in self._alive:
                self._set(storage, storage.nbytes())  # an operation may have changed its size
            elif storage._cdata not in before or (func is LIFT and storage.resizable()):
                self._set(storage, storage.nbytes(), _calling_line())
        return result

    def _resized(self, storage, size: int):
        self._resize(storage, size)
        if storage._cdata in self._alive:
            self._set(storage, size)
        return storage

    def _set(self, storage, size: int, place: Place | None = None) -> None:
        key = storage._cdata
        if place is None:
            reference, before, place = self._alive[key]
        else:
            reference, before = weakref.ref(storage, lambda _: self._freed(key)), 0
        self._alive[key] = reference, size, place
        if size != before:
            self._count(size, place)
            self._count(-before, place)  # after the addition: while a storage grows, old and new memory both exist

    def _freed(self, key: int) -> None:
        _, size, place = self._alive.pop(key)
        self._count(-size, place)

    def _count(self, more: int, place: Place) -> None:
        self.now += more
        self._by_line[place] += more
        if self.now > self.peak:
            self.peak, self._at_peak = self.now, self._by_line.copy()
        if self.changed is not None:
            self.changed(self.now)


# The operation that torch applies to a tensor made from Python's numbers or from a numpy array. A numpy array's storage
# is not resizable, and its memory is not counted.
LIFT = torch.ops.aten.lift_fresh.default


def _storages(things: Iterable) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in strided(one for one in things if isinstance(one, torch.Tensor))]


def _calling_line() -> Place:
    """Return the innermost line of the call stack that is outside torch and this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(SKIPPED_FILES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
