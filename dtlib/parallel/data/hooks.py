"""Communication hooks: how the gradients of a bucket are averaged is a function's choice, with torch's signature.

    gradients of a bucket have arrived   hook(state, bucket) -> future
    end of the backward pass          future.wait() is the average, of the bucket's length

A hook gets this rank's own gradients, and has to divide by the number of ranks itself. Which parameters ranks have used
travels beside it, over a communicator of its own, so that it adds no wait to a hook's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dtlib.comm import Communicator
from dtlib.comm.waiting import Handle
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import FlatBuffer


class GradBucket:
    """A bucket as torch's hooks know it (``torch.distributed.GradBucket``, which only C++ can make)."""

    def __init__(self, index: int, is_last: bool, parameters: list[nn.Parameter], buffer: FlatBuffer):
        self._index, self._is_last, self._parameters, self._views = index, is_last, parameters, buffer.views
        self._flat = buffer.flat.view(-1)  # a hook may resize it, as batched_powerSGD_hook does

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        """Of this backward pass, the bucket that leaves last."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """This rank's gradients in one dimension."""
        return self._flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, in the shapes of ``parameters()``."""
        return self._views

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


class CommHook:
    """``hook(state, bucket)`` in place of ``all_reduce``, for the buckets of one model. All ranks make one.

    Hooks of ``dtlib.parallel.compression`` and of ``torch.distributed.algorithms.ddp_comm_hooks`` work. They return a
    ``torch.futures.Future`` of the average. ``before`` is the hook that the model has already, if any: then this is
    refused.
    """

    def __init__(self, state: object, hook: Callable, comm: Communicator, buckets: list,
                 before: "CommHook | None" = None):  # fmt: skip
        self.name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
        if before is not None:
            raise DtlibError(f"This model has the hook {before.name} already: wrap it anew for another one.")
        if not callable(hook):
            raise DtlibError(f"register_comm_hook(state, {hook!r:.40}): give a function hook(state, bucket).")
        names = comm.all_gather_object(self.name)
        if len(set(names)) > 1:
            raise DtlibError(f"register_comm_hook: ranks gave {', '.join(names)}: give all ranks the same hook.")
        self.state, self.hook, self.comm, self.buckets = state, hook, comm.split(0), buckets
        for bucket in buckets:  # a hook may resize the memory of gradients, so flags get their own
            bucket.flags_apart = True

    def launch(self, bucket: "GradientBucket") -> "Averaged":
        """Begin with the gradients and flags that are in this bucket's memory."""
        buffer = bucket.filled()
        flags = self.comm.all_reduce(buffer.tail, async_op=True)
        index, is_last = self.buckets.index(bucket), bucket is self.buckets[-1]
        future = self.hook(self.state, GradBucket(index, is_last, bucket.parameters, buffer))
        if not hasattr(future, "wait"):
            raise DtlibError(
                f"The hook {self.name} returned {type(future).__name__}: return a torch.futures.Future of the averaged "
                "bucket, such as all_reduce(..., async_op=True).get_future()."
            )
        return Averaged(self.name, flags, future, buffer.flat)


class Averaged:
    """In place of the handle of an ``all_reduce``: at the end of ``wait()`` the average is in the bucket's memory."""

    def __init__(self, name: str, flags: Handle, future: torch.futures.Future, flat: torch.Tensor):
        self._name, self._flags, self._future, self._flat = name, flags, future, flat

    def wait(self) -> None:
        self._flags.wait()
        average = self._future.wait()
        average = average[0] if isinstance(average, list | tuple) else average
        if average.numel() != self._flat.numel():
            raise DtlibError(
                f"The hook {self._name} gave {average.numel()} numbers for a bucket of {self._flat.numel()}: give one "
                "for each."
            )
        if average.data_ptr() != self._flat.data_ptr() or average.dtype != self._flat.dtype:
            self._flat.copy_(average.view(-1))


@dataclass(eq=False)
class GradientBucket:
    """Gradients that travel together. Behind them travels a number a parameter: whether this rank has a gradient; and
    one that says whether it weights them by ``batch_size``. There is memory for them from the launch on, as long as a
    gradient is a view of it."""

    parameters: list[nn.Parameter]
    flags_apart: bool = False
    buffer: FlatBuffer | None = None  # until the end of the backward pass
    handle: Handle | Averaged | None = None  # of the all_reduce, once it is launched

    def make_room(self) -> FlatBuffer:
        first, flags = self.parameters[0], len(self.parameters) + 1
        shapes = [parameter.shape for parameter in self.parameters]
        self.buffer = FlatBuffer(shapes, first.dtype, first.device, 0 if self.flags_apart else flags, False)
        if self.flags_apart:
            self.buffer.tail = self.buffer.flat.new_zeros(flags)
        return self.buffer

    def filled(self) -> FlatBuffer:
        assert self.buffer is not None
        return self.buffer

    def flags(self) -> list[torch.Tensor]:
        """What lies behind gradients that are views of a bucket."""
        size = sum(parameter.numel() for parameter in self.parameters)
        views = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        room = views[0].untyped_storage().nbytes() // views[0].element_size() if views else 0
        return [views[0].as_strided((room - size,), (1,), size)] if room > size else []
