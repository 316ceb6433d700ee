"""What the methods of a group (group.py) share: from torch's arguments to operations of the communicator."""

import warnings
from functools import partial

import torch
from torch import distributed as dist

from dtlib.backend.reductions import bitwise, dense, factor, moved, named
from dtlib.backend.work import GroupError, GroupWork, joined, torchs_errors
from dtlib.comm import Communicator, waiting
from dtlib.comm.link import CALLER_TAGS

TAG_OF_NEW_GROUPS = CALLER_TAGS - 1  # the group's own messages; tags below are the caller's
WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Operations(dist.ProcessGroup):
    """Of a group that has a communicator ``comm``, or None at its end."""

    comm: Communicator | None = None
    _twin = None  # by which torch's dispatcher sees it (dispatched.py)
    _together = None  # works that are collected between _start_coalescing and _end_coalescing

    def _alive(self):
        if self.comm is None:
            raise GroupError("This process group was destroyed: make a new one with init_process_group or new_group.")
        return self.comm

    def _own(self, tag):
        if not 0 <= tag < TAG_OF_NEW_GROUPS:
            raise GroupError(f"tag={tag}: the backend dtlib has tags from 0 to {TAG_OF_NEW_GROUPS - 1}.")
        return tag

    def _begin(self, opts, starts, result, finish=None) -> GroupWork:
        """Start operations of the communicator, and wait for them where torch says that its caller does.

        ``finish()`` brings home what travelled as a copy.
        """
        if not waiting.idle():
            waiting.advance_all()  # what is under way goes on whenever a program comes by
        limit = opts.timeout.total_seconds() if opts is not None else None
        limit = limit if limit is not None and limit > 0 else None
        with torchs_errors():
            if opts is None or opts.asyncOp or limit is not None:
                handles = [start(async_op=True) for start in starts]
                return self._collected(GroupWork(handles, result, finish, limit))
            for start in starts:
                start()
            if finish is not None:
                finish()
        return GroupWork((), result)

    def _each(self, opts, starts) -> GroupWork:
        """One work of several, each of which ``starts`` begins."""
        works = [start() for start in starts]
        return works[0] if len(works) == 1 else joined(works)

    def _collected(self, work):
        if self._together is not None:
            self._together.append(work)
        return work

    def _all_reduce(self, tensor, opts):
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, opts)
        if function := bitwise(opts.reduceOp):
            return self._fold(function, tensor, tensor, opts)
        if tensor.requires_grad:
            warn_of_activations(tensor)
        if tensor.dtype in WHOLE_NUMBERS and opts.reduceOp == dist.ReduceOp.AVG:
            return self._exact_mean(tensor, opts)
        mine, by, name = self._to_reduce(tensor, opts)
        if by is not None:
            mine.mul_(by)
        return self._begin(opts, [partial(self._alive().all_reduce, mine, name)], [tensor])

    def _exact_mean(self, tensor, opts):
        """Of whole numbers, where their sum divides: all have all of them, and so all ranks refuse, or none.

        Quotients and remainders are added apart, as the sum itself may not fit into the type.
        """
        size = self.size()
        whole = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)

        def finish():
            each = whole.long()
            rest = (each % size).sum(0)
            if (rest % size).any():
                raise GroupError(
                    f"all_reduce(op=AVG) of {str(tensor.dtype)[6:]}: a sum does not divide by {size}, the number "
                    "of ranks, and the mean would be rounded: use op=SUM and divide, or pass tensor.float()."
                )
            tensor.detach().copy_(each.div(size, rounding_mode="floor").sum(0) + rest // size)

        return self._begin(opts, [partial(self._alive().all_gather, whole, tensor.detach())], [tensor], finish)

    def _to_reduce(self, tensor, opts):
        """What travels, what it is multiplied by before, or None, and the communicator's name of the reduction."""
        with torchs_errors():
            name = named(opts.reduceOp, tensor)
        return dense(tensor), factor(opts.reduceOp), name

    def _all_reduce_sparse(self, tensor, opts):
        """Only a sum, of what each rank has, entry by entry; it waits for the others."""
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise GroupError(
                f"all_reduce adds sparse tensors, and does not take {opts.reduceOp}: pass tensor.to_dense()."
            )
        mine = tensor.detach().coalesce()
        with torchs_errors():
            everyone = self._alive().all_gather_object((mine.indices().cpu(), mine.values().cpu()))
        indices, values = zip(*everyone, strict=True)
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), mine.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(total)  # a detached one would have entries of its own
        return GroupWork((), [tensor])

    def _fold(self, function, out, tensor, opts):
        """Reduce what the communicator has no operation for: gather all, and combine them here in rank order."""
        whole = torch.empty((self.size(), *tensor.shape), dtype=tensor.dtype, device=tensor.device)

        def finish():
            total = whole[0]
            for one in whole[1:]:
                total = function(total, one)
            out.detach().copy_(total)

        return self._begin(opts, [partial(self._alive().all_gather, whole, tensor.detach())], [out], finish)

    def _reduce(self, tensor, root, opts):
        if function := bitwise(opts.reduceOp):
            out = tensor if self.rank() == root else tensor.detach().clone()
            return self._fold(function, out, tensor, opts)
        mine, by, name = self._to_reduce(tensor, opts)
        if by is not None:
            mine.mul_(by)
        return self._begin(opts, [partial(self._alive().reduce, mine, root, name)], [tensor])

    def _reduce_scatter(self, output, input, opts):
        if function := bitwise(opts.reduceOp):
            return self._fold_and_cut(function, output, input, opts)
        mine, by, name = self._to_reduce(input, opts)
        if by is not None:
            mine = mine * by
        return self._begin(opts, [partial(self._alive().reduce_scatter, dense(output), mine, name)], [output])

    def _fold_and_cut(self, function, output, input, opts):
        whole = torch.empty_like(input)
        self._fold(function, whole, input, opts).wait()
        output.detach().copy_(whole.reshape(self.size(), *output.shape)[self.rank()])
        return GroupWork((), [output])

    def _reduce_scatter_list(self, output, inputs, opts):
        if all(tensor.shape == output.shape for tensor in inputs):
            return self._reduce_scatter(output, torch.stack([tensor.detach() for tensor in inputs]), opts)
        # Of different sizes: each to the rank that wants it.
        self._check_own(inputs, output)
        totals = [tensor.detach().clone() for tensor in inputs]
        works = [self._reduce(total, root, opts) for root, total in enumerate(totals)]
        return joined(works, [output], partial(output.detach().copy_, totals[self.rank()]))

    def _all_gather(self, outputs, input, opts):
        if all(output.shape == input.shape for output in outputs):
            whole, finish = self._room(outputs, input)
            return self._begin(opts, [partial(self._alive().all_gather, whole, moved(input))], [outputs], finish)
        # Of different sizes: each from the rank that has it.
        self._check_own(outputs, input)
        outputs[self.rank()].detach().copy_(input)
        starts = [partial(self._alive().broadcast, moved(output), root) for root, output in enumerate(outputs)]
        return self._begin(opts, starts, [outputs])

    def _room(self, outputs, like):
        """Memory for every rank's tensor, and how it gets from there into ``outputs``."""
        self._check_list(outputs, like)
        like = moved(like)
        whole = torch.empty((self.size(), *like.shape), dtype=like.dtype, device=like.device)

        def finish():
            for output, come in zip(outputs, whole, strict=True):
                moved(output).copy_(come)

        return whole, finish

    def _check_own(self, tensors, mine):
        """Refuse a list without a tensor for each rank, and one whose tensor for this rank is not like ``mine``."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if mine is None or len(tensors) != self.size() or shapes[self.rank()] != tuple(mine.shape):
            raise GroupError(
                f"One tensor for each of {self.size()} ranks is wanted, that of rank {self.rank()} of the shape "
                f"{'of its own' if mine is None else tuple(mine.shape)}, and the list has {shapes}."
            )

    def _check_list(self, tensors, like):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(shapes) != self.size() or any(tensor.numel() != like.numel() for tensor in tensors):
            raise GroupError(
                f"{self.size()} tensors of the shape {tuple(like.shape)} are wanted, one for each rank, and the list "
                f"has {shapes}."
            )


def warn_of_activations(tensor) -> None:
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        warnings.warn(
            "This collective writes into a tensor in the graph of autograd, which does not know it: gradients do not "
            "pass through, and backward() is refused where it needs the old values. Pass tensor.detach().clone(), or "
            "call torch.distributed.nn.functional, whose collectives have gradients.",
            stacklevel=2,
        )
