"""torch process groups: which tensors they can carry and reduce, and handles of pending operations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import distributed as dist

from dtlib.comm import types, waiting
from dtlib.comm.call import Call
from dtlib.comm.types import AnyTensor, payload
from dtlib.comm.watch import board, recorder
from dtlib.comm.watch.recorder import Event
from dtlib.errors import RESET, CommunicationError, WaitTimeout

# gloo and NCCL cannot add these dtypes. They are added in a wider dtype; cut back, the sum wraps around as it should.
WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_SIGN = torch.iinfo(torch.int64).min
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
GLOO_TIMEOUT = timedelta(minutes=30)  # torch's default
# Groups live until the process ends, as torch's own do: when this rank drops a group, others may still be connecting.
_groups: list = []
_abandoned: list = []  # buffers that a group may still read or write


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the device types from which a group sends tensors without a copy, with the names of their backends."""
    names = {device.type: group._get_backend(device).name() for device in group._device_types}
    return {device: name for device, name in names.items() if (device, name) != ("cuda", "gloo")}


def make_group(backends: dict[str, str], store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """Create a separate process group, unknown to torch's default group and to its list of groups.

    ``backends`` maps device types to ``gloo`` or ``nccl``. All ``size`` ranks call it with the same ``store``.
    """
    group = dist.ProcessGroup(store, rank, size)
    for device, name in backends.items():
        named = dist.PrefixStore(name, store)
        if name == "nccl":
            backend = dist.ProcessGroupNCCL(named, rank, size)  # type: ignore[call-arg]  # torch's stub lacks a default
            kind = dist.ProcessGroup.BackendType.NCCL
        elif name == "gloo":
            backend = dist.ProcessGroupGloo(named, rank, size, GLOO_TIMEOUT)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            raise CommunicationError(
                f"split supports groups of gloo and NCCL, but this group uses {name}: use gloo or NCCL."
            )
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    _groups.append(group)
    return group


V = TypeVar("V")


class GroupTensor:
    """A tensor as a group sends it: ``flat`` is contiguous, of the same dtype, on a device (``on``) of the group.

    ``octets`` are its bytes, which is how operations without arithmetic send any dtype. ``store()`` copies a temporary
    copy back, and returns the caller's tensor. Raises CommunicationError for tensors that types.py refuses.
    """

    def __init__(self, tensor: AnyTensor, operation: str, writes: bool, backends: dict[str, str]):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda and "cuda" in backends:
            types.check_name(types.dtype_name(tensor.dtype), operation)
            self._home = tensor.detach()
            self._back: Callable[[], AnyTensor] = lambda: tensor
            flat = self._home.contiguous().view(-1)
        else:
            content = payload(tensor, operation, writes)
            # torch has no read-only tensors.
            memory = content.flat if content.flat.flags.writeable else content.flat.copy()
            self._home = torch.from_numpy(memory)
            if isinstance(tensor, torch.Tensor):
                # types.py stores dtypes that numpy lacks as integers.
                self._home = self._home.view(tensor.dtype)
            self._back = content.store
            flat = self._home if "cpu" in backends else self._home.cuda()
        self.flat = flat
        self.octets = flat.view(torch.uint8)
        self.nbytes = self.octets.numel()
        self.on = flat.device.type

    def store(self) -> AnyTensor:
        """Copy the values back into the caller's tensor if they were copied; return it."""
        if self.flat.data_ptr() != self._home.data_ptr():
            self._home.copy_(self.flat.view(self._home.shape))
        return self._back()


class Reduced:
    """A tensor's ``values`` in a form that the group can reduce; ``store_result()`` converts them back.

    Raises CommunicationError for an ``op`` that the table in types.py refuses.
    """

    def __init__(self, flat: torch.Tensor, tensor: AnyTensor, op: str, operation: str):
        types.combiner(tensor, op, operation)
        self._flat = flat
        self._op = op
        self._ordered = op in ("max", "min") and flat.is_floating_point()
        self.values = flat
        if self._ordered:
            # Compare floats as integers of the same order: gloo's comparison loses a NaN, which numpy and torch keep.
            self._flat = flat.view(_BITS[flat.element_size()])
            limits = torch.iinfo(self._flat.dtype)
            worst = limits.max if op == "max" else limits.min
            ordered = _order(self._flat).masked_fill_(flat.isnan(), worst)
            self.values = ordered.to(WIDER.get(ordered.dtype, ordered.dtype))
        elif flat.dtype in WIDER:
            self.values = flat.to(WIDER[flat.dtype])
        elif flat.dtype == torch.uint64:
            # The same bits as signed integers give the same sums.
            self._flat = flat.view(torch.int64)
            self.values = self._flat ^ self._shift()

    def store_result(self, size: int) -> None:
        """Convert the reduced values back to the tensor's dtype; for ``mean``, divide by ``size``."""
        if self._ordered:
            self.values = _order(self.values.to(self._flat.dtype))
        elif self._flat.dtype == torch.int64 and self.values is not self._flat:
            self.values ^= self._shift()
        if self.values is not self._flat:
            self._flat.copy_(self.values)
        if self._op == "mean":
            self._flat.div_(size)

    def _shift(self) -> int:
        """Return the bits that map unsigned to signed integers of the same order; 0 for sums, which need no order."""
        return _SIGN if self._op in ("max", "min") else 0


def _order(bits: torch.Tensor) -> torch.Tensor:
    """Map the bits of floats to integers of the same order, or back; the order of negative floats is reversed."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def disjoint(octets: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return ``octets``, or a copy if they overlap ``others``: an input must not be overwritten while it is sent."""
    first, second = octets.data_ptr(), others.data_ptr()
    apart = first + octets.numel() <= second or second + others.numel() <= first
    return octets if apart else octets.clone()


class Breakable(Protocol):
    """A communicator that records why it cannot be used any more."""

    time_limit: float | None
    broken: str | None


class GroupHandle(Generic[V]):
    """A pending operation on a process group, with the methods of ``waiting.Operation``: ``wait()`` and ``done()``.

    If it fails or is interrupted, it marks ``comm`` as broken. ``keep`` holds the buffers.
    """

    def __init__(
        self, comm: Breakable, call: Call, work: dist.Work, on: str, finish: Callable[[], V], keep: tuple,
        event: Event | None, blocking: bool,
    ):  # fmt: skip
        self._comm, self._call, self._work, self._finish = comm, call, work, finish
        self._keep: tuple | None = keep
        self._event, self._blocking = event, blocking
        # On a GPU the stream waits. gloo completes a send or a receive only in `wait()`, so polling it would never end.
        self._polled = on == "cpu" and call.operation not in ("send", "recv")
        self._complete = False
        self._value: Any = None

    def done(self) -> bool:
        """Return True once the operation is complete on this rank. Does not wait.

        A send or receive of gloo is complete only after ``wait``.
        """
        if not self._complete and self._work.is_completed():
            self._end()
        return self._complete

    def wait(self) -> V:
        """Wait until the operation is complete and return its result; on a GPU, make the current stream wait.

        Raises ``WaitTimeout`` after the communicator's ``time_limit``, and ``CommunicationError`` if torch fails.
        """
        waits = None if self._blocking or not recorder.recordings else recorder.event_of(self._call, "wait")
        if not self._complete:
            if self._polled:
                self._poll()
            self._end()
        if waits is not None:
            waits.end = time.monotonic()
        return self._value

    def _poll(self) -> None:
        started, pause, limit = time.monotonic(), 0.0, self._comm.time_limit
        try:
            # Poll, because torch's own wait can neither be interrupted nor report which operation is late.
            while not self._work.is_completed():
                waited = time.monotonic() - started
                if limit is not None and waited > limit:
                    raise WaitTimeout(
                        f"Waited {limit:g} s in {self._call}: another rank has not called it, or raised an error. "
                        f"{RESET}"
                    )
                if waited < waiting.YIELD_SECONDS:
                    # A thread of gloo does the work and needs the core.
                    os.sched_yield()
                    continue
                if waited > waiting.CHECK_SECONDS:
                    board.waits = self._call
                pause = min(waiting.LONGEST_SLEEP, pause + 0.0002)
                time.sleep(pause)
        except BaseException:
            self._give_up(f"was interrupted in {self._call}")
            raise
        finally:
            board.waits = None

    def _end(self) -> None:
        board.waits = None if self._polled else self._call
        try:
            self._work.wait()
        except RuntimeError as error:
            self._give_up(f"failed in {self._call}")
            raise failure(self._call, error) from error
        finally:
            board.waits = None
        self._value = self._finish()
        self._complete = True
        self._keep = None
        if self._event is not None:
            self._event.end = time.monotonic()

    def _give_up(self, why: str) -> None:
        _abandoned.append(self)
        self._comm.broken = self._comm.broken or why


def failure(call: Call, error: Exception) -> CommunicationError:
    """Return torch's own error as one error message."""
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    return CommunicationError(
        f"{call} failed in torch.distributed ({reason}): look for the first error on other ranks."
    )
