"""The gradient reducer: average gradients over ranks in buckets, while autograd still computes other gradients.

Parameters have numbers i = 0, 1, ... in the order of the model. Buckets have numbers b = 0, 1, ... in the order of
their launch. This order is the same on all ranks: from the last parameters to the first, as gradients become ready.
Four parameters in two buckets:

    time -->         forward | backward()                            | end of backward()
    autograd                 | i=3    i=2      i=1     i=0           |
    b=0 has 3, 2             |        launch ......................... collect, finish
    b=1 has 1, 0             |                         launch ........ collect, finish

A bucket is launched when all its gradients are ready and all earlier buckets are launched. If this rank has not used a
parameter, the bucket is launched at the end of the backward pass, with zeros for that gradient.

The collective is an argument. With ``AllReduce`` every rank receives the average, and all buckets may be in flight at
the same time. With ``ReduceScatter`` every rank receives its shard of the average. Only one bucket is in flight at a
time, so only one bucket needs memory. Communication hooks and Horovod's compression have their own collectives.

docs/explanation/how_a_gradient_travels.md follows one gradient through this file.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from sys import getrefcount

import torch
from torch import nn

from dtlib.comm import Communicator
from dtlib.comm.waiting import Operation, poll_pending, progress_thread
from dtlib.errors import RESET, DtlibError
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.same_model import AGAIN, PASSES, SAMPLE, bits_of
from dtlib.gradients.shard_info import hooks_of_others, info_of, set_gradient_type


class Reducer:
    """Average the gradients of ``buckets`` in each backward pass; hooks of the pass call ``gradient_is_ready``.

    Args:
        buckets: in the order of their launch.
        collective: ``launch(bucket, flags)`` starts the collective of a bucket. ``collect(buckets, flags)`` waits for
            all buckets. It returns, for each bucket, which parameters any rank has used, and for each flag, whether it
            differs between ranks.
        owner: if ``owner.forwards`` counts forward passes, ranks compare whether this number is odd (all must agree).
        progress: what polls pending messages: ``"inline"`` (the hooks of the backward pass), or a ``"thread"``.
        names: parameter -> name, for error messages.
        by_call: if true, a pass ends with a call of ``end()``, not with ``backward()``; one pass may then include
            several backward passes.
        root_buffers: are marked as stale after each pass, and broadcast again.
        values: parameters that must be equal on all ranks. The first ``PASSES`` passes compare a checksum. After that,
            one of ``AGAIN`` passes compares the first ``SAMPLE`` elements of one parameter, each in turn. If
            ``owner`` is an optimizer, its learning rates are compared, too.
    """

    def __init__(self, buckets: Sequence, collective: "AllReduce | ReduceScatter", owner: object, progress: str,
                 names: dict, by_call: bool = False, root_buffers: "RootBuffers | None" = None,
                 values: Sequence[torch.Tensor] = ()):  # fmt: skip
        self.buckets, self.collective, self.owner, self.progress = buckets, collective, owner, progress
        self.names, self.by_call, self.root_buffers = names, by_call, root_buffers
        self.synchronising = True  # False in no_sync(): gradients stay on their rank
        self.passes = 0  # passes that have ended since the last forget()
        self._number = {parameter: b for b, bucket in enumerate(buckets) for parameter in bucket.parameters}
        # Per bucket, the parameters whose gradient is not ready in this pass; empty between passes.
        self._missing: list[set] = []
        self._launched = 0  # launched buckets of this pass
        self._values, self._compared = values, 0
        self._background = ExitStack()  # the progress thread, while buckets are in flight

    def check(self) -> None:
        """Prepare for a new pass after one that raised; raise an error if buckets of that pass had been launched."""
        if self._launched:
            self._background.close()
            raise DtlibError(
                f"An earlier backward pass was interrupted while gradients were in flight. {RESET} Then wrap the model "
                "again."
            )
        self._missing = []

    def gradient_is_ready(self, parameter: torch.Tensor) -> None:
        """Launch each bucket that is complete now; autograd calls this hook when ``parameter.grad`` is final."""
        if not self.synchronising:
            return
        if not self._missing:
            self._begin()
            if not self.by_call:
                torch.autograd.Variable._execution_engine.queue_callback(self.end)
        b = self._number[parameter]
        if b < self._launched:
            raise DtlibError(
                f"{self.names[parameter]} got a second gradient in one backward pass, after the first was sent: with "
                "activation checkpointing use checkpoint(..., use_reentrant=False)."
            )
        self._missing[b].discard(parameter)
        # A complete bucket waits for earlier buckets, because all ranks must launch collectives in the same order.
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            self._launch_next()
        if self.progress == "inline":
            poll_pending()

    def _begin(self) -> None:
        # A hook that runs after ours would change the gradient after it was copied into the message.
        for parameter, name in self.names.items():
            hooks: dict = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            *_, last = [None, *hooks.values()]
            module = getattr(getattr(last, "func", last), "__module__", None) or ""
            if last is not None and not module.startswith("dtlib."):
                raise DtlibError(
                    f"{name} was given a hook after the one that sends its gradient, so this hook would change "
                    "the gradient too late: register post-accumulate hooks before the model is wrapped."
                )
        self._missing = [set(bucket.parameters) for bucket in self.buckets]
        # Ranks compare these flags when the buckets are collected: the count of forward passes is odd; and in some
        # passes eight bits of a checksum of parameters and learning rates.
        self._flags = [getattr(self.owner, "forwards", 0) % 2 == 1]
        if self._values and (self._compared < PASSES or self._compared % AGAIN == 0):
            one = self._values[self._compared // AGAIN % len(self._values)]
            some = self._values if self._compared < PASSES else [one.flatten()[:SAMPLE]]
            rates = [torch.tensor(float(group["lr"])) for group in getattr(self.owner, "param_groups", ())]
            self._flags += bits_of([*some, *rates])

    @torch.no_grad()  # because backward(create_graph=True) records the operations of hooks
    def _launch_next(self) -> None:
        if self.progress == "thread" and not self._launched:
            self._background.enter_context(progress_thread())
        bucket = self.buckets[self._launched]
        bucket.complete()
        self.collective.launch(bucket, self._flags)
        self._launched += 1

    @torch.no_grad()
    def end(self) -> None:
        """Launch the remaining buckets, wait for all buckets, and set the gradients to their averages.

        Autograd calls this method after the backward pass, because ``gradient_is_ready`` queues it.
        """
        if not self._missing:
            self._begin()
        while self._launched < len(self.buckets):
            self._launch_next()
        if self.root_buffers:
            self.root_buffers.stale = True  # before any error, so that all ranks broadcast again
        try:
            used, differs = self.collective.collect(self.buckets, self._flags)
        finally:
            self._background.close()
        # All messages have arrived, so training can continue after an error below.
        self._launched, self._missing = 0, []
        self._check_flags(differs)
        for bucket, its_used in zip(self.buckets, used, strict=True):
            bucket.finish(its_used)
        self.passes += 1

    def _check_flags(self, differs: list[bool]) -> None:
        """Raise an error on all ranks if flags differ between ranks; all ranks call it."""
        if self.collective.comm.simulated:
            return  # simulated ranks contribute zeros
        # In join() some ranks have no more batches and do not step, so their parameters may differ.
        if any(differs[1:]) and getattr(self.owner, "_join", None) is None:
            raise DtlibError(
                "The model's parameters, or learning rates, differ between ranks, for example because one rank alone "
                "called load_state_dict(), left out a step, or has another optimizer or schedule: load values on all "
                "ranks, or before the model is wrapped, and make the same optimizer and steps on all ranks. With "
                "Horovod, call hvd.broadcast_parameters() first."
            )
        self._compared += 1
        if differs[0]:
            forwards, self.owner.forwards = self.owner.forwards, 0  # type: ignore[attr-defined]
            raise DtlibError(
                f"This backward pass is for forward pass {forwards} here, and for a different one on another rank: "
                "one rank skipped a forward pass, for example by `continue`, or ran one more. Skip a step on all "
                "ranks or on none, and call the model for other purposes in eval() and no_grad()."
            )

    def forget(self) -> None:
        """Clear the averages and the count of passes; the owner calls it when a new step begins."""
        self.passes = 0
        for bucket in self.buckets:
            bucket.forget()


class RootBuffers:
    """The module's buffers, broadcast from one rank in the first forward pass of each step.

    All ranks call ``broadcast()`` in each forward pass. The next broadcast happens only after a backward pass has set
    ``stale``, because autograd may have saved the buffers for that backward pass. Counterpart: ``broadcast_buffers`` of
    torch's DDP, which broadcasts in each forward pass.
    """

    def __init__(self, module: nn.Module, comm: Communicator):
        self._module, self._comm, self.stale = module, comm, True

    def broadcast(self, root: int = 0) -> None:
        """Broadcast the buffers from rank ``root`` if they are stale."""
        if self.stale:
            for buffer in self._module.buffers():
                self._comm.broadcast(buffer, root)
        self.stale = False


# Buckets and collectives


class Bucket:
    """Gradients of ``parameters``, of one dtype, that are sent in one message."""

    # The buffer and the handle exist from the launch to the end of the pass.
    buffer: FlatBuffer
    handle: Operation

    def __init__(self, parameters: list):
        self.parameters, self.dtype = parameters, parameters[0].dtype
        self.sharded = [parameter for parameter in parameters if info_of(parameter).differs()]
        self.used = [False] * len(parameters)  # which parameters have a gradient on this rank

    def complete(self) -> None:
        """Record which parameters have a gradient, just before the launch; refuse sparse gradients."""
        for parameter in self.parameters:
            check_dense(parameter.grad)
        self.used = [parameter.grad is not None for parameter in self.parameters]

    def fill(self, extra: int, weight: float = 1.0, free: bool = True) -> FlatBuffer:
        """Copy gradients, times ``weight``, into a flat buffer with ``extra`` zeros at its end.

        Each gradient is freed after its copy, unless ``free`` is false. Missing gradients are zeros.
        """
        shapes = [parameter.shape for parameter in self.parameters]
        buffer = FlatBuffer(shapes, self.dtype, self.parameters[0].device, extra, zeroed=False)
        buffer.tail.zero_()
        for parameter, view in zip(self.parameters, buffer.views, strict=True):
            gradient = parameter.grad
            if free:
                parameter.grad = None
            if gradient is None:
                view.zero_()
            else:
                torch.mul(gradient.detach().to(view.dtype), weight, out=view)
        return buffer

    def finish(self, used: list) -> None:
        """Set gradients to views of the received average; to None if no rank used the parameter."""
        for parameter, view, is_used in zip(self.parameters, self.buffer.views, used, strict=True):
            parameter.grad = view if is_used else None
        for parameter in self.sharded:
            set_gradient_type(parameter)
        del self.buffer, self.handle


class GradientShard(Bucket):
    """A bucket whose average is sharded: each rank receives its shard.

    ``average`` is the sum of this rank's shards over the passes of a step, or None before the first shard has arrived.
    """

    average: torch.Tensor | None

    def __init__(self, parameters: list, shards: Shards):
        super().__init__(parameters)
        self.shards = shards
        self.forget()

    def complete(self) -> None:
        """Record which parameters had a gradient in any pass since ``forget``."""
        before = self.used
        super().complete()
        self.used = [now or then for now, then in zip(self.used, before, strict=True)]

    def flat_gradients(self) -> torch.Tensor:
        """Return the gradients in one flat tensor, and free the originals.

        A single gradient is not copied if nothing else refers to its memory.
        """
        first = self.parameters[0]
        if len(self.parameters) > 1 or self.shards.padding or not _is_alone(first, self.dtype):
            return self.fill(self.shards.padding).flat
        whole, first.grad = first.grad.detach().view(-1), None
        return whole

    def take(self, shard: torch.Tensor) -> None:
        """Add a received shard to the average."""
        self.average = shard if self.average is None else self.average.add_(shard)

    def finish(self, used: list) -> None:
        """Record which parameters any rank has used."""
        self.used_anywhere = used

    def forget(self) -> None:
        """Clear the average and the record of used parameters."""
        self.used = self.used_anywhere = [False] * len(self.parameters)
        self.average = None


class AllReduce:
    """A collective with which every rank receives the average.

    Each message ends with one number per parameter, whether this rank has used it, and one number per flag. Their sums
    say on how many ranks they were set.
    """

    def __init__(self, comm: Communicator, algorithm: str | None = None):
        self.comm, self.algorithm = comm, algorithm

    def launch(self, bucket: Bucket, flags: list[bool]) -> None:
        """Start the all-reduce of a bucket's gradients; each rank divides its own, so the sum is the average."""
        tail = torch.tensor([*bucket.used, *flags])
        bucket.buffer = bucket.fill(len(tail), weight=1 / self.comm.size)
        bucket.buffer.tail.copy_(tail)
        bucket.handle = self.comm.all_reduce(bucket.buffer.flat, async_op=True, algorithm=self.algorithm)

    def collect(self, buckets: Sequence[Bucket], flags: list[bool]) -> tuple[list, list]:
        """Wait for all buckets; return used parameters per bucket, and whether each flag differs between ranks."""
        for bucket in buckets:
            bucket.handle.wait()
        tails = [bucket.buffer.tail.tolist() for bucket in buckets]
        counts = tails[0][-len(flags) :]
        used = [tail[: -len(flags)] for tail in tails]
        return used, [0 < count < self.comm.size for count in counts]


