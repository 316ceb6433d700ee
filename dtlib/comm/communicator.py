"""The operations: what a rank says to others, and how each becomes a task under way.

Every rank of the communicator calls the same collective in the same order. Tensors on the CPU (torch tensors, or numpy
arrays where torch is not needed) travel through mpi4py without a copy if they are contiguous. Tensors on a CUDA device
travel through NCCL or through host memory (torch/nccl.py, types.py).
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, overload

import numpy as np

from dtlib.comm import lifetime, types
from dtlib.comm.algorithms import chunks_of, pieces_of, same_memory
from dtlib.comm.call import Call
from dtlib.comm.link import CALLER_TAGS, COLLECTIVE_TAGS, FIRST_COLLECTIVE_TAG, NOTES_OF_COLLECTIVES, SlowLink, Wire
from dtlib.comm.objects import ObjectOperations
from dtlib.comm.selection import choose
from dtlib.comm.types import AnyTensor, Name, No, Sizes, T, Yes, payload
from dtlib.comm.verify import receive_message, send_message, verified
from dtlib.comm.waiting import IncomingLink, Link, Operation, Queue, Scratch
from dtlib.comm.watch.in_step import living
from dtlib.errors import CommunicationError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    from dtlib.comm.mpi4py_comm import Mpi4pyComm


class Communicator(ObjectOperations):
    """Operations over an mpi4py communicator.

    Args:
        mpi: an ``mpi4py.MPI.Comm``.
        time_limit: seconds that a wait may take before it ends as ``WaitTimeout``; None waits for ever.
        verify: compare the arguments of all ranks before each collective; on in notebooks, off in benchmarks. All
            ranks set it alike. Without it, ranks whose shapes or dtypes differ may get wrong values without a word.

    ``members[r]`` is rank r as the world counts it, and ``world_rank`` this one.
    Every operation on tensors takes ``async_op=True`` and then returns a handle with ``wait()`` and ``done()``.
    ``algorithm=`` overrides the choice that is made by size and ranks (selection.py); ``"mpi"`` is MPI's own, which
    cannot be interrupted. Counterparts: mpi4py's upper-case methods and the functions of ``torch.distributed``.
    """

    simulated = False  # True where the other ranks do not exist

    def __init__(self, mpi: MPI.Comm, time_limit: float | None = None, verify: bool = False, name: str = "world"):
        self._mpi = mpi
        self._prepare(mpi.Get_rank(), mpi.Get_size(), world_ranks(mpi), time_limit, verify, name)

    def _prepare(self, rank, size, members, time_limit=None, verify=False, name="world"):
        self.time_limit = time_limit
        self.verify = verify
        self.on_board = True  # whether others may see its operations as the last that this rank called
        self.name = name
        self.rank = rank
        self.size = size
        self.wire = None  # an emulated slow network
        self.members = members  # as the world counts them
        self._nccl = None  # not decided yet; False where CUDA tensors go through host memory
        self._queue = Queue()
        self._buffers = Scratch()
        self.collective_count = 0  # collectives that this rank has called so far
        self._splits = 0
        self._messages = 0  # sent, less those received
        living.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    @property
    def world_rank(self) -> int:
        """This rank as the world counts it."""
        return self.members[self.rank]

    @property
    def mpi(self) -> Mpi4pyComm:
        """mpi4py's communicator of the same ranks: ``comm.mpi.Allreduce(MPI.IN_PLACE, array)`` (mpi4py_comm.py)."""
        from dtlib.comm.mpi4py_comm import Mpi4pyComm

        return Mpi4pyComm(self)

    @property
    def group(self) -> ProcessGroup:
        """torch's ``ProcessGroup`` of the same ranks: ``dist.all_reduce(tensor, group=comm.group)``.

        What it does is done by this communicator: it is counted, drawn and timed out alike. ``dist.get_rank(group)``,
        and global ranks such as ``src=0``, need a default group: ``dist.init_process_group("dtlib",
        init_method="dtlib://")`` once, after ``import dtlib.backend``.
        """
        from dtlib.comm.torch.backend_group import group_over

        return group_over(self)

    def held(self) -> dict[str, list]:
        """Memory that collectives keep from call to call (measure/held.py)."""
        return {"communication": self._buffers.held()}

    def wait_for(
        self, request: MPI.Request, buffers: object, description: str, time_limit: float | None = None
    ) -> None:
        """Wait for an mpi4py request of this communicator as the operations do: to be interrupted, and timed out; after
        ``time_limit`` seconds, if it is given, instead of the communicator's."""
        call, link = self._call(description, peers=self.members), lifetime.Awaited(self._mpi)
        waited = Operation(call, link, iter([[request]]), lambda: None, buffers)
        waited.start(self, async_op=time_limit is not None, in_turn=False)
        if time_limit is not None:
            waited._time_limit = time_limit
            waited.wait()

    def meet(self, operation: str, thing: object = None) -> list:
        """Every rank's ``thing`` (which pickles), once all are here; what all have no more use for is freed."""
        garbage = lifetime.garbage_among(self.members)
        said = [b""] * self.size
        said[self.rank] = pickle.dumps((thing, garbage))
        link = self._side_link(self._next_tag())
        call = self._call(operation, None, self.members, self.collective_count)
        Operation(call, link, self._compared(call, lifetime.exchange(link, said)), lambda: None, said).start(self)
        told = [pickle.loads(one) for one in said]
        lifetime.free({member: garbage for member, (_, garbage) in zip(self.members, told, strict=True)})
        return [thing for thing, _ in told]

    # Point to point

    @overload
    def send(self, tensor: T, dest: int, tag: int = ..., async_op: No = ...) -> T: ...
    @overload
    def send(self, tensor: T, dest: int, tag: int = ..., *, async_op: Yes) -> Operation[T]: ...
    def send(self, tensor: T, dest: int, tag: int = 0, async_op: bool = False) -> T | Operation[T]:
        """Send ``tensor`` to rank ``dest``, which calls ``recv`` with the same shape and dtype; returns it."""
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
        """Receive from rank ``source`` into ``tensor``, in place; returns it."""
        self._check_rank(source, "recv", "source")
        content = payload(tensor, "recv", writes=True)
        call = self._call("recv", tensor, (self.members[source],), peer=source, tag=tag)
        link = self._incoming(tag)
        steps = receive_message(link, content.flat, source, call, self._notes(tag))
        self._messages -= 1
        return Operation(call, link, steps, content.store, content).start(self, async_op, in_turn=False)  # type: ignore[return-value]

    # One to all, all to one

    @overload
    def broadcast(self, tensor: T, root: int = ..., async_op: No = ..., algorithm: Name = ...) -> T: ...
    @overload
    def broadcast(self, tensor: T, root: int = ..., *, async_op: Yes, algorithm: Name = ...) -> Operation[T]: ...
    def broadcast(self, tensor: T, root: int = 0, async_op: bool = False, algorithm: Name = None) -> T | Operation[T]:
        """Give every rank the values that ``tensor`` has on rank ``root``, in place; returns it."""
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.broadcast(tensor, root, async_op)
        self._check_rank(root, "broadcast", "root")
        content = payload(tensor, "broadcast", writes=self.rank != root)
        flat = content.flat
        finish = content.store if self.rank != root else lambda: tensor  # whose values autograd may still need
        return self._collective("broadcast", tensor, (flat, root), finish, async_op, algorithm, flat, peer=root)

    @overload
    def reduce(self, tensor: T, root: int = ..., op: str = ..., async_op: No = ..., algorithm: Name = ...) -> T: ...
    @overload
    def reduce(self, tensor: T, root: int = ..., op: str = ..., *, async_op: Yes,
        algorithm: Name = ...) -> Operation[T]: ...  # fmt: skip
    def reduce(
        self, tensor: T, root: int = 0, op: str = "sum", async_op: bool = False, algorithm: Name = None
    ) -> T | Operation[T]:
        """Like ``all_reduce``, but only rank ``root`` gets the result; the others keep their values."""
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.reduce(tensor, root, op, async_op)
        self._check_rank(root, "reduce", "root")
        content = payload(tensor, "reduce", writes=self.rank == root)
        combine = types.combiner(tensor, op, "reduce")
        # Partial results must not show in the caller's tensor.
        flat = content.flat if self.rank == root else content.flat.copy()
        finish = content.finisher(op, self.size) if self.rank == root else lambda: tensor
        arguments = flat, root, combine
        return self._collective("reduce", tensor, arguments, finish, async_op, algorithm, flat, op=op, peer=root)

    @overload
    def scatter(self, out: T, tensor: AnyTensor | None = ..., root: int = ..., async_op: No = ...) -> T: ...
    @overload
    def scatter(self, out: T, tensor: AnyTensor | None = ..., root: int = ..., *, async_op: Yes) -> Operation[T]: ...
    def scatter(
        self, out: T, tensor: AnyTensor | None = None, root: int = 0, async_op: bool = False
    ) -> T | Operation[T]:
        """Give rank r chunk r of the ``tensor`` of rank ``root``, which has ``size`` equal chunks; returns ``out``."""
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
        """The reverse: ``out`` on rank ``root`` gets every rank's ``tensor``, in rank order; None elsewhere will do."""
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
        ``rabenseifner``, ``tree``, ``naive`` or ``mpi``. Returns ``tensor``.
        """
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.all_reduce(tensor, op, async_op)
        content = payload(tensor, "all_reduce", writes=True)
        arguments = content.flat, types.combiner(tensor, op, "all_reduce")
        finish = content.finisher(op, self.size)
        return self._collective("all_reduce", tensor, arguments, finish, async_op, algorithm, content.flat, op=op)

    @overload
    def reduce_scatter(self, out: T, tensor: AnyTensor, op: str = ..., async_op: No = ...,
        algorithm: Name = ..., overwrite: bool = ...) -> T: ...  # fmt: skip
    @overload
    def reduce_scatter(self, out: T, tensor: AnyTensor, op: str = ..., *, async_op: Yes,
        algorithm: Name = ..., overwrite: bool = ...) -> Operation[T]: ...  # fmt: skip
    def reduce_scatter(
        self, out: T, tensor: AnyTensor, op: str = "sum", async_op: bool = False, algorithm: Name = None,
        overwrite: bool = False,
    ) -> T | Operation[T]:  # fmt: skip
        """Combine ``tensor`` over all ranks; rank r gets chunk r of the result in ``out``.

        ``tensor`` has ``size`` equal chunks and keeps its values, unless ``out`` is its chunk r: then its other chunks
        hold partial results afterwards. With ``overwrite`` it may lose them too, and no memory is needed beside the
        two. Returns ``out``.
        """
        if getattr(out, "is_cuda", False) and (nccl := self._on_gpus(out, algorithm)):
            return nccl.reduce_scatter(out, tensor, op, async_op)
        mine = payload(out, "reduce_scatter", writes=True)
        combine = types.combiner(out, op, "reduce_scatter")
        chunks = self._cut(tensor, out, "reduce_scatter", writes=False)[1]
        overlap = any(np.may_share_memory(mine.flat, chunk) for chunk in chunks)
        if overlap and not same_memory(mine.flat, chunks[self.rank]):
            chunks = [chunk.copy() for chunk in chunks]  # the result must not overwrite what is still to be sent
        if overwrite and not overlap:
            algorithm = algorithm or "ring_over_input"
        finish = mine.finisher(op, self.size)
        arguments = mine.flat, chunks, combine
        return self._collective("reduce_scatter", tensor, arguments, finish, async_op, algorithm, mine.flat, op=op)

    @overload
    def all_gather(self, out: T, tensor: AnyTensor, async_op: No = ..., algorithm: Name = ...) -> T: ...
    @overload
    def all_gather(self, out: T, tensor: AnyTensor, *, async_op: Yes, algorithm: Name = ...) -> Operation[T]: ...
    def all_gather(self, out: T, tensor: AnyTensor, async_op: bool = False, algorithm: Name = None) -> T | Operation[T]:
        """Put every rank's ``tensor`` one after the other, in rank order, into ``out`` on every rank.

        ``out`` has ``size`` times as many elements as ``tensor`` and the same dtype; returns ``out``.
        """
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.all_gather(out, tensor, async_op)
        mine = payload(tensor, "all_gather", writes=False)
        whole, chunks = self._cut(out, tensor, "all_gather", writes=True)
        if not same_memory(chunks[self.rank], mine.flat):
            chunks[self.rank][...] = mine.flat
        return self._collective("all_gather", tensor, (chunks,), whole.store, async_op, algorithm, whole.flat)

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
        """Send chunk r of ``tensor`` to rank r; chunk r of ``out`` comes from it. Returns ``out``.

        Both have ``size`` equal chunks, unless counts are given, a number of rows (along the first dimension) for each
        rank: ``input_split_sizes[r]`` rows go to rank r, ``output_split_sizes[r]`` rows arrive from it, and there are
        as many as it sends. Zero is a number. All ranks give counts, or none. Counterpart:
        ``torch.distributed.all_to_all_single``.
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
        """Wait until every rank has arrived here."""
        return self._collective("barrier", None, (), lambda: None, async_op)

    # Other communicators

    @overload
    def split(self, color: int, key: int = 0) -> Communicator: ...
    @overload
    def split(self, color: None, key: int = 0) -> None: ...

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks that pass the same ``color``, ordered by ``key``, then by rank.

        All ranks call it; who passes None gets None.
        """
        from mpi4py import MPI

        for name, number, lowest in (("color", 0 if color is None else color, 0), ("key", key, -(2**31))):
            if not isinstance(number, int) or not lowest <= number < 2**31:
                raise CommunicationError(
                    f"split({name}={number!r}): color is a whole number from 0 on, or None; key a whole number; both "
                    "of 32 bits."
                )
        # The split itself cannot be interrupted: let everybody be here first.
        asked = self.meet("split", (color, lifetime.draw(self.world_rank)))
        mpi = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        self._splits += 1
        name = f"{self.name}/{self._splits}.{color}"
        if color is None:
            return None
        group = Communicator(mpi, self.time_limit, self.verify, name)
        lifetime.look_after(mpi, next(drawn for its_color, drawn in asked if its_color == color), group.members)
        group.wire = self.wire  # the same network card
        return group

    def emulate_network(self, latency: float, bandwidth: float) -> Communicator:
        """A communicator of the same ranks whose messages take longer: ``latency`` seconds each, ``bandwidth`` bytes a
        second. EMULATED: for lessons, never for claims. All ranks call it."""
        if not (latency >= 0 and bandwidth > 0):
            raise CommunicationError(
                f"emulate_network(latency={latency!r}, bandwidth={bandwidth!r}): seconds from 0 on, and bytes a second "
                "above 0."
            )
        slow = self.split(0)
        slow.wire = Wire(latency, bandwidth)
        return slow

    # Chunks of a whole

    def _cut(self, whole, part, operation, writes):
        """``whole`` as a payload and as ``size`` chunks, each like ``part``."""
        content = payload(whole, operation, writes)
        self._check_whole(whole, content.flat.size, part, payload(part, operation, False).flat.size, operation)
        return content, chunks_of(content.flat, self.size)

    # From the arguments of a call to an operation under way

    def _next_tag(self) -> int:
        """A tag of its own for each collective, so that two that are under way cannot mix."""
        self.collective_count += 1
        return FIRST_COLLECTIVE_TAG + self.collective_count % COLLECTIVE_TAGS

    def _call(self, operation, tensor=None, peers=(), number=0, **facts) -> Call:
        return Call(operation, tensor, self.world_rank, peers, self.name, number, **facts)

    def _link(self, tag: int) -> Link:
        """The messages of one operation."""
        arguments = self._mpi, self.rank, self.size, tag, self._buffers
        return SlowLink(*arguments, self.wire) if self.wire else Link(*arguments)

    def _incoming(self, tag: int) -> IncomingLink:
        """The receiving end of one message."""
        return IncomingLink(self._link(tag))

    def _side_link(self, tag: int) -> Link:
        """Messages that are not the caller's: neither slowed down nor counted."""
        return Link(self._mpi, self.rank, self.size, tag, self._buffers)

    def _notes(self, tag: int) -> Link | None:
        """Where the notes about messages with this tag travel, if there are any."""
        if not isinstance(tag, int) or not 0 <= tag < CALLER_TAGS:
            raise CommunicationError(f"tag={tag!r}: tags are whole numbers from 0 to {CALLER_TAGS - 1}.")
        return self._side_link(tag + CALLER_TAGS) if self.verify else None

    def _collective(self, operation, tensor, arguments, finish, async_op, algorithm=None, flat=None, **facts):
        """Start a collective: the chosen algorithm with ``(link, *arguments)``, after all others of this communicator.

        ``flat`` is the memory that counts for the choice; ``finish()`` gives what the operation returns; ``facts`` are
        ``op`` and ``peer`` of the call.
        """
        # What cannot be chosen is refused before anybody is told of it.
        if algorithm == "mpi" and (async_op or self.simulated):
            why = "needs MPI, and solo does without" if self.simulated else "cannot be asynchronous: MPI's call blocks"
            raise CommunicationError(f"{operation}(algorithm='mpi') {why}; leave algorithm= out.")
        steps = choose(operation, 0 if flat is None else flat.nbytes, self.size, algorithm)
        # A tag of its own keeps its messages apart from those of others that are under way.
        link = self._link(self._next_tag())
        members, number = self.members, self.collective_count
        call = Call(
            operation, tensor, members[self.rank], members, self.name, number, algorithm=algorithm or "", **facts
        )
        # In a notebook all ranks compare what they call before the first message of the algorithm leaves.
        moving = steps(link, *arguments)
        if self.verify:
            moving = self._compared(call, moving)
        return Operation(call, link, moving, finish, flat).start(self, async_op)

    def _compared(self, call, steps):
        """``steps``, after a comparison of what all ranks call if this communicator is to make one."""
        return verified(self._side_link(NOTES_OF_COLLECTIVES), call, steps) if self.verify and self.size > 1 else steps

    def _on_gpus(self, tensor, algorithm=None):
        """Who carries out a collective on this CUDA tensor: NCCL, or None where it goes through host memory."""
        if algorithm is not None or self.wire or self.simulated or self._queue.broken:
            return None
        if self._nccl is None:
            from dtlib.comm.torch.nccl import nccl_communicator

            self._nccl = nccl_communicator(self, tensor.device) or False
        return self._nccl or None


def world_ranks(mpi: MPI.Comm) -> tuple[int, ...]:
    """The members of a communicator as the world counts them."""
    from mpi4py import MPI

    group, everyone = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, list(range(group.size)), everyone))
    finally:
        group.Free()
        everyone.Free()
