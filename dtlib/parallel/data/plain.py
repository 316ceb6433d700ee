"""Data parallelism, to be read from top to bottom: three classes, each a few lines more than the one before.

Every rank has the whole model and an equal slice of the batch. Gradients are averaged over ranks, and so all of them
take the same step:

    rank 0   forward   backward -> gradients \\                   / the same average   step
    rank 1   forward   backward -> gradients  } all_reduce, /N  {  the same average   step
    rank 2   forward   backward -> gradients /                   \\ the same average   step

When do the gradients of layers 4, 3, 2 and 1 travel, and in how many messages?

    DataParallelNaive      computes   B4 B3 B2 B1               one a parameter, after the backward pass
                           sends                  4  3  2  1
    DataParallelHooks      computes   B4 B3 B2 B1               each as soon as it is ready
                           sends         4  3  2  1
    DataParallelBuckets    computes   B4 B3 B2 B1               several together, as soon as the last is ready
                           sends            43    21
"""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup


class DataParallelNaive(nn.Module):
    """``loss.backward()``, ``model.average_gradients()``, ``optimizer.step()``. Rank 0's values hold at construction.

    Contract: as many samples, ``len(x)``, on every rank; each parameter that requires a gradient gets one.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None):
        super().__init__()
        self.module, self.group, self.size = module, group, dist.get_world_size(group)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.in_a_step = False  # between its first forward pass and the end of its backward pass
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group_src=0, group=group)

    def forward(self, *args: object, **kwargs: object) -> object:
        if self.training and torch.is_grad_enabled() and not self.in_a_step:
            for buffer in self.module.buffers():  # later passes leave them alone, as autograd may have saved some
                dist.broadcast(buffer, group_src=0, group=self.group)
            self.in_a_step = True
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        for parameter in self.trained:
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.size
        self.in_a_step = False


class DataParallelHooks(DataParallelNaive):
    """``loss.backward()``, ``optimizer.step()``: gradients leave during the backward pass, which waits for the last."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None):
        super().__init__(module, group)
        self.buckets = [[parameter] for parameter in reversed(self.trained)]  # the last layer's are ready first
        self.ready, self.travelling = set(), []  # in this backward pass: parameters; flat tensors and their works
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """A hook: autograd has added up all of this parameter's gradient."""
        if not self.ready:  # the first one: autograd, call this at the end of the backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self.average_gradients)
        self.ready.add(parameter)
        # All ranks send buckets in one order, whatever the order in which gradients are ready.
        while (rest := self.buckets[len(self.travelling) :]) and self.ready.issuperset(rest[0]):
            flat = self.flat(rest[0])
            self.travelling.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        if self.travelling:
            self.travelling[-1][1].is_completed()  # who asks moves the messages of some backends on

    def flat(self, bucket: list) -> Tensor:
        return bucket[0].grad

    def average_gradients(self) -> None:
        for flat, work in self.travelling:
            work.wait()
            flat /= self.size
        self.ready, self.travelling, self.in_a_step = set(), [], False


class DataParallelBuckets(DataParallelHooks):
    """The same with few large messages: neighbours share a bucket of up to ``bucket_cap_mb`` MiB."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None, bucket_cap_mb: float = 25):
        super().__init__(module, group)
        self.buckets = [[]]
        for parameter in reversed(self.trained):
            if self.buckets[-1] and sum(p.nbytes for p in [*self.buckets[-1], parameter]) > bucket_cap_mb * 2**20:
                self.buckets.append([])
            self.buckets[-1].append(parameter)

    def flat(self, bucket: list) -> Tensor:
        """All gradients in one tensor, of which they become views: what arrives there is theirs."""
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = piece.view_as(parameter)
        return flat


# DataParallel, in full.py, adds parameters that some ranks or all do not use, no_sync() for several backward passes a
# step, batches of different sizes, ranks that run out of them (join), dtypes side by side, a progress thread where
# cores are idle, and a small first bucket. Its hooks are in gradients/reducer.py, its memory in gradients/buckets.py.
# contract.py refuses what lies outside of the contracts above, where dtlib is installed: this file needs torch alone.