class ReduceScatter:
    """A collective with which every rank receives its shard of the average.

    A shard has no place for flags, so one small all-reduce at the end of the pass exchanges them.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._in_flight: GradientShard | None = None

    def launch(self, bucket: GradientShard, flags: list[bool]) -> None:
        """Wait for the previous bucket, so that only one needs memory; then start the reduce-scatter of ``bucket``."""
        self._collect_last()
        whole = bucket.flat_gradients()
        own = whole.new_empty(bucket.shards.length)
        bucket.handle = self.comm.reduce_scatter(own, whole, "mean", async_op=True, overwrite=True)
        self._in_flight = bucket

    def _collect_last(self) -> None:
        if bucket := self._in_flight:
            bucket.take(bucket.handle.wait())
            self._in_flight = None
            del bucket.handle

    def collect(self, buckets: Sequence[GradientShard], flags: list[bool]) -> tuple[list, list]:
        """Wait for the last bucket; return used parameters per bucket, and whether each flag differs between ranks."""
        self._collect_last()
        # One all-reduce with "max": a flag's maximum says whether any rank has set it, and the maximum of its negation
        # says whether any rank has not.
        mine = [*flags, *(not flag for flag in flags), *(used for bucket in buckets for used in bucket.used)]
        rest = iter(self.comm.all_reduce(torch.tensor(mine, dtype=torch.int8), op="max").tolist())
        on_any, off_any = [next(rest) for _ in flags], [next(rest) for _ in flags]
        used = [[next(rest) for _ in bucket.parameters] for bucket in buckets]
        return used, [bool(on and off) for on, off in zip(on_any, off_any, strict=True)]


def _is_alone(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the gradient's memory can be overwritten, because nothing else refers to it.

    Autograd may use the same memory for another parameter's gradient or for the argument of ``backward(cotangent)``,
    and hooks may keep a reference.
    """
    # Do not bind the gradient to a local name: that would be one more reference.
    if parameter.grad is None or parameter.grad.dtype != dtype or not parameter.grad.is_contiguous():
        return False
    # Compare with a new gradient, to which nothing else refers: the counts themselves depend on the Python version.
    new = torch.zeros(1, requires_grad=True)
    new.grad = torch.zeros(1)

    def references(one):
        return getrefcount(one.grad), torch._C._storage_Use_Count(one.grad.untyped_storage()._cdata)

    return references(parameter) == references(new)


