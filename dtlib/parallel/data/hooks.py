"""Communication hooks: a user function averages the gradients of a bucket. The signature is torch's.

    gradients of a bucket are ready   hook(state, bucket) -> future
    end of the backward pass          future.wait() is the average, as long as the bucket

A hook receives this rank's gradients and must divide by the number of ranks itself. The flags that say which parameters
each rank has used are all-reduced on a separate communicator, so the hook does not wait for them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from dtlib.errors import DtlibError
from dtlib.gradients.buckets import FlatBuffer
from dtlib.gradients.reducer import AllReduce, Bucket
from dtlib.gradients.same_model import check_same_arguments


class GradBucket:
    """A bucket with the interface of ``torch.distributed.GradBucket``, which only C++ can construct."""

    def __init__(self, index: int, is_last: bool, parameters: list[nn.Parameter], buffer: FlatBuffer):
        self._index, self._is_last, self._parameters, self._views = index, is_last, parameters, buffer.views
        self._flat = buffer.flat.view(-1)  # some hooks resize this, such as batched_powerSGD_hook

    def index(self) -> int:
        """Return the position of this bucket in launch order."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this bucket is the last one of the backward pass."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return this rank's gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat tensor."""
        self._flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the buffer, in the shapes of ``parameters()``."""
        return self._views

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this bucket."""
        return self._parameters


class CommHook(AllReduce):
    """A collective that calls ``hook(state, bucket)`` instead of ``all_reduce`` for the ``buckets`` of one model.

    All ranks construct one. Hooks of ``dtlib.parallel.compression`` and of
    ``torch.distributed.algorithms.ddp_comm_hooks`` work. They return a ``torch.futures.Future`` of the average.
    ``before`` is the model's current collective, which must not be a hook.
    """

    def __init__(self, state: object, hook: Callable, before: AllReduce, buckets: list[Bucket]):
        if isinstance(before, CommHook):
            raise DtlibError(f"This model already has the hook {before.name}: wrap it again for another one.")
        if not callable(hook):
            raise DtlibError(f"register_comm_hook(state, {hook!r:.40}): pass a function hook(state, bucket).")
        self.name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
        ours = type(state).__module__.startswith(("dtlib.", "torch."))
        kept = getattr(state, "__dict__", {}) if ours else {}
        # Only compare settings of known state classes: a user's own state may differ between ranks on purpose.
        numbers = {key: one for key, one in kept.items() if isinstance(one, int | float)}
        check_same_arguments(before.comm, "register_comm_hook", hook=self.name, state=numbers)
        super().__init__(before.comm.split(0))
        self.state, self.hook, self.buckets = state, hook, buckets
        self._futures: dict[Bucket, torch.futures.Future] = {}

    def launch(self, bucket: Bucket, flags: list[bool]) -> None:
        """Call the hook, and all-reduce the flags separately because a hook may resize the gradients' memory."""
        buffer = bucket.buffer = bucket.fill(0)
        buffer.tail = torch.tensor([*bucket.used, *flags], dtype=buffer.flat.dtype, device=buffer.flat.device)
        bucket.handle = self.comm.all_reduce(buffer.tail, async_op=True)
        b = self.buckets.index(bucket)
        future = self.hook(self.state, GradBucket(b, bucket is self.buckets[-1], bucket.parameters, buffer))
        if not hasattr(future, "wait"):
            raise DtlibError(
                f"The hook {self.name} returned {type(future).__name__}: return a torch.futures.Future of the averaged "
                "bucket, such as all_reduce(..., async_op=True).get_future()."
            )
        self._futures[bucket] = future

    def collect(self, buckets: Sequence[Bucket], flags: list[bool]) -> tuple[list, list]:
        """Wait for the hooks and write the averages into the buckets."""
        arrived = super().collect(buckets, flags)
        for bucket in buckets:
            average, flat = self._futures.pop(bucket).wait(), bucket.buffer.flat
            average = average[0] if isinstance(average, list | tuple) else average
            if average.numel() != flat.numel():
                raise DtlibError(
                    f"The hook {self.name} returned {average.numel()} numbers for a bucket of {flat.numel()}: return "
                    "one for each."
                )
            # Gradients are views of the bucket, so copy the average if the hook returned other memory.
            if average.data_ptr() != flat.data_ptr() or average.dtype != flat.dtype:
                flat.copy_(average.view(-1))
        # A parameter also counts as used if its average is not zero: error feedback may add gradients of earlier steps.
        for used, bucket in zip(arrived[0], buckets, strict=True):
            used[:] = [some or bool(view.any()) for some, view in zip(used, bucket.buffer.views, strict=True)]
        return arrived
