"""Operations on a torch ``ProcessGroup`` (gloo, NCCL), for programs that already have one.

Values and payload bytes are those of ``Communicator``. Two things are not promised: interruption (Ctrl-C ends
collectives on gloo only), and the choice of an algorithm.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtlib.comm.call import Call, callers_line
from dtlib.comm.objects import ObjectOperations
from dtlib.comm.torch.group_work import GroupHandle, GroupTensor, Reduced, backends_of, disjoint, failure, make_group
from dtlib.comm.types import AnyTensor, T
from dtlib.comm.watch import board, recorder
from dtlib.errors import RESET, CommunicationError

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided at the end
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _options(kind, **values):
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


class ProcessGroupCommunicator(ObjectOperations):
    """The operations of ``Communicator`` over a ``torch.distributed.ProcessGroup``.

    Args:
        group: the process group; it keeps its own timeout.
        time_limit: seconds until a wait raises ``WaitTimeout``, if the wait can be interrupted; None leaves the timeout
            to the group.
        members: the world ranks of this group; default: the ranks in torch's tables, or 0 to ``size - 1``.

    Tensors are on the CPU or on a GPU, on all ranks alike. The group copies a tensor if it cannot send it from its
    device (a CUDA tensor on gloo, a CPU tensor on NCCL alone). The backend decides how float16 and bfloat16 are
    combined. Bytes are counted as a ring would send them, whatever the backend does. Messages count as 0, because the
    backend does not report them. ``all_reduce`` refuses an ``algorithm=`` other than None. Keep the handle of a send
    until ``wait()``: gloo drops the message with it.
    """

    simulated = False
    verify = False

    def __init__(
        self, group: dist.ProcessGroup, time_limit: float | None = None, members: Sequence[int] | None = None,
        name: str = "group",
    ):  # fmt: skip
        self.group = group
        self.time_limit = time_limit
        self.name = name
        self.rank = group.rank()
        self.size = group.size()
        self.broken: str | None = None  # the reason why it cannot be used any more
        self.backends = backends_of(group)
        self.members = tuple(members or c10d._world.pg_group_ranks.get(group) or range(self.size))

    @property
    def world_rank(self) -> int:
        """This rank's world rank."""
        return self.members[self.rank]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, {', '.join(self.backends.values())})"

    # Point to point

    def send(self, tensor: T, dest: int, tag: int = 0, async_op: bool = False) -> T | GroupHandle[T]:
        """Send ``tensor`` to rank ``dest``, which calls ``recv`` with the same shape and dtype; return ``tensor``."""
        self._check_rank(dest, "send", "dest")
        content = self._carried(tensor, "send", writes=False)
        call = self._call("send", tensor, (dest,), peer=dest, tag=tag)
        begin = partial(self.group.send, [content.octets], dest, tag)
        return self._start(call, content, begin, lambda: tensor, async_op, content.nbytes)

    def recv(self, tensor: T, source: int, tag: int = 0, async_op: bool = False) -> T | GroupHandle[T]:
        """Receive from rank ``source`` into ``tensor``, in place; return ``tensor``."""
        self._check_rank(source, "recv", "source")
        content = self._carried(tensor, "recv", writes=True)
        call = self._call("recv", tensor, (source,), peer=source, tag=tag)
        begin = partial(self.group.recv, [content.octets], source, tag)
        return self._start(call, content, begin, content.store, async_op)

    # One to all, all to one

    def broadcast(self, tensor: T, root: int = 0, async_op: bool = False) -> T | GroupHandle[T]:
        """Copy the values of ``tensor`` on rank ``root`` to ``tensor`` on every rank, in place; return ``tensor``."""
        self._check_rank(root, "broadcast", "root")
        content = self._carried(tensor, "broadcast", writes=self.rank != root)
        begin = partial(self.group.broadcast, [content.octets], _options(c10d.BroadcastOptions, rootRank=root))
        # Counted as a ring that starts at the root: the last rank sends nothing.
        sent = content.nbytes if (self.rank + 1) % self.size != root else 0
        call = self._call("broadcast", tensor, peer=root)
        return self._start(call, content, begin, content.store, async_op, sent)

    def reduce(self, tensor: T, root: int = 0, op: str = "sum", async_op: bool = False) -> T | GroupHandle[T]:
        """Combine ``tensor`` over all ranks into ``tensor`` on rank ``root``; other ranks keep their values."""
        self._check_rank(root, "reduce", "root")
        content = self._carried(tensor, "reduce", writes=self.rank == root)
        wire = Reduced(content.flat, tensor, op, "reduce")
        # Partial results must not appear in the caller's tensor on other ranks.
        moving = wire.values if self.rank == root else wire.values.clone()
        options = _options(c10d.ReduceOptions, reduceOp=REDUCE_OPS[op], rootRank=root)

        def finish():
            if self.rank != root:
                return tensor
            wire.store_result(self.size)
            return content.store()

        call = self._call("reduce", tensor, op=op, peer=root)
        sent = 0 if self.rank == root else content.nbytes
        return self._start(call, content, partial(self.group.reduce, [moving], options), finish, async_op, sent)

    def scatter(
        self, out: T, tensor: AnyTensor | None = None, root: int = 0, async_op: bool = False
    ) -> T | GroupHandle[T]:
        """Send chunk r of the ``tensor`` on rank ``root`` to ``out`` on rank r; return ``out``.

        ``tensor`` has ``size`` equal chunks. Ranks other than ``root`` may pass None.
        """
        self._check_rank(root, "scatter", "root")
        mine = self._carried(out, "scatter", writes=True)
        chunks = []
        if self.rank == root:
            whole = self._carried(tensor, "scatter", writes=False)
            self._check_whole(tensor, whole.flat.numel(), out, mine.flat.numel(), "scatter")
            octets = disjoint(whole.octets, mine.octets)
            chunks = [list(octets.chunk(self.size)) if mine.nbytes else [mine.octets] * self.size]
        begin = partial(self.group.scatter, [mine.octets], chunks, _options(c10d.ScatterOptions, rootRank=root))
        sent = (self.size - 1) * mine.nbytes if self.rank == root else 0
        call = self._call("scatter", out, peer=root)
        return self._start(call, mine, begin, mine.store, async_op, sent)

    def gather(self, out: T, tensor: AnyTensor, root: int = 0, async_op: bool = False) -> T | GroupHandle[T]:
        """Copy every rank's ``tensor``, in rank order, into ``out`` on rank ``root``; return ``out``.

        Ranks other than ``root`` may pass None for ``out``.
        """
        self._check_rank(root, "gather", "root")
        mine = self._carried(tensor, "gather", writes=False)
        chunks, finish = [], lambda: out
        if self.rank == root:
            whole = self._carried(out, "gather", writes=True)
            self._check_whole(out, whole.flat.numel(), tensor, mine.flat.numel(), "gather")
            chunks = [list(whole.octets.chunk(self.size)) if mine.nbytes else [mine.octets] * self.size]
            finish = whole.store
        begin = partial(self.group.gather, chunks, [mine.octets], _options(c10d.GatherOptions, rootRank=root))
        sent = 0 if self.rank == root else mine.nbytes
        call = self._call("gather", tensor, peer=root)
        return self._start(call, mine, begin, finish, async_op, sent)

    # All to all

    def all_reduce(
        self, tensor: T, op: str = "sum", async_op: bool = False, algorithm: str | None = None
    ) -> T | GroupHandle[T]:
        """Combine ``tensor`` over all ranks, in place; return ``tensor``.

        ``op`` is ``sum``, ``mean``, ``max``, ``min`` or ``prod``.
        """
        if algorithm is not None:
            raise CommunicationError(
                f"all_reduce(algorithm={algorithm!r}): a process group of torch chooses its algorithm; leave "
                "algorithm= out, or use a communicator over MPI."
            )
        content = self._carried(tensor, "all_reduce", writes=True)
        wire = Reduced(content.flat, tensor, op, "all_reduce")
        begin = partial(self.group.allreduce, [wire.values], _options(c10d.AllreduceOptions, reduceOp=REDUCE_OPS[op]))

        def finish():
            wire.store_result(self.size)
            return content.store()

        sent = 2 * content.nbytes * (self.size - 1) // self.size
        call = self._call("all_reduce", tensor, op=op)
        return self._start(call, content, begin, finish, async_op, sent)

    def reduce_scatter(
        self, out: T, tensor: AnyTensor, op: str = "sum", async_op: bool = False, overwrite: bool = False
    ) -> T | GroupHandle[T]:
        """Combine ``tensor``, of ``size`` equal chunks, over all ranks; return ``out`` with chunk r on rank r."""
        mine = self._carried(out, "reduce_scatter", writes=True)
        whole = self._carried(tensor, "reduce_scatter", writes=False)
        wire, wide = Reduced(mine.flat, out, op, "reduce_scatter"), Reduced(whole.flat, tensor, op, "reduce_scatter")
        self._check_whole(tensor, whole.flat.numel(), out, mine.flat.numel(), "reduce_scatter")
        if self.backends[mine.on] == "gloo":
            # gloo's reduce_scatter is an all_reduce, too, but it cannot be polled: call the all_reduce instead.
            everything, options = wide.values.clone(), _options(c10d.AllreduceOptions, reduceOp=REDUCE_OPS[op])
            begin = partial(self.group.allreduce, [everything], options)
        else:
            everything, options = None, _options(c10d.ReduceScatterOptions, reduceOp=REDUCE_OPS[op])
            begin = partial(self.group._reduce_scatter_base, wire.values, wide.values, options)

        def finish():
            if everything is not None:
                wire.values.copy_(everything.view(self.size, -1)[self.rank] if mine.nbytes else everything)
            wire.store_result(self.size)
            return mine.store()

        call = self._call("reduce_scatter", tensor, op=op)
        return self._start(call, mine, begin, finish, async_op, (self.size - 1) * mine.nbytes)

    def all_gather(self, out: T, tensor: AnyTensor, async_op: bool = False) -> T | GroupHandle[T]:
        """Copy every rank's ``tensor``, in rank order, into ``out`` on every rank; return ``out``."""
        mine = self._carried(tensor, "all_gather", writes=False)
        whole = self._carried(out, "all_gather", writes=True)
        self._check_whole(out, whole.flat.numel(), tensor, mine.flat.numel(), "all_gather")
        begin = partial(self.group._allgather_base, whole.octets, mine.octets, c10d.AllgatherOptions())
        call = self._call("all_gather", tensor)
        return self._start(call, mine, begin, whole.store, async_op, (self.size - 1) * mine.nbytes)

    def all_to_all(
        self, out: T, tensor: AnyTensor, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, async_op: bool = False,
    ) -> T | GroupHandle[T]:  # fmt: skip
        """Send chunk r of ``tensor`` to rank r, and receive chunk r of ``out`` from rank r; return ``out``.

        Chunks are equal, or have ``input_split_sizes[r]`` and ``output_split_sizes[r]`` rows.
        """
        whole = self._carried(out, "all_to_all", writes=True)
        content = self._carried(tensor, "all_to_all", writes=False)
        width = content.flat.element_size()
        sizes = [
            [count * width for count in counts]
            for counts in self._pieces(out, tensor, output_split_sizes, input_split_sizes)[:2]
        ]
        octets = disjoint(content.octets, whole.octets)
        # Always pass split sizes, even equal ones: without them the group uses another algorithm, and other ranks may
        # need them.
        begin = partial(self.group.alltoall_base, whole.octets, octets, *sizes, c10d.AllToAllOptions())
        sent = content.nbytes - sizes[1][self.rank]
        return self._start(self._call("all_to_all", tensor), content, begin, whole.store, async_op, sent)

    def barrier(self, async_op: bool = False) -> GroupHandle[None] | None:
        """Wait until every rank has called ``barrier``."""
        # The group's own barrier would choose a device itself. A sum on the group's own device has the same effect.
        home = "cpu" if "cpu" in self.backends else "cuda"
        token = GroupTensor(torch.zeros(1, device=home), "barrier", True, self.backends)

        def finish():
            # On a GPU the sum is only queued. This copy waits until it is complete.
            token.flat.cpu()

        return self._start(self._call("barrier"), token, partial(self.group.allreduce, [token.flat]), finish, async_op)

    # Other communicators

    def split(self, color: int | None, key: int = 0) -> ProcessGroupCommunicator | None:
        """Return a communicator of the ranks that pass the same ``color``, ordered by ``key``, then by rank.

        All ranks call it. A rank that passes None for ``color`` gets None. The new group is not in torch's tables, so
        torch's functions do not accept it; its methods work. It lives until the process ends, as torch's own groups do.
        """
        asked = self.all_gather_object((color, key, uuid.uuid4().hex))
        if color is None:
            return None
        ranks = sorted(
            (rank for rank, (its_color, _, _) in enumerate(asked) if its_color == color),
            key=lambda rank: (asked[rank][1], rank),
        )
        # Rank 0 drew the random name, so it is new in the store even if several communicators share the store.
        store = dist.PrefixStore(f"dtlib/{asked[0][2]}/{ranks[0]}", self.group.get_group_store())
        group = make_group(self.backends, store, ranks.index(self.rank), len(ranks))
        members = [self.members[rank] for rank in ranks]
        return ProcessGroupCommunicator(group, self.time_limit, members, f"{self.name}/{color}")

    # From the arguments of a call to a handle

    def _carried(self, tensor, operation, writes) -> GroupTensor:
        return GroupTensor(tensor, operation, writes, self.backends)

    def _call(self, operation, tensor=None, peers=None, **facts) -> Call:
        members = self.members if peers is None else [self.members[peer] for peer in peers]
        shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
        return Call(operation, shape, dtype, self.world_rank, members, self.name, **facts)

    def _start(self, call, content, begin, finish, async_op, sent=0):
        """Start the work on a carried tensor; ``sent`` are the payload bytes that are counted for this rank."""
        if self.broken:
            raise CommunicationError(f"This communicator {self.broken}, so ranks are out of step. {RESET}")
        event = None
        board.last = call
        if recorder.recordings:
            call.where = callers_line()
            event = recorder.event_of(call, lane="background" if async_op else "main")
            event.bytes = sent
        try:
            work = begin()
        except RuntimeError as error:
            self.broken = f"failed in {call}"
            raise failure(call, error) from error
        handle = GroupHandle(self, call, work, content.on, finish, (content, begin), event, blocking=not async_op)
        return handle if async_op else handle.wait()
