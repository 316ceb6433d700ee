"""The operations on a torch ``ProcessGroup`` (gloo, NCCL), for programs that have one already.

Values and payload bytes are those of ``Communicator``. Two things are not promised here: interruption (Ctrl-C reaches
collectives on gloo), and the choice of an algorithm.
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
from dtlib.comm.torch.group_work import Carried, GroupHandle, Reduced, backends_of, disjoint, failure, make_group
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
    """``Communicator``'s operations over a ``torch.distributed.ProcessGroup`` or one of its backends.

    Args:
        group: the group; it keeps its own timeout.
        time_limit: seconds that a wait may take before it ends as ``WaitTimeout``, where it can be interrupted; None
            leaves it to the group.
        members: the ranks of this group as the world counts them; by default as torch knows them, or 0 to ``size - 1``.
        store: the group's store, which ``split`` needs where the group itself does not tell.

    Tensors live on the CPU or on a GPU; one that the group does not carry where it lives (a GPU's on gloo, a CPU's on
    NCCL alone) goes through a copy. All ranks pass tensors on the same kind of device. float16 and bfloat16 are
    combined as the backend does it. Bytes are counted as a ring sends them, whatever the backend does, and messages,
    which it does not tell, as 0. ``algorithm=`` other than None is refused.
    """

    simulated = False
    verify = False

    def __init__(
        self, group: dist.ProcessGroup, time_limit: float | None = None, members: Sequence[int] | None = None,
        name: str = "group", store: dist.Store | None = None,
    ):  # fmt: skip
        self.group = group
        self.store = store
        self.time_limit = time_limit
        self.name = name
        self.rank = group.rank()
        self.size = group.size()
        self.broken: str | None = None  # why it cannot be used any more
        self.backends = backends_of(group)
        self.members = tuple(members or c10d._world.pg_group_ranks.get(group) or range(self.size))

    @property
    def world_rank(self) -> int:
        """This rank as the world counts it."""
        return self.members[self.rank]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, {', '.join(self.backends.values())})"

    # Point to point

    def send(self, tensor: T, dest: int, tag: int = 0, async_op: bool = False) -> T | GroupHandle[T]:
        """Send ``tensor`` to rank ``dest``, which calls ``recv`` with the same shape and dtype; returns it."""
        self._check_rank(dest, "send", "dest")
        content = self._carried(tensor, "send", writes=False)
        call = self._call("send", tensor, (dest,), peer=dest, tag=tag)
        begin = partial(self.group.send, [content.octets], dest, tag)
        return self._start(call, content, begin, lambda: tensor, async_op, content.nbytes)

    def recv(self, tensor: T, source: int, tag: int = 0, async_op: bool = False) -> T | GroupHandle[T]:
        """Receive from rank ``source`` into ``tensor``, in place; returns it."""
        self._check_rank(source, "recv", "source")
        content = self._carried(tensor, "recv", writes=True)
        call = self._call("recv", tensor, (source,), peer=source, tag=tag)
        begin = partial(self.group.recv, [content.octets], source, tag)
        return self._start(call, content, begin, content.store, async_op)

    # One to all, all to one

    def broadcast(
        self, tensor: T, root: int = 0, async_op: bool = False, algorithm: str | None = None
    ) -> T | GroupHandle[T]:
        """Give every rank the values that ``tensor`` has on rank ``root``, in place; returns it."""
        self._check_rank(root, "broadcast", "root")
        content = self._carried(tensor, "broadcast", writes=self.rank != root, algorithm=algorithm)
        begin = partial(self.group.broadcast, [content.octets], _options(c10d.BroadcastOptions, rootRank=root))
        # Round the ring from the root, the last one does not pass it on.
        sent = content.nbytes if (self.rank + 1) % self.size != root else 0
        call = self._call("broadcast", tensor, peer=root)
        return self._start(call, content, begin, content.store, async_op, sent)

    def reduce(
        self, tensor: T, root: int = 0, op: str = "sum", async_op: bool = False, algorithm: str | None = None
    ) -> T | GroupHandle[T]:
        """Like ``all_reduce``, but only rank ``root`` gets the result; the others keep their values."""
        self._check_rank(root, "reduce", "root")
        content = self._carried(tensor, "reduce", writes=self.rank == root, algorithm=algorithm)
        wire = Reduced(content.flat, tensor, op, "reduce")
        # Partial results must not show in the caller's tensor.
        moving = wire.values if self.rank == root else wire.values.clone()
        options = _options(c10d.ReduceOptions, reduceOp=REDUCE_OPS[op], rootRank=root)

        def finish():
            if self.rank != root:
                return tensor
            wire.bring_home(self.size)
            return content.store()

        call = self._call("reduce", tensor, op=op, peer=root)
        sent = 0 if self.rank == root else content.nbytes
        return self._start(call, content, partial(self.group.reduce, [moving], options), finish, async_op, sent)

    def scatter(
        self, out: T, tensor: AnyTensor | None = None, root: int = 0, async_op: bool = False
    ) -> T | GroupHandle[T]:
        """Give rank r chunk r of the ``tensor`` of rank ``root``, which has ``size`` equal chunks; returns ``out``."""
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
        """The reverse: ``out`` on rank ``root`` gets every rank's ``tensor``, in rank order; None elsewhere will do."""
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
        """Combine ``tensor`` over all ranks (``sum``, ``mean``, ``max``, ``min``, ``prod``), in place; returns it."""
        content = self._carried(tensor, "all_reduce", writes=True, algorithm=algorithm)
        wire = Reduced(content.flat, tensor, op, "all_reduce")
        begin = partial(self.group.allreduce, [wire.values], _options(c10d.AllreduceOptions, reduceOp=REDUCE_OPS[op]))

        def finish():
            wire.bring_home(self.size)
            return content.store()

        sent = 2 * content.nbytes * (self.size - 1) // self.size
        call = self._call("all_reduce", tensor, op=op)
        return self._start(call, content, begin, finish, async_op, sent)

    def reduce_scatter(
        self, out: T, tensor: AnyTensor, op: str = "sum", async_op: bool = False, algorithm: str | None = None,
        overwrite: bool = False,
    ) -> T | GroupHandle[T]:  # fmt: skip
        """Combine ``tensor``, of ``size`` equal chunks, over all ranks; rank r gets chunk r in ``out``; returns it."""
        mine = self._carried(out, "reduce_scatter", writes=True, algorithm=algorithm)
        whole = self._carried(tensor, "reduce_scatter", writes=False)
        wire, wide = Reduced(mine.flat, out, op, "reduce_scatter"), Reduced(whole.flat, tensor, op, "reduce_scatter")
        self._check_whole(tensor, whole.flat.numel(), out, mine.flat.numel(), "reduce_scatter")
        if self.backends[mine.on] == "gloo":
            # gloo's own is an all_reduce too, whose end nobody can see without waiting for it.
            everything, options = wide.values.clone(), _options(c10d.AllreduceOptions, reduceOp=REDUCE_OPS[op])
            begin = partial(self.group.allreduce, [everything], options)
        else:
            everything, options = None, _options(c10d.ReduceScatterOptions, reduceOp=REDUCE_OPS[op])
            begin = partial(self.group._reduce_scatter_base, wire.values, wide.values, options)

        def finish():
            if everything is not None:
                wire.values.copy_(everything.view(self.size, -1)[self.rank] if mine.nbytes else everything)
            wire.bring_home(self.size)
            return mine.store()

        call = self._call("reduce_scatter", tensor, op=op)
        return self._start(call, mine, begin, finish, async_op, (self.size - 1) * mine.nbytes)

    def all_gather(
        self, out: T, tensor: AnyTensor, async_op: bool = False, algorithm: str | None = None
    ) -> T | GroupHandle[T]:
        """Put every rank's ``tensor`` one after the other, in rank order, into ``out``, on every rank; returns it."""
        mine = self._carried(tensor, "all_gather", writes=False, algorithm=algorithm)
        whole = self._carried(out, "all_gather", writes=True)
        self._check_whole(out, whole.flat.numel(), tensor, mine.flat.numel(), "all_gather")
        begin = partial(self.group._allgather_base, whole.octets, mine.octets, c10d.AllgatherOptions())
        call = self._call("all_gather", tensor)
        return self._start(call, mine, begin, whole.store, async_op, (self.size - 1) * mine.nbytes)

    def all_to_all(
        self, out: T, tensor: AnyTensor, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, async_op: bool = False,
    ) -> T | GroupHandle[T]:  # fmt: skip
        """Send chunk r of ``tensor`` to rank r; chunk r of ``out`` comes from it: equal ones, or so many rows."""
        whole = self._carried(out, "all_to_all", writes=True)
        content = self._carried(tensor, "all_to_all", writes=False)
        width = content.flat.element_size()
        sizes = [
            [count * width for count in counts]
            for counts in self._pieces(out, tensor, output_split_sizes, input_split_sizes)[:2]
        ]
        octets = disjoint(content.octets, whole.octets)
        # Sizes even where all are equal: a group picks another algorithm without, and other ranks may have other sizes.
        begin = partial(self.group.alltoall_base, whole.octets, octets, *sizes, c10d.AllToAllOptions())
        sent = content.nbytes - sizes[1][self.rank]
        return self._start(self._call("all_to_all", tensor), content, begin, whole.store, async_op, sent)

    def barrier(self, async_op: bool = False) -> GroupHandle[None] | None:
        """Wait until every rank has arrived here."""
        # The group's own barrier would pick a device; a sum does the same where the group is at home.
        home = "cpu" if "cpu" in self.backends else "cuda"
        token = Carried(torch.zeros(1, device=home), "barrier", True, self.backends)

        def finish():
            token.flat.cpu()  # a GPU has queued it; here it is over

        return self._start(self._call("barrier"), token, partial(self.group.allreduce, [token.flat]), finish, async_op)

    # Other communicators

    def split(self, color: int | None, key: int = 0) -> ProcessGroupCommunicator | None:
        """A communicator of the ranks that pass the same ``color``, ordered by ``key``, then by rank.

        All ranks call it; who passes None gets None. The new group is known to nobody else: torch's functions take it
        only through its methods. It is kept to the end of the process, as torch keeps its own.
        """
        asked = self.all_gather_object((color, key, uuid.uuid4().hex))
        if color is None:
            return None
        ranks = sorted(
            (rank for rank, (its_color, _, _) in enumerate(asked) if its_color == color),
            key=lambda rank: (asked[rank][1], rank),
        )
        # The name is new in the store, however many communicators share it: rank 0 drew it.
        store = dist.PrefixStore(f"dtlib/{asked[0][2]}/{ranks[0]}", self._store())
        group = make_group(self.backends, store, ranks.index(self.rank), len(ranks))
        members = [self.members[rank] for rank in ranks]
        return ProcessGroupCommunicator(group, self.time_limit, members, f"{self.name}/{color}", store)

    def _store(self):
        if self.store is None:
            try:
                self.store = self.group.get_group_store()
            except (AttributeError, RuntimeError):
                raise CommunicationError(
                    "split needs the store of its group, which is unknown here: pass ProcessGroupCommunicator(group, "
                    "store=...)."
                ) from None
        return self.store

    # From the arguments of a call to a handle

    def _carried(self, tensor, operation, writes, algorithm=None) -> Carried:
        if algorithm is not None:
            raise CommunicationError(
                f"{operation}(algorithm={algorithm!r}): a process group of torch chooses for itself; leave algorithm= "
                "out, or use a communicator over MPI."
            )
        return Carried(tensor, operation, writes, self.backends)

    def _call(self, operation, tensor=None, peers=None, **facts) -> Call:
        members = self.members if peers is None else [self.members[peer] for peer in peers]
        return Call(operation, tensor, self.world_rank, members, self.name, **facts)

    def _start(self, call, content, begin, finish, async_op, sent=0):
        """Begin the work on a carried tensor; ``sent`` are the payload bytes that count for this rank."""
        if self.broken:
            raise CommunicationError(f"This communicator {self.broken}, so ranks are out of step. {RESET}")
        event = None
        board.last = call.operation, call.op, call.peer, "", self.name, 0, False
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
