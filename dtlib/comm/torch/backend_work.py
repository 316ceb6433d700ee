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

    ``handles`` are pending operations and ``result`` their output tensors. ``finish()`` copies results into the
    caller's tensors. ``limit`` is a time limit in seconds that replaces the group's.
    """

    def __init__(
        self, handles: Sequence[waiting.Operation | _Inside], result: list, finish: Finish = None,
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
        if self._error is None and not all(handle.done() for handle in self._handles):
            return False
        if self._error is None:
            with suppress(Exception):  # `exception()` returns it
                self.wait()
        return True

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

        def go_on(future):
            try:
                following.set_result(callback(future))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(go_on)
        return following


class _Inside:
    """A work inside another work, with the interface of an operation's handle."""

    def __init__(self, work):
        self.wait, self.done, self._allow = work.wait, work.is_completed, work._allow

    _time_limit = property(fset=lambda self, seconds: self._allow(seconds))


def joined(works: Sequence[GroupWork], result: list | None = None, finish: Finish = None) -> GroupWork:
    """Return one work for several."""
    result = [tensor for work in works for tensor in work._result] if result is None else result
    return GroupWork([_Inside(work) for work in works], result, finish)


class ReceivedFromAny(GroupWork):
    """A receive from any rank: ``wait`` or ``is_completed`` finds the sender, and then ``source_rank`` returns it.

    ``find()`` returns the rank from which a message has arrived, or None; ``receive(rank)`` starts to receive from it.
    """

    def __init__(
        self, find: Callable[[], int | None], wait_until_found: Callable[[timedelta | None], int],
        receive: Callable[[int], waiting.Operation], result: list,
    ):  # fmt: skip
        super().__init__((), result)
        self._find, self._wait_until_found, self._receive = find, wait_until_found, receive
        self._source: int | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._source is None:
            with torchs_errors():
                self._take(self._wait_until_found(timeout))
        return super().wait(timeout)

    def is_completed(self) -> bool:
        waiting.advance_all()
        if self._source is None and (source := self._find()) is not None:
            self._take(source)
        return self._source is not None and super().is_completed()

    def _take(self, source: int) -> None:
        self._source = source
        self._handles = (self._receive(source),)

    def source_rank(self) -> int:
        """Return the sender's rank; raise GroupError before a message has arrived."""
        if self._source is None:
            raise GroupError("No message has arrived yet, so its sender is not known: call wait() first.")
        return self._source

    _source_rank = source_rank


def _tensors(result):
    for one in result:
        yield from [one] if isinstance(one, torch.Tensor) else _tensors(one)