def check_dense(gradient: torch.Tensor | None) -> None:
    """Raise an error if a gradient is sparse: a flat buffer contains every element."""
    if gradient is not None and gradient.is_sparse:
        raise DtlibError("A gradient is sparse, but only dense ones are averaged: build embeddings with sparse=False.")


def refuse_averaged(named: dict, replaced: Callable[[object], bool]) -> None:
    """Raise an error if another reducer averages the gradient of a parameter in ``named`` (name -> parameter).

    ``replaced(owner)`` returns whether the caller will replace the hooks of this owner of a reducer.
    """
    for name, parameter in named.items():
        reducers = [getattr(hook, "__self__", None) for hook in hooks_of_others(parameter)]
        if any(isinstance(one, Reducer) and not replaced(one.owner) for one in reducers):
            raise DtlibError(
                f"Gradients of {name} are already averaged by a DataParallel, or by a ZeroOptimizer at stage 2: build "
                "the model again, and wrap it once."
            )


def progress_for(comm: Communicator, tensors: Iterable[torch.Tensor], wanted: str | None, caller: str) -> str:
    """Return what polls pending messages: ``wanted``, or by default ``"inline"`` on a CPU, else ``"thread"``.

    A thread pays off if cores are idle: on an accelerator, and with an emulated network.
    """
    if wanted not in (None, "inline", "thread"):
        raise DtlibError(f"{caller}(progress={wanted!r}): choose 'inline' or 'thread'.")
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return wanted or ("inline" if on_cpu and getattr(comm, "wire", None) is None else "thread")
