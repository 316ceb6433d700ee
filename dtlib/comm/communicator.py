"""``Communicator``: point-to-point messages and collectives over MPI.

Every rank of the communicator calls the same collectives in the same order. CPU tensors (torch tensors, or numpy
arrays where torch is not needed) travel through mpi4py, without a copy if they are contiguous. CUDA tensors travel
through NCCL or through host memory (torch/nccl.py, types.py).
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, overload

import numpy as np

from dtlib.comm import lifetime, types
from dtlib.comm.algorithms import chunks_of, pieces_of, same_memory
from dtlib.comm.call import Call
from dtlib.comm.objects import ObjectOperations
from dtlib.comm.selection import choose
from dtlib.comm.slow_link import (
    CALLER_TAGS,
    COLLECTIVE_TAGS,
    FIRST_COLLECTIVE_TAG,
    NOTES_OF_COLLECTIVES,
    SlowLink,
    Wire,
)
from dtlib.comm.types import AnyTensor, Name, No, Sizes, T, Yes, payload
from dtlib.comm.verify import receive_message, send_message, verified
from dtlib.comm.waiting import IncomingLink, Link, Operation, Queue, Scratch
from dtlib.comm.watch.call_counts import living
from dtlib.errors import CommunicationError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    from dtlib.comm.mpi4py_comm import Mpi4pyComm


class Communicator(ObjectOperations):
    """Operations over an mpi4py communicator.

    Args:
        mpi: an ``mpi4py.MPI.Comm``.
        time_limit: seconds until a wait raises ``WaitTimeout``; None waits for ever.
        verify: compare the arguments of all ranks before each collective; on in notebooks, off in scripts. It must
            be equal on all ranks. Without it, ranks with different shapes or dtypes may silently get wrong values.

    ``members[r]`` is the world rank of rank r, and ``world_rank`` is this rank's world rank. Every operation on tensors
    accepts ``async_op=True`` and then returns a handle with ``wait()`` and ``done()``. ``algorithm=`` of ``all_reduce``
    overrides the choice by size and number of ranks (selection.py); ``comm.mpi`` has MPI's own collectives.
    Counterparts: mpi4py's upper-case methods and the functions of ``torch.distributed``.
    """

    simulated = False  # True if the other ranks do not exist (one_rank.py)

    def __init__(self, mpi: MPI.Comm, time_limit: float | None = None, verify: bool = False, name: str = "world"):
        self._mpi = mpi
        self._prepare(mpi.Get_rank(), mpi.Get_size(), world_ranks(mpi), time_limit, verify, name)

    def _prepare(self, rank, size, members, time_limit=None, verify=False, name="world"):
        self.time_limit = time_limit
        self.verify = verify
        self.on_board = True  # whether the board shows its operations as this rank's last call
        self.name = name
        self.rank = rank
        self.size = size
        self.wire = None  # an emulated slow network, or None
        self.members = members  # world ranks
        # None: not decided yet. False: CUDA tensors travel through host memory.
        self._nccl = None
        self._queue = Queue()
        self._buffers = Scratch()
        self.collective_count = 0  # collectives that this rank has called
        self._splits = 0
        self._messages = 0  # messages sent minus messages received
        living.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    @property
    def world_rank(self) -> int:
        """This rank's world rank."""
        return self.members[self.rank]

    @property
    def mpi(self) -> Mpi4pyComm:
        """mpi4py's communicator of the same ranks: ``comm.mpi.Allreduce(MPI.IN_PLACE, array)`` (mpi4py_comm.py)."""
        from dtlib.comm.mpi4py_comm import Mpi4pyComm

        return Mpi4pyComm(self)

    @property
    def group(self) -> ProcessGroup:
        """torch's ``ProcessGroup`` of the same ranks: ``dist.all_reduce(tensor, group=comm.group)``.

        This communicator carries out its operations, so they are counted, drawn and timed out in the same way.
        ``dist.get_rank(group)`` and global ranks such as ``src=0`` need a default group. Create it once with
        ``dist.init_process_group("dtlib", init_method="dtlib://")``, after ``import dtlib.backend``.
        """
        from dtlib.comm.torch.group_on_communicator import group_over

        return group_over(self)

    def tensors_by_kind(self) -> dict[str, list]:
        """Return the buffers that collectives keep between calls (measure/buffers.py)."""
        return {"communication": self._buffers.tensors()}

    def wait_for(self, request: MPI.Request, buffers: object, description: str) -> None:
        """Wait for an mpi4py request of this communicator; the wait can be interrupted and can time out.

        ``buffers`` stay alive until the request completes.
        """
        call, link = self._call(description, peers=self.members), lifetime.ForeignRequests(self._mpi)
        Operation(call, link, iter([[request]]), lambda: None, buffers).start(self, in_turn=False)

    def gather_and_free(self, operation: str, obj: object = None) -> list:
        """All-gather a picklable ``obj``; then free the communicators that no rank uses any more.

        Returns every rank's ``obj`` in rank order. No rank returns before all ranks have called it.
        """
        garbage = lifetime.garbage_among(self.members)
        parts = [b""] * self.size
        parts[self.rank] = pickle.dumps((obj, garbage))
        link = self._side_link(self._next_tag())
        call = self._call(operation, None, self.members, self.collective_count)
        Operation(call, link, self._compared(call, lifetime.exchange(link, parts)), lambda: None, parts).start(self)
        gathered = [pickle.loads(one) for one in parts]
        lifetime.free({member: garbage for member, (_, garbage) in zip(self.members, gathered, strict=True)})
        return [obj for obj, _ in gathered]

    # Point to point

    @overload
    def send(self, tensor: T, dest: int, tag: int = ..., async_op: No = ...) -> T: ...
    @overload
    def send(self, tensor: T, dest: int, tag: int = ..., *, async_op: Yes) -> Operation[T]: ...
    def send(self, tensor: T, dest: int, tag: int = 0, async_op: bool = False) -> T | Operation[T]:
        """Send ``tensor`` to rank ``dest``, which calls ``recv`` with the same shape and dtype; return ``tensor``."""
        self._check_rank(dest, "send", "dest")
        content = payload(tensor, "send", writes=False)
        call = self._call("send", tensor, (self.members[dest],), peer=dest, tag=tag)
        link = self._link(tag)
        steps = send_message(link, content.flat, dest, call, self._notes(tag))
        self._messages += 1
        return Operation(call, link, steps, lambda: tensor, content).start(self, async_op, in_turn=False)

    @overload
    def recv(self, tensor: T, source: int, tag: int = ..., async_op: No = ...) -> T: ...
    @overload
    def recv(self, tensor: T, source: int, tag: int = ..., *, async_op: Yes) -> Operation[T]: ...
    def recv(self, tensor: T, source: int, tag: int = 0, async_op: bool = False) -> T | Operation[T]:
        """Receive from rank ``source`` into ``tensor``, in place; return ``tensor``."""
        self._check_rank(source, "recv", "source")
        content = payload(tensor, "recv", writes=True)
        call = self._call("recv", tensor, (self.members[source],), peer=source, tag=tag)
        link = self._incoming(tag)
        steps = receive_message(link, content.flat, source, call, self._notes(tag))
        self._messages -= 1
        return Operation(call, link, steps, content.store, content).start(self, async_op, in_turn=False)  # type: ignore[return-value]

    # One to all, all to one

    @overload
    def broadcast(self, tensor: T, root: int = ..., async_op: No = ...) -> T: ...
    @overload
    def broadcast(self, tensor: T, root: int = ..., *, async_op: Yes) -> Operation[T]: ...
    def broadcast(self, tensor: T, root: int = 0, async_op: bool = False) -> T | Operation[T]:
        """Copy the values of ``tensor`` on rank ``root`` to ``tensor`` on every rank, in place; return ``tensor``."""
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor)):
            return nccl.broadcast(tensor, root, async_op)
        self._check_rank(root, "broadcast", "root")
        content = payload(tensor, "broadcast", writes=self.rank != root)
        flat = content.flat
        # On the root nothing is written, so autograd may still use the tensor: do not mark it as modified.
        finish = content.store if self.rank != root else lambda: tensor
        return self._collective("broadcast", tensor, (flat, root), finish, async_op, flat=flat, peer=root)

    @overload
    def reduce(self, tensor: T, root: int = ..., op: str = ..., async_op: No = ...) -> T: ...
    @overload
    def reduce(self, tensor: T, root: int = ..., op: str = ..., *, async_op: Yes) -> Operation[T]: ...
    def reduce(self, tensor: T, root: int = 0, op: str = "sum", async_op: bool = False) -> T | Operation[T]:
        """Combine ``tensor`` over all ranks into ``tensor`` on rank ``root``; other ranks keep their values."""
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor)):
            return nccl.reduce(tensor, root, op, async_op)
        self._check_rank(root, "reduce", "root")
        content = payload(tensor, "reduce", writes=self.rank == root)
        combine = types.combiner(tensor, op, "reduce")
        # Other ranks reduce a copy, because partial results must not appear in the caller's tensor.
        flat = content.flat if self.rank == root else content.flat.copy()
        finish = content.finisher(op, self.size) if self.rank == root else lambda: tensor
        arguments = flat, root, combine
        return self._collective("reduce", tensor, arguments, finish, async_op, flat=flat, op=op, peer=root)

    @overload
    def scatter(self, out: T, tensor: AnyTensor | None = ..., root: int = ..., async_op: No = ...) -> T: ...
    @overload
    def scatter(self, out: T, tensor: AnyTensor | None = ..., root: int = ..., *, async_op: Yes) -> Operation[T]: ...
    def scatter(
        self, out: T, tensor: AnyTensor | None = None, root: int = 0, async_op: bool = False
    ) -> T | Operation[T]:
        """Send chunk r of the ``tensor`` on rank ``root`` to ``out`` on rank r; return ``out``.

        ``tensor`` has ``size`` equal chunks. Ranks other than ``root`` may pass None.
        """
        if getattr(out, "is_cuda", False) and (nccl := self._on_gpus(out)):
            return nccl.scatter(out, tensor, root, async_op)
        self._check_rank(root, "scatter", "root")
        mine = payload(out, "scatter", writes=True)
        chunks = self._cut(tensor, out, "scatter", writes=False)[1] if self.rank == root else None
        arguments = mine.flat, chunks, root
        return self._collective("scatter", out, arguments, mine.store, async_op, flat=mine.flat, peer=root)

    @overload
    def gather(self, out: T, tensor: AnyTensor, root: int = ..., async_op: No = ...) -> T: ...
    @overload
    def gather(self, out: T, tensor: AnyTensor, root: int = ..., *, async_op: Yes) -> Operation[T]: ...
    def gather(self, out: T, tensor: AnyTensor, root: int = 0, async_op: bool = False) -> T | Operation[T]:
        """Copy every rank's ``tensor``, in rank order, into ``out`` on rank ``root``; return ``out``.

        Ranks other than ``root`` may pass None for ``out``.
        """
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor)):
            return nccl.gather(out, tensor, root, async_op)
        self._check_rank(root, "gather", "root")
        mine = payload(tensor, "gather", writes=False)
        whole = chunks = None
        if self.rank == root:
            whole, chunks = self._cut(out, tensor, "gather", writes=True)
        finish = whole.store if whole else lambda: out
        arguments = chunks, mine.flat, root
        return self._collective("gather", tensor, arguments, finish, async_op, flat=mine.flat, peer=root)

    # All to all

    @overload
    def all_reduce(self, tensor: T, op: str = ..., async_op: No = ..., algorithm: Name = ...) -> T: ...
    @overload
    def all_reduce(self, tensor: T, op: str = ..., *, async_op: Yes, algorithm: Name = ...) -> Operation[T]: ...
    def all_reduce(
        self, tensor: T, op: str = "sum", async_op: bool = False, algorithm: Name = None
    ) -> T | Operation[T]:
        """Combine ``tensor`` over all ranks, element by element, in place; every rank gets the same result.

        ``op`` is ``sum``, ``mean``, ``max``, ``min`` or ``prod``; ``algorithm`` is ``ring``, ``recursive_doubling``,
        ``rabenseifner``, ``tree`` or ``naive``. Returns ``tensor``.
        """
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.all_reduce(tensor, op, async_op)
        content = payload(tensor, "all_reduce", writes=True)
        arguments = content.flat, types.combiner(tensor, op, "all_reduce")
        finish = content.finisher(op, self.size)
        return self._collective("all_reduce", tensor, arguments, finish, async_op, algorithm, content.flat, op=op)

    @overload
    def reduce_scatter(self, out: T, tensor: AnyTensor, op: str = ..., async_op: No = ...,
        overwrite: bool = ...) -> T: ...  # fmt: skip
    @overload
    def reduce_scatter(self, out: T, tensor: AnyTensor, op: str = ..., *, async_op: Yes,
        overwrite: bool = ...) -> Operation[T]: ...  # fmt: skip
    def reduce_scatter(
        self, out: T, tensor: AnyTensor, op: str = "sum", async_op: bool = False, overwrite: bool = False
    ) -> T | Operation[T]:
        """Combine ``tensor`` over all ranks; rank r gets chunk r of the result in ``out``. Return ``out``.

        ``tensor`` has ``size`` equal chunks. Its values stay unchanged, with two exceptions. If ``out`` is chunk r of
        ``tensor``, the other chunks hold partial results afterwards. With ``overwrite=True``, all chunks may be
        overwritten, and the operation allocates no memory.
        """
        if getattr(out, "is_cuda", False) and (nccl := self._on_gpus(out)):
            return nccl.reduce_scatter(out, tensor, op, async_op)
        mine = payload(out, "reduce_scatter", writes=True)
        combine = types.combiner(out, op, "reduce_scatter")
        chunks = self._cut(tensor, out, "reduce_scatter", writes=False)[1]
        overlap = any(np.may_share_memory(mine.flat, chunk) for chunk in chunks)
        if overlap and not same_memory(mine.flat, chunks[self.rank]):
            # `out` overlaps another chunk: copy, because the result must not overwrite a chunk that is still to be
            # sent.
            chunks = [chunk.copy() for chunk in chunks]
        algorithm = "ring_over_input" if overwrite and not overlap else None
        finish = mine.finisher(op, self.size)
        arguments = mine.flat, chunks, combine
        return self._collective("reduce_scatter", tensor, arguments, finish, async_op, algorithm, mine.flat, op=op)

    @overload
    def all_gather(self, out: T, tensor: AnyTensor, async_op: No = ...) -> T: ...
    @overload
    def all_gather(self, out: T, tensor: AnyTensor, *, async_op: Yes) -> Operation[T]: ...
    def all_gather(self, out: T, tensor: AnyTensor, async_op: bool = False) -> T | Operation[T]:
        """Copy every rank's ``tensor``, in rank order, into ``out`` on every rank.

        ``out`` has ``size`` times as many elements as ``tensor`` and the same dtype; returns ``out``.
        """
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor)):
            return nccl.all_gather(out, tensor, async_op)
        mine = payload(tensor, "all_gather", writes=False)
        whole, chunks = self._cut(out, tensor, "all_gather", writes=True)
        if not same_memory(chunks[self.rank], mine.flat):
            chunks[self.rank][...] = mine.flat
        return self._collective("all_gather", tensor, (chunks,), whole.store, async_op, flat=whole.flat)

    @overload
    def all_to_all(self, out: T, tensor: AnyTensor, output_split_sizes: Sizes = ..., input_split_sizes: Sizes = ...,
                   async_op: No = ...) -> T: ...  # fmt: skip
    @overload
    def all_to_all(self, out: T, tensor: AnyTensor, output_split_sizes: Sizes = ..., input_split_sizes: Sizes = ...,
                   *, async_op: Yes) -> Operation[T]: ...  # fmt: skip
    def all_to_all(
        self, out: T, tensor: AnyTensor, output_split_sizes: Sizes = None, input_split_sizes: Sizes = None,
        async_op: bool = False,
    ) -> T | Operation[T]:  # fmt: skip
        """Send chunk r of ``tensor`` to rank r, and receive chunk r of ``out`` from rank r. Return ``out``.

        Without split sizes, both tensors have ``size`` equal chunks. Split sizes count rows (first dimension):
        ``input_split_sizes[r]`` rows are sent to rank r, and ``output_split_sizes[r]`` rows are received from rank r.
        The sender's and the receiver's number must be equal; zero is allowed. Either all ranks pass split sizes, or
        none. Counterpart: ``torch.distributed.all_to_all_single``.
        """
        if getattr(out, "is_cuda", False) and (nccl := self._on_gpus(out)):
            return nccl.all_to_all(out, tensor, output_split_sizes, input_split_sizes, async_op)
        whole = payload(out, "all_to_all", writes=True)
        content = payload(tensor, "all_to_all", writes=False)
        received, sent, counted = self._pieces(out, tensor, output_split_sizes, input_split_sizes)
        flat = content.flat.copy() if np.shares_memory(whole.flat, content.flat) else content.flat
        arguments = pieces_of(whole.flat, received), pieces_of(flat, sent)
        counts = np.array([sent, received]) if counted else None
        return self._collective("all_to_all", tensor, arguments, whole.store, async_op, flat=whole.flat, counts=counts)

    @overload
    def barrier(self, async_op: No = ...) -> None: ...
    @overload
    def barrier(self, async_op: Yes) -> Operation[None]: ...
    def barrier(self, async_op: bool = False) -> Operation[None] | None:
        """Wait until every rank has called ``barrier``."""
        return self._collective("barrier", None, (), lambda: None, async_op)

    # Other communicators

    @overload
    def split(self, color: int, key: int = 0) -> Communicator: ...
    @overload
    def split(self, color: None, key: int = 0) -> None: ...

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks that pass the same ``color``, ordered by ``key``, then by rank.

        All ranks call it. A rank that passes None for ``color`` gets None.
        """
        from mpi4py import MPI

        for name, number, lowest in (("color", 0 if color is None else color, 0), ("key", key, -(2**31))):
            if not isinstance(number, int) or not lowest <= number < 2**31:
                raise CommunicationError(
                    f"split({name}={number!r}): pass a color from 0 on, or None, and a key. Both are whole numbers of "
                    "32 bits."
                )
        # MPI's split blocks and cannot be interrupted, so first wait, interruptibly, until all ranks are here.
        asked = self.gather_and_free("split", (color, lifetime.draw(self.world_rank)))
        mpi = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        self._splits += 1
        name = f"{self.name}/{self._splits}.{color}"
        if color is None:
            return None
        group = Communicator(mpi, self.time_limit, self.verify, name)
        lifetime.free_when_unused(mpi, next(drawn for its_color, drawn in asked if its_color == color), group.members)
        group.wire = self.wire  # the same emulated network card
        return group

    def emulate_network(self, latency: float, bandwidth: float) -> Communicator:
        """Return a communicator of the same ranks whose messages are delayed: EMULATED, for lessons, never for claims.

        Each message takes ``latency`` seconds plus its bytes / ``bandwidth`` (bytes per second). All ranks call it.
        """
        wire = Wire(latency, bandwidth)
        slow = self.split(0)
        slow.wire = wire
        return slow

    # Splitting a tensor into chunks

    def _cut(self, whole, part, operation, writes):
        """Return ``whole`` as a payload and as ``size`` chunks, each of the size of ``part``."""
        content = payload(whole, operation, writes)
        self._check_whole(whole, content.flat.size, part, payload(part, operation, False).flat.size, operation)
        return content, chunks_of(content.flat, self.size)

    # From the arguments of a call to a pending operation

    def _next_tag(self) -> int:
        """Return a separate tag for each collective, so that the messages of pending collectives cannot match."""
        self.collective_count += 1
        return FIRST_COLLECTIVE_TAG + self.collective_count % COLLECTIVE_TAGS

    def _call(self, operation, tensor=None, peers=(), number=0, **facts) -> Call:
        shape, dtype, called = getattr(tensor, "shape", None), getattr(tensor, "dtype", None), self.collective_count
        return Call(operation, shape, dtype, self.world_rank, peers, self.name, number, called=called, **facts)

    def _link(self, tag: int) -> Link:
        """Return the link of one operation, delayed if a slow network is emulated."""
        arguments = self._mpi, self.rank, self.size, tag, self._buffers
        return SlowLink(*arguments, self.wire) if self.wire else Link(*arguments)

    def _incoming(self, tag: int) -> IncomingLink:
        """Return the receiving end of one message."""
        return IncomingLink(self._mpi, self.rank, self.size, tag, self._buffers)

    def _side_link(self, tag: int) -> Link:
        """Return a link for dtlib's own messages, which are neither delayed nor counted."""
        return Link(self._mpi, self.rank, self.size, tag, self._buffers)

    def _notes(self, tag: int) -> Link | None:
        """Return the link for notes about messages with this tag, or None without ``verify``."""
        if not isinstance(tag, int) or not 0 <= tag < CALLER_TAGS:
            raise CommunicationError(f"tag={tag!r}: tags are whole numbers from 0 to {CALLER_TAGS - 1}.")
        return self._side_link(tag + CALLER_TAGS) if self.verify else None

    def _collective(self, operation, tensor, arguments, finish, async_op, algorithm=None, flat=None, **facts):
        """Start a collective: run its algorithm on ``(link, *arguments)``, after this communicator's earlier ones.

        The size of ``flat`` decides the algorithm. ``finish()`` returns the operation's result. ``facts`` are ``op``
        and ``peer`` of the call.
        """
        # An unknown algorithm is refused before anything is sent or published.
        steps = choose(operation, 0 if flat is None else flat.nbytes, self.size, algorithm)
        # A separate tag keeps the messages apart from other pending collectives.
        link = self._link(self._next_tag())
        members, number = self.members, self.collective_count
        shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
        call = Call(
            operation, shape, dtype, members[self.rank], members, self.name, number, algorithm=algorithm or "", **facts
        )
        # In a notebook all ranks compare their calls before the algorithm's first message is sent.
        moving = steps(link, *arguments)
        if self.verify:
            moving = self._compared(call, moving)
        # The handle keeps the tensor, so that the peak of memory does not depend on when messages arrive.
        operation = Operation(call, link, moving, finish, flat)
        operation.tensor = tensor  # type: ignore[attr-defined]
        return operation.start(self, async_op)

    def _compared(self, call, steps):
        """Return ``steps``, preceded by a comparison of all ranks' calls if ``verify`` is set."""
        return verified(self._side_link(NOTES_OF_COLLECTIVES), call, steps) if self.verify and self.size > 1 else steps

    def _on_gpus(self, tensor, algorithm=None):
        """Return the NCCL communicator for this CUDA tensor, or None if it travels through host memory."""
        if algorithm is not None or self.wire or self.simulated or self._queue.broken:
            return None
        if self._nccl is None:
            from dtlib.comm.torch.nccl import nccl_communicator

            self._nccl = nccl_communicator(self, tensor.device) or False
        return self._nccl or None


def world_ranks(mpi: MPI.Comm) -> tuple[int, ...]:
    """Return the world ranks of the members of a communicator."""
    from mpi4py import MPI

    group, everyone = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, list(range(group.size)), everyone))
    finally:
        group.Free()
        everyone.Free()
