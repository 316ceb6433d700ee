"""Pending operations of a group as torch represents them: a ``Work`` and its future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeAlias

import torch
from torch import distributed as dist
from torch.autograd import Variable

from dtlib.comm import waiting
from dtlib.errors import CommunicationError, DtlibError, PeerFailed, WaitTimeout

# Copies results from temporary memory into the caller's tensors; None if there is nothing to copy.
Finish: TypeAlias = Callable[[], object] | None


class GroupError(CommunicationError, dist.DistBackendError):
    """An error of dtlib that is also the type of error that users of torch catch."""


class GroupTimeout(WaitTimeout, GroupError):
    """A wait that took longer than the timeout of the group or of the operation."""


class GroupPeerFailed(PeerFailed, GroupError):
    """A wait for a rank that will not arrive."""


class torchs_errors:
    """A context manager that raises the communicator's errors as torch's error types."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DtlibError) and not isinstance(error, dist.DistBackendError):
            if isinstance(error, WaitTimeout):
                # Users of torch search the message for the word "timeout".
                raise GroupTimeout(f"The timeout is over. {error}") from None
            raise (GroupPeerFailed if isinstance(error, PeerFailed) else GroupError)(str(error)) from None


class GroupWork(dist._Work):
    """Several operations of a communicator as one ``Work``.

    ``handles`` are pending operations, or other works. ``result`` are their output tensors. ``finish()`` copies results
    into the caller's tensors. ``limit`` is a time limit in seconds that replaces the group's.
    """

    def __init__(
        self, handles: Sequence[waiting.Operation | GroupWork], result: list, finish: Finish = None,
        limit: float | None = None,
    ):  # fmt: skip
        super().__init__()
        self._handles = handles
        self._result = result
        self._finish = finish
        self._future: _Future | None = None
        self._error: Exception | None = None
        if limit is not None:
            self._allow(limit)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all operations are complete; raise ``GroupTimeout`` after ``timeout`` or the group's timeout."""
        if timeout is not None and timeout.total_seconds() > 0:
            self._allow(timeout.total_seconds())
        try:
            with torchs_errors():
                for handle in self._handles:
                    handle.wait()
        except Exception as error:
            self._error = error
            raise
        self._end()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._error is None:
            with suppress(Exception):
                if not all(handle.done() for handle in self._handles):
                    return False
            with suppress(Exception):  # `exception()` returns it
                self.wait()
        return True

    done = is_completed  # a work inside another work has the interface of an operation's handle

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors, which completes by itself: C++ may wait for it without calling this object.

        In a backward pass (DDP's hooks call this), it completes in a callback of autograd, which runs before DDP's own
        callback; until then the pass computes. Outside a backward pass there is no such callback, so this method waits.
        """
        if self._future is None:
            devices = sorted({tensor.device for tensor in _tensors(self._result) if tensor.is_cuda}, key=str)
            self._future = _Future(self._complete_future, devices)
            if torch._C._current_autograd_node() is None:
                self._complete_future()
            else:
                Variable._execution_engine.queue_callback(self._complete_future)
        return self._future

    def _complete_future(self) -> None:
        assert self._future is not None
        if self._future.done():
            return
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
            raise
        self._future.set_result(self._result)

    def _end(self) -> None:
        finish, self._finish, self._handles = self._finish, None, ()
        if finish is not None:
            finish()

    def _allow(self, seconds: float) -> None:
        for handle in self._handles:
            handle._time_limit = seconds

    _time_limit = property(fset=_allow)


class _Future(torch.futures.Future):
    """A future that completes when Python waits for it, or for a future chained to it (as hook_with_zero_step does)."""

    def __init__(self, complete, devices):
        super().__init__(devices=devices)
        self._complete, self._devices = complete, devices

    def wait(self):
        self._complete()
        return super().wait()

    def then(self, callback):
        following = _Future(self._complete, self._devices)

        def resume(future):
            try:
                following.set_result(callback(future))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(resume)
        return following


def joined(works: Sequence[GroupWork]) -> GroupWork:
    """Return one work for several."""
    return GroupWork(works, [tensor for work in works for tensor in work._result])


def _tensors(result):
    for one in result:
        yield from [one] if isinstance(one, torch.Tensor) else _tensors(one)
