"""Data parallelism, to be read from top to bottom: three classes; each extends the previous one in a few lines.

Every rank has the whole model and an equal slice of the batch. Ranks average their gradients, so all ranks take the
same step:

    rank 0   forward   backward -> gradients \\                   / the same average   step
    rank 1   forward   backward -> gradients  } all_reduce, /N  {  the same average   step
    rank 2   forward   backward -> gradients /                   \\ the same average   step

When are the gradients of layers 4, 3, 2 and 1 sent, and in how many messages?

    DataParallelNaive      computes   B4 B3 B2 B1               one per parameter, after the backward pass
                           sends                  4  3  2  1
    DataParallelHooks      computes   B4 B3 B2 B1               each one when it is ready
                           sends         4  3  2  1
    DataParallelBuckets    computes   B4 B3 B2 B1               several together, when the last one is ready
                           sends            4+3   2+1
"""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup


class DataParallelNaive(nn.Module):
    """Call in turn ``loss.backward()``, ``model.average_gradients()``, ``optimizer.step()``.

    Rank 0's parameters are broadcast at the start.

    Contract: every rank has the same number of samples; every trained parameter gets a gradient.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None):
        super().__init__()
        self.module, self.group, self.size = module, group, dist.get_world_size(group)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.in_a_step = False  # from the first forward pass until the backward pass ends
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group_src=0, group=group)

    def forward(self, *args: object, **kwargs: object) -> object:
        if self.training and torch.is_grad_enabled() and not self.in_a_step:
            # Only once per step: a second broadcast would change buffers that autograd saved in the first forward pass.
            for buffer in self.module.buffers():
                dist.broadcast(buffer, group_src=0, group=self.group)
            self.in_a_step = True
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Average each gradient over ranks, one message per parameter."""
        for parameter in self.trained:
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.size
        self.in_a_step = False


class DataParallelHooks(DataParallelNaive):
    """Send gradients during the backward pass, which ends after the last message.

    Call ``loss.backward()``, then ``optimizer.step()``.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None):
        super().__init__(module, group)
        self.buckets = [[parameter] for parameter in reversed(self.trained)]  # the last layer's gradient is ready first
        # In this backward pass: parameters with a gradient, and (flat tensor, work) for each message in flight.
        self.ready, self.in_flight = set(), []
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Launch all complete buckets. Autograd calls this hook when it has accumulated a parameter's gradient."""
        if not self.ready:  # first gradient: ask autograd to call average_gradients after the backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self.average_gradients)
        self.ready.add(parameter)
        # All ranks must launch all-reduces in the same order, even if their gradients become ready in another order.
        while (rest := self.buckets[len(self.in_flight) :]) and self.ready.issuperset(rest[0]):
            flat = self.flat(rest[0])
            self.in_flight.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        if self.in_flight:
            self.in_flight[-1][1].is_completed()  # in some backends, messages only progress when polled

    def flat(self, bucket: list) -> Tensor:
        """Return one tensor to all-reduce: here, the single gradient of the bucket."""
        return bucket[0].grad

    def average_gradients(self) -> None:
        """Wait for all messages, then divide by the number of ranks."""
        for flat, work in self.in_flight:
            work.wait()
            flat /= self.size
        self.ready, self.in_flight, self.in_a_step = set(), [], False


class DataParallelBuckets(DataParallelHooks):
    """The same with few large messages: neighbouring parameters share a bucket of up to ``bucket_cap_mb`` MiB."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None, bucket_cap_mb: float = 25):
        super().__init__(module, group)
        self.buckets = [[]]
        for parameter in reversed(self.trained):
            if self.buckets[-1] and sum(p.nbytes for p in [*self.buckets[-1], parameter]) > bucket_cap_mb * 2**20:
                self.buckets.append([])
            self.buckets[-1].append(parameter)

    def flat(self, bucket: list) -> Tensor:
        """Copy the bucket's gradients into one tensor and make them views of it, so they receive the averages."""
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = piece.view_as(parameter)
        return flat


# DataParallel in full.py adds: unused parameters, gradient accumulation with no_sync(), batches of different sizes,
# ranks that run out of batches (join), several dtypes, a thread that polls messages if cores are idle, and a small
# first bucket. It divides before it sends. Its hooks are in gradients/reducer.py and its bucket memory in
# gradients/buckets.py. Where dtlib is installed, checks.py wraps these methods and checks the contracts above. This
# file imports only torch. docs/explanation/how_a_gradient_travels.md follows one gradient from here to MPI.
