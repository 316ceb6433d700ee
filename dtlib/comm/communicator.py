"""The operations: what a rank says to others.

Every rank of the communicator calls the same collective in the same order. Tensors on the CPU (torch tensors, or numpy
arrays where torch is not needed) travel through mpi4py without a copy if they are contiguous. Tensors on a CUDA device
travel through NCCL or through host memory (torch/nccl.py, torch/staging.py).
"""

from functools import partial

import numpy as np

from dtlib.comm import lifetime, types
from dtlib.comm.algorithms import chunks_of, pieces_of, same_memory
from dtlib.comm.link import Wire
from dtlib.comm.runner import Runner
from dtlib.comm.transport import payload
from dtlib.comm.watch.messages import receive_message, send_message
from dtlib.errors import CommunicationError


class Communicator(Runner):
    """Operations over an mpi4py communicator.

    Args:
        mpi: an ``mpi4py.MPI.Comm``.
        time_limit: seconds that a wait may take before it ends as ``WaitTimeout``; None waits for ever.
        verify: compare the arguments of all ranks before each collective; on in notebooks, off in benchmarks. All
            ranks set it alike. Without it, ranks whose shapes or dtypes differ may get wrong values without a word.

    Every operation on tensors takes ``async_op=True`` and then returns a ``Handle`` with ``wait()`` and ``done()``.
    ``algorithm=`` overrides the choice that is made by size and ranks (selection.py); ``"mpi"`` is MPI's own, which
    cannot be interrupted. Counterparts: mpi4py's upper-case methods and the functions of ``torch.distributed``.
    """

    # Point to point

    def send(self, tensor, dest: int, tag: int = 0, async_op: bool = False):
        """Send ``tensor`` to rank ``dest``, which calls ``recv`` with the same shape and dtype; returns it."""
        self._check_rank(dest, "send", "dest")
        content = payload(tensor, "send", writes=False)
        call = self._call("send", tensor, (self._members[dest],), peer=dest, tag=tag)
        link = self._link(tag)
        steps = send_message(link, content.flat, dest, call, self._notes(tag))
        return self._point_to_point(call, steps, link, lambda: tensor, async_op, content)

    def recv(self, tensor, source: int, tag: int = 0, async_op: bool = False):
        """Receive from rank ``source`` into ``tensor``, in place; returns it."""
        self._check_rank(source, "recv", "source")
        content = payload(tensor, "recv", writes=True)
        call = self._call("recv", tensor, (self._members[source],), peer=source, tag=tag)
        link = self._incoming(tag)
        steps = receive_message(link, content.flat, source, call, self._notes(tag))
        return self._point_to_point(call, steps, link, content.store, async_op, content)

    # One to all, all to one

    def broadcast(self, tensor, root: int = 0, async_op: bool = False, algorithm: str | None = None):
        """Give every rank the values that ``tensor`` has on rank ``root``, in place; returns it."""
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.broadcast(tensor, root, async_op)
        self._check_rank(root, "broadcast", "root")
        content = payload(tensor, "broadcast", writes=self.rank != root)
        flat = content.flat
        finish = content.store if self.rank != root else lambda: tensor  # whose values autograd may still need
        return self._collective("broadcast", tensor, (flat, root), finish, async_op, algorithm, flat, peer=root)

    def reduce(self, tensor, root: int = 0, op: str = "sum", async_op: bool = False, algorithm: str | None = None):
        """Like ``all_reduce``, but only rank ``root`` gets the result; the others keep their values."""
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.reduce(tensor, root, op, async_op)
        self._check_rank(root, "reduce", "root")
        content = payload(tensor, "reduce", writes=self.rank == root)
        combine = types.combiner(tensor, op, "reduce")
        # Partial results must not show in the caller's tensor.
        flat = content.flat if self.rank == root else content.flat.copy()

        def finish():
            return self._finish_mean(content, op) if self.rank == root else tensor

        arguments = flat, root, combine
        return self._collective("reduce", tensor, arguments, finish, async_op, algorithm, flat, op=op, peer=root)

    def scatter(self, out, tensor=None, root: int = 0, async_op: bool = False):
        """Give rank r chunk r of the ``tensor`` of rank ``root``, which has ``size`` equal chunks; returns ``out``."""
        if getattr(out, "is_cuda", False) and (nccl := self._on_gpus(out)):
            return nccl.scatter(out, tensor, root, async_op)
        self._check_rank(root, "scatter", "root")
        mine = payload(out, "scatter", writes=True)
        chunks = self._chunks(out, tensor, "scatter") if self.rank == root else None
        arguments = mine.flat, chunks, root
        return self._collective("scatter", out, arguments, mine.store, async_op, flat=mine.flat, peer=root)

    def gather(self, out, tensor, root: int = 0, async_op: bool = False):
        """The reverse: ``out`` on rank ``root`` gets every rank's ``tensor``, in rank order; None elsewhere will do."""
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor)):
            return nccl.gather(out, tensor, root, async_op)
        self._check_rank(root, "gather", "root")
        mine = payload(tensor, "gather", writes=False)
        whole = chunks = None
        if self.rank == root:
            whole, chunks = self._whole(out, tensor, "gather")
        finish = whole.store if whole else lambda: out
        arguments = chunks, mine.flat, root
        return self._collective("gather", tensor, arguments, finish, async_op, flat=mine.flat, peer=root)

    # All to all

    def all_reduce(self, tensor, op: str = "sum", async_op: bool = False, algorithm: str | None = None):
        """Combine ``tensor`` over all ranks, element by element, in place; every rank gets the same result.

        ``op`` is ``sum``, ``mean``, ``max``, ``min`` or ``prod``; ``algorithm`` is ``ring``, ``recursive_doubling``,
        ``rabenseifner``, ``tree``, ``naive`` or ``mpi``. Returns ``tensor``.
        """
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.all_reduce(tensor, op, async_op)
        content = payload(tensor, "all_reduce", writes=True)
        arguments = content.flat, types.combiner(tensor, op, "all_reduce")
        finish = partial(self._finish_mean, content, op)
        return self._collective("all_reduce", tensor, arguments, finish, async_op, algorithm, content.flat, op=op)

    def reduce_scatter(self, out, tensor, op: str = "sum", async_op: bool = False, algorithm: str | None = None):
        """Combine ``tensor`` over all ranks; rank r gets chunk r of the result in ``out``.

        ``tensor`` has ``size`` equal chunks and keeps its values, unless ``out`` is its chunk r: then no memory is
        needed beside it, and its other chunks hold partial results afterwards. Returns ``out``.
        """
        if getattr(out, "is_cuda", False) and (nccl := self._on_gpus(out, algorithm)):
            return nccl.reduce_scatter(out, tensor, op, async_op)
        mine = payload(out, "reduce_scatter", writes=True)
        combine = types.combiner(out, op, "reduce_scatter")
        chunks = self._chunks(out, tensor, "reduce_scatter")
        overlap = any(np.may_share_memory(mine.flat, chunk) for chunk in chunks)
        if overlap and not same_memory(mine.flat, chunks[self.rank]):
            chunks = [chunk.copy() for chunk in chunks]  # the result must not overwrite what is still to be sent
        finish = partial(self._finish_mean, mine, op)
        arguments = mine.flat, chunks, combine
        return self._collective("reduce_scatter", tensor, arguments, finish, async_op, algorithm, mine.flat, op=op)

    def all_gather(self, out, tensor, async_op: bool = False, algorithm: str | None = None):
        """Put every rank's ``tensor`` one after the other, in rank order, into ``out`` on every rank.

        ``out`` has ``size`` times as many elements as ``tensor`` and the same dtype; returns ``out``.
        """
        if getattr(tensor, "is_cuda", False) and (nccl := self._on_gpus(tensor, algorithm)):
            return nccl.all_gather(out, tensor, async_op)
        mine = payload(tensor, "all_gather", writes=False)
        whole, chunks = self._whole(out, tensor, "all_gather")
        if not same_memory(chunks[self.rank], mine.flat):
            chunks[self.rank][...] = mine.flat
        return self._collective("all_gather", tensor, (chunks,), whole.store, async_op, algorithm, whole.flat)

    def all_to_all(self, out, tensor, output_split_sizes=None, input_split_sizes=None, async_op: bool = False):
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
        come, sent, counted = self._pieces(out, tensor, output_split_sizes, input_split_sizes)
        flat = content.flat.copy() if np.shares_memory(whole.flat, content.flat) else content.flat
        arguments = pieces_of(whole.flat, come), pieces_of(flat, sent)
        counts = np.array([sent, come]) if counted else None
        return self._collective("all_to_all", tensor, arguments, whole.store, async_op, flat=whole.flat, counts=counts)

    def barrier(self, async_op: bool = False):
        """Wait until every rank has arrived here."""
        return self._collective("barrier", None, (), lambda: None, async_op)

    # Other communicators

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
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
        mpi = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        self._splits += 1
        name = f"{self.name}/{self._splits}.{color}"
        if color is None:
            return None
        group = Communicator(mpi, self.time_limit, self.verify, name)
        lifetime.look_after(mpi, next(drawn for its_color, drawn in asked if its_color == color), group._members)
        group.wire = self.wire  # the same network card
        return group

    def emulate_network(self, latency: float, bandwidth: float) -> "Communicator":
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

    def _chunks(self, out, tensor, operation):
        """``tensor`` as ``size`` chunks, each like ``out``."""
        content = payload(tensor, operation, writes=False)
        self._check_whole(tensor, content.flat.size, out, payload(out, operation, writes=False).flat.size, operation)
        return chunks_of(content.flat, self.size)

    def _whole(self, out, tensor, operation):
        """``out`` as a payload and as ``size`` chunks, each like ``tensor``."""
        whole = payload(out, operation, writes=True)
        self._check_whole(out, whole.flat.size, tensor, payload(tensor, operation, writes=False).flat.size, operation)
        return whole, chunks_of(whole.flat, self.size)
