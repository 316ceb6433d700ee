"""A torch process group that runs its collectives on a dtlib communicator.

torch calls one method here for each function of ``torch.distributed``; its C++ code (DDP, functional collectives)
calls some methods directly. Each method translates its arguments, starts operations of the communicator, and returns a
``Work``. Ranks are ranks of the group. Lists of tensors travel as one tensor.

torch uses this subclass *as* the group, for tensors on all devices. The communicator decides how each tensor travels;
CUDA tensors use NCCL or pinned memory (comm/torch/).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtlib.comm import waiting
from dtlib.comm.objects import ObjectOperations
from dtlib.comm.slow_link import CALLER_TAGS
from dtlib.comm.torch.backend_work import GroupError, GroupWork, joined, torchs_errors
from dtlib.comm.torch.reductions import dense, factor, moved, named

# This tag is for the group's own messages; lower tags are for callers.
TAG_OF_NEW_GROUPS = CALLER_TAGS - 1
Tensors = list[torch.Tensor]


class Group(dist.ProcessGroup):
    """A torch process group over ``comm``.

    Args:
        comm: the communicator; ``shutdown`` sets it to None.
        members: the communicator's world ranks; empty for all ranks.
        forget: ``forget(group)`` is called by ``shutdown``.
    """

    _together: list[GroupWork] | None = None  # works collected between _start_coalescing and _end_coalescing

    def __init__(self, store: dist.Store, comm: ObjectOperations, members: list[int], forget: Callable[[Group], None]):
        super().__init__(comm.rank, comm.size)
        # A Communicator. It is not imported here, because files import only downward.
        self.comm: Any = comm
        self.members = members
        self._store = store
        self._forget = forget
        self._name = self._description = ""

    def __repr__(self) -> str:
        return f"Group({self._name!r}, rank={self.rank()}, size={self.size()})"

    # Properties that torch reads

    def getBackendName(self) -> str:
        return "dtlib"

    name = getBackendName

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description):
        self._description = description

    @property
    def _device_types(self):
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device):
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._alive().time_limit = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Drop the communicator: MPI frees it once all members have done so and synchronise again."""
        if self.comm is not None:
            self.comm = self._store = None
            self._forget(self)

    abort = shutdown

    # Collectives

    def allreduce(self, tensors: Tensors, opts: c10d.AllreduceOptions | None = None) -> dist.Work:
        opts = opts or c10d.AllreduceOptions()
        if any(tensor.is_sparse for tensor in tensors):
            several = [partial(self.allreduce, [tensor], opts) for tensor in tensors]
            return self._each(several) if several[1:] else self._all_reduce_sparse(*tensors, opts)
        for tensor in tensors:
            warn_of_activations(tensor)
        calls = [self._to_reduce(tensor, opts) for tensor in tensors]
        starts = [partial(self._alive().all_reduce, **each) for each in calls]
        return self._begin(opts, starts, tensors, self._division(opts, [each["tensor"] for each in calls]))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: c10d.BroadcastOptions | None = None) -> dist.Work:
        opts = opts or c10d.BroadcastOptions()
        if self.rank() != opts.rootRank:
            warn_of_activations(tensors[0])
        starts = [partial(self._alive().broadcast, moved(tensor), opts.rootRank) for tensor in tensors]
        return self._begin(opts, starts, tensors)

    def reduce(self, tensors: Tensors, opts: c10d.ReduceOptions) -> dist.Work:
        reduce = partial(self._alive().reduce, root=opts.rootRank)
        starts = [partial(reduce, **self._to_reduce(tensor, opts)) for tensor in tensors]
        return self._begin(opts, starts, tensors, self._division(opts, tensors if self.rank() == opts.rootRank else []))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: c10d.AllgatherOptions | None = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: c10d.AllgatherOptions | None = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        starts = [partial(self._alive().all_gather, moved(output), moved(input)) for output, input in pairs]
        return self._begin(opts or c10d.AllgatherOptions(), starts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, output_lists: list[Tensors], inputs: Tensors, opts: c10d.AllgatherOptions | None = None
    ) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        pairs = zip(output_lists, inputs, strict=True)
        return self._each([partial(self._all_gather, outputs, input, opts) for outputs, input in pairs])

    def allgather_coalesced(
        self, output_lists: list[Tensors], inputs: Tensors, opts: c10d.AllgatherOptions | None = None
    ) -> dist.Work:
        # `output_lists` has one list per rank, with tensors like all `inputs`. `allgather` needs one list per input.
        return self.allgather([list(outputs) for outputs in zip(*output_lists, strict=True)], inputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: c10d.ReduceScatterOptions | None = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: c10d.ReduceScatterOptions | None = None
    ) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        starts = [
            partial(self._alive().reduce_scatter, dense(output), **self._to_reduce(input, opts, in_place=False))
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._begin(opts, starts, outputs, self._division(opts, outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Tensors, input_lists: list[Tensors], opts: c10d.ReduceScatterOptions | None = None
    ) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        pairs = zip(outputs, input_lists, strict=True)
        return self._each([partial(self._reduce_scatter_list, output, inputs, opts) for output, inputs in pairs])

    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: c10d.GatherOptions) -> dist.Work:
        [mine] = inputs
        whole = finish = None
        if self.rank() == opts.rootRank:
            [outputs] = output_lists
            whole, finish = self._output_memory(outputs, mine)
        start = partial(self._alive().gather, whole, moved(mine), opts.rootRank)
        return self._begin(opts, [start], output_lists, finish)

    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: c10d.ScatterOptions) -> dist.Work:
        [out] = outputs
        whole = None
        if self.rank() == opts.rootRank:
            [inputs] = input_lists
            self._check_list(inputs, out)
            whole = torch.cat([moved(tensor).reshape(-1) for tensor in inputs])
        start = partial(self._alive().scatter, moved(out), whole, opts.rootRank)
        return self._begin(opts, [start], outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (), opts: c10d.AllToAllOptions | None = None,
    ) -> dist.Work:  # fmt: skip
        # Always pass split sizes, even equal ones: all ranks must pass them or none, and another rank may need them.
        equal = [[len(tensor) // self.size()] * self.size() for tensor in (output, input)]
        sizes = output_sizes or equal[0], input_sizes or equal[1]
        start = partial(self._alive().all_to_all, moved(output), moved(input), *sizes)
        return self._begin(opts or c10d.AllToAllOptions(), [start], [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: c10d.AllToAllOptions | None = None) -> dist.Work:
        self._check_own(outputs, inputs[self.rank()] if len(inputs) == self.size() else None)
        # The tensors of a list travel as one flat tensor, which is split into the outputs at the end.
        sent, buffers = torch.cat([moved(one).reshape(-1) for one in inputs]), [moved(one) for one in outputs]
        received = sent.new_empty(sum(one.numel() for one in buffers))
        sizes = [[one.numel() for one in buffers], [moved(one).numel() for one in inputs]]

        def finish():
            for one, piece in zip(buffers, received.split(sizes[0]), strict=True):
                one.copy_(piece.view_as(one))

        start = partial(self._alive().all_to_all, received, sent, *sizes)
        return self._begin(opts or c10d.AllToAllOptions(), [start], outputs, finish)

    def barrier(self, opts: c10d.BarrierOptions | None = None) -> dist.Work:
        return self._begin(opts or c10d.BarrierOptions(), [self._alive().barrier], [])

    # Point to point

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> dist.Work:
        [tensor] = tensors
        return self._begin(None, [partial(self._alive().send, moved(tensor), dest, self._own(tag))], tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        [tensor] = tensors
        return self._begin(None, [partial(self._alive().recv, moved(tensor), source, self._own(tag))], tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> NoReturn:
        raise GroupError("recv from an unknown rank is not supported by dtlib: pass src= or group_src=.")

    # Coalescing: several operations as one work

    def _start_coalescing(self, device):
        self._together = []

    def _end_coalescing(self, device):
        works, self._together = self._together, None
        assert works is not None
        return joined(works)

    # From torch's arguments to operations of the communicator

    def _alive(self):
        if self.comm is None:
            raise GroupError("This process group was destroyed: create a new one with init_process_group or new_group.")
        return self.comm

    def _own(self, tag):
        if not 0 <= tag < TAG_OF_NEW_GROUPS:
            raise GroupError(f"tag={tag}: the backend dtlib has tags from 0 to {TAG_OF_NEW_GROUPS - 1}.")
        return tag

    def _begin(self, opts, starts, result, finish=None) -> GroupWork:
        """Start operations of the communicator, and wait for them if torch's caller is synchronous.

        ``finish()`` copies the results into the caller's tensors.
        """
        if not waiting.idle():
            # Every call is a chance to advance pending operations.
            waiting.advance_all()
        limit = None if opts is None else max(opts.timeout.total_seconds(), 0) or None
        with torchs_errors():
            # A time limit of this call needs a handle, because `GroupWork` sets the limit on it.
            if opts is None or opts.asyncOp or limit is not None:
                work = GroupWork([start(async_op=True) for start in starts], result, finish, limit)
                if self._together is not None:
                    self._together.append(work)
                return work
            for start in starts:
                start()
            if finish is not None:
                finish()
        return GroupWork((), result)

    def _each(self, starts) -> GroupWork:
        """Return one work for several; each function in ``starts`` starts one."""
        works = [start() for start in starts]
        return works[0] if len(works) == 1 else joined(works)

    def _to_reduce(self, tensor, opts, in_place=True):
        """Return arguments: the tensor to send, multiplied by the reduction's factor, and the reduction's name.

        For the mean of integers it is the sum, which ``_division`` divides.
        """
        with torchs_errors():
            name = named(opts.reduceOp, tensor)
        mine, by = dense(tensor), factor(opts.reduceOp)
        name = "sum" if name == "mean" and not mine.is_floating_point() else name
        return {"tensor": mine if by is None else mine.mul_(by) if in_place else mine * by, "op": name}

    def _division(self, opts, outputs):
        """Return a function that divides sums of integers for a mean, without the fraction, as NCCL does; or None."""
        dense_ones = [dense(output) for output in outputs] if opts.reduceOp == dist.ReduceOp.AVG else []
        sums = [one for one in dense_ones if not one.is_floating_point()]
        return (lambda: [one.div_(self.size(), rounding_mode="trunc") for one in sums]) if sums else None

    def _all_reduce_sparse(self, tensor, opts):
        """Add sparse tensors entry by entry; this waits for the other ranks. Other reductions are refused."""
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise GroupError(f"all_reduce of sparse tensors supports SUM, not {opts.reduceOp}: pass tensor.to_dense().")
        mine = tensor.detach().coalesce()
        with torchs_errors():
            everyone = self._alive().all_gather_object((mine.indices().cpu(), mine.values().cpu()))
        indices, values = zip(*everyone, strict=True)
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), mine.shape).coalesce()
        with torch.no_grad():
            # Copy into the tensor itself: a detached sparse tensor would have separate entries.
            tensor.copy_(total)
        return GroupWork((), [tensor])

    def _reduce_scatter_list(self, output, inputs, opts):
        if all(tensor.shape == output.shape for tensor in inputs):
            return self.reduce_scatter_single(output, torch.stack([tensor.detach() for tensor in inputs]), opts)
        # The sizes differ: reduce each tensor to the rank that needs it.
        self._check_own(inputs, output)
        totals = [tensor.detach().clone() for tensor in inputs]
        reduce = self._alive().reduce
        starts = [partial(reduce, root=root, **self._to_reduce(total, opts)) for root, total in enumerate(totals)]
        divide = self._division(opts, [mine := totals[self.rank()]])
        return self._begin(opts, starts, [output], lambda: (divide and divide(), output.detach().copy_(mine)))

    def _all_gather(self, outputs, input, opts):
        if all(output.shape == input.shape for output in outputs):
            whole, finish = self._output_memory(outputs, input)
            return self._begin(opts, [partial(self._alive().all_gather, whole, moved(input))], [outputs], finish)
        # The sizes differ: broadcast each tensor from its rank.
        self._check_own(outputs, input)
        outputs[self.rank()].detach().copy_(input)
        starts = [partial(self._alive().broadcast, moved(output), root) for root, output in enumerate(outputs)]
        return self._begin(opts, starts, [outputs])

    def _output_memory(self, outputs, like):
        """Return memory for every rank's tensor, and a function that copies it into ``outputs``."""
        self._check_list(outputs, like)
        like = moved(like)
        whole = torch.empty((self.size(), *like.shape), dtype=like.dtype, device=like.device)

        def finish():
            for output, received in zip(outputs, whole, strict=True):
                moved(output).copy_(received)

        return whole, finish

    def _check_own(self, tensors, mine):
        """Refuse a list without one tensor per rank, or whose tensor for this rank is not shaped like ``mine``."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if mine is None or len(tensors) != self.size() or shapes[self.rank()] != tuple(mine.shape):
            raise GroupError(
                f"The list must have one tensor for each of {self.size()} ranks, with the shape "
                f"{'of its own' if mine is None else tuple(mine.shape)} for rank {self.rank()}, but it has {shapes}."
            )

    def _check_list(self, tensors, like):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(shapes) != self.size() or any(tensor.numel() != like.numel() for tensor in tensors):
            raise GroupError(
                f"The list must have {self.size()} tensors of the shape {tuple(like.shape)}, one for each rank, but it "
                f"has {shapes}."
            )


def warn_of_activations(tensor: torch.Tensor) -> None:
    """Warn if a collective writes into a tensor of the autograd graph."""
    if tensor.requires_grad and tensor.grad_fn is not None and torch.is_grad_enabled():
        warnings.warn(
            "This collective changes a tensor in the graph of autograd without gradients, so backward() raises an "
            "error if it needs the old values. Pass tensor.detach().clone(), or call "
            "torch.distributed.nn.functional, whose collectives have gradients.",
            stacklevel=2,
        )


def group_over(comm: ObjectOperations) -> Group:
    """Return a process group on ``comm``. This is not collective: each rank may call it at any time.

    torch translates world ranks, such as ``src=0``, only for groups in its tables, so the group is added to them. A
    communicator has one group at a time, because ``dist.batch_isend_irecv`` accepts operations of one group only.
    """
    if group := _groups.get(comm):
        return group
    _groups[comm] = group = Group(dist.HashStore(), comm, list(comm.members), lambda _: None)
    world: Any = c10d._world
    key = _GroupKey(group, lambda key: (world.pg_group_ranks.pop(key, None), world.pg_map.pop(key, None)))
    world.pg_group_ranks[key] = {member: rank for rank, member in enumerate(comm.members)}
    world.pg_map[key] = ("dtlib", group.get_group_store())
    return group


_groups: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # communicator -> group


class _GroupKey(weakref.ref):
    """A weak reference to a group, as a key of torch's tables. A strong one would keep the group alive for ever."""

    def __init__(self, group, forget):
        super().__init__(group, forget)
        self._hash = hash(group)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return self is other or self() is other
