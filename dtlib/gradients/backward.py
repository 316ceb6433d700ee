"""A backward pass in which gradients leave while later ones are still computed.

    autograd    grad of layer 4   layer 3   layer 2   layer 1   end of backward()
    buckets     [4 3 ----------- launch 0]  [2 1 ---- launch 1] finish: wait for both

Buckets are launched in one order on all ranks, whatever the order in which gradients come: a bucket waits for those
before it, and what never arrives (a parameter that was not used) is launched at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from dtlib.comm.waiting import advance_all, progress_thread
from dtlib.errors import DtlibError

if TYPE_CHECKING:
    from dtlib.comm import Communicator


class RanksDisagree(DtlibError):
    """All ranks have found out together, at the end of a pass, that its averages mean nothing."""


class RootBuffers:
    """Rank 0's buffers for all ranks, in the first forward pass of each step; all ranks call ``broadcast()``.

    Later forward passes of a step change no buffer: autograd may have saved it for the backward pass, which sets
    ``stale`` at its end. Counterpart: ``broadcast_buffers`` of torch's DDP, which does it in each forward pass.
    """

    def __init__(self, module: nn.Module, comm: Communicator):
        self._module, self._comm, self.stale = module, comm, True

    def broadcast(self, root: int = 0) -> None:
        if self.stale:
            for buffer in self._module.buffers():
                self._comm.broadcast(buffer, root)
        self.stale = False


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.rule = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.rule(gradient), None, None


def with_gradient(x: torch.Tensor, forward: Callable, backward: Callable) -> torch.Tensor:
    """``forward(x)``, whose gradient ``backward`` turns into that of x."""
    return _WithGradient.apply(x, forward, backward)


class BackwardPass:
    """Calls ``begin()`` at the first gradient of a backward pass, ``launch(bucket)`` for each bucket in turn as soon as
    the gradients of all its ``parameters`` have arrived, and ``finish()`` at the end of ``backward()``.

    Args:
        buckets: things with a list ``parameters``, in the order of their launch.
        progress: who moves on what was launched: ``"inline"`` the hooks of the backward pass, or a ``"thread"``.
        names: of the parameters, for errors.
        by_call: the pass ends when ``end()`` is called, not with ``backward()``: several backward passes may be one.
    """

    def __init__(
        self, buckets: Sequence, begin: Callable[[], None], launch: Callable, finish: Callable[[], None], progress: str,
        names: dict, by_call: bool = False,
    ):  # fmt: skip
        self.buckets, self.progress = buckets, progress
        self._begin, self._launch, self._finish = begin, launch, finish
        self._names, self._by_call = names, by_call
        self._index = {parameter: i for i, bucket in enumerate(buckets) for parameter in bucket.parameters}
        self._missing: list[set] = []  # for each bucket the parameters whose gradient has not come in this pass
        self._launched, self._under_way = 0, False
        self._background = ExitStack()  # the progress thread while buckets travel

    def gradient_is_ready(self, parameter: torch.Tensor) -> None:
        """A hook: autograd has added this parameter's gradient, and nothing more will come in this pass."""
        if not self._under_way:
            self._start()
            if not self._by_call:
                torch.autograd.Variable._execution_engine.queue_callback(self.end)
        if self._index[parameter] < self._launched:
            raise DtlibError(
                f"{self._names[parameter]} got a second gradient in one backward pass, after the first had left: with "
                "activation checkpointing use checkpoint(..., use_reentrant=False)."
            )
        self._missing[self._index[parameter]].discard(parameter)
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            self._launch_next()
        if self.progress == "inline":
            advance_all()

    def run_empty(self) -> None:
        """A pass of a rank that has nothing to add: every bucket is launched as it is."""
        self.forget()
        self.end()

    def forget(self) -> None:
        """Before a new pass: forget one that raised, or refuse to go on where gradients had left already."""
        if self._launched:
            self._background.close()
            raise DtlibError(
                "An earlier backward pass was interrupted while gradients travelled: call dtlib.reset() on all ranks "
                "and wrap the model anew."
            )
        self._under_way = False

    def _start(self) -> None:
        for parameter, name in self._names.items():
            hooks: dict = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            *_, last = [None, *hooks.values()]
            if last is not None and not getattr(last, "func", last).__module__.startswith("dtlib."):
                raise DtlibError(
                    f"{name} was given a hook after that which sends its gradient, and would change it too late: "
                    "register post-accumulate hooks before the model is wrapped."
                )
        self._under_way = True
        self._missing = [set(bucket.parameters) for bucket in self.buckets]
        self._begin()

    @torch.no_grad()  # backward(create_graph=True) records what hooks do
    def _launch_next(self) -> None:
        if self.progress == "thread" and not self._launched:
            self._background.enter_context(progress_thread())
        self._launch(self.buckets[self._launched])
        self._launched += 1

    @torch.no_grad()
    def end(self) -> None:
        """Launch the other buckets, and wait for all."""
        if not self._under_way:
            self._start()
        while self._launched < len(self.buckets):
            self._launch_next()
        try:
            self._finish()
        except RanksDisagree:  # after everything has arrived, so that all may go on
            self._launched = 0
            raise
        finally:
            self._background.close()
        self._launched, self._under_way = 0, False


def progress_for(comm: Communicator, tensors: Iterable[torch.Tensor], wanted: str | None, who: str) -> str:
    """``inline`` where computing keeps the cores busy, ``thread`` where it leaves them idle: an accelerator, or an
    emulated network; ``wanted`` overrides it."""
    if wanted not in (None, "inline", "thread"):
        raise DtlibError(f"{who}(progress={wanted!r}): choose 'inline' or 'thread'.")
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return wanted or ("inline" if on_cpu and getattr(comm, "wire", None) is None else "thread")
