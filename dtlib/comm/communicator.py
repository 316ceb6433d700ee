"""The verbs: what a rank says to others.

Every rank of the communicator calls the same verb in the same order. Tensors live on the CPU (torch tensors,
or numpy arrays where torch is not needed) and travel through mpi4py without a copy if they are contiguous.
"""

import numpy as np

from dtlib.comm.types import as_array, check_reduction, type_for_reduction
from dtlib.comm.waiting import Handle
from dtlib.errors import CommunicationError


class Communicator:
    """Verbs over an mpi4py communicator.

    Args:
        mpi: an ``mpi4py.MPI.Comm``.
        time_limit: seconds that a wait may take before it ends as ``WaitTimeout``; None waits for ever.

    Every verb on tensors takes ``async_op=True`` and then returns a ``Handle`` with ``wait()`` and ``done()``.
    Counterparts: mpi4py's upper-case methods and the functions of ``torch.distributed``.
    """

    def __init__(self, mpi, time_limit: float | None = None):
        self.mpi = mpi
        self.time_limit = time_limit
        self.rank = mpi.Get_rank()
        self.size = mpi.Get_size()

    def __repr__(self):
        return f"Communicator(rank={self.rank}, size={self.size})"

    # Point to point

    def send(self, tensor, dest: int, tag: int = 0, async_op: bool = False):
        """Send ``tensor`` to rank ``dest``, which calls ``recv`` with the same shape and dtype; returns it."""
        self._check_rank(dest, "send", "dest")
        array = np.ascontiguousarray(as_array(tensor, "send"))
        return self._run(self.mpi.Isend(array, dest, tag), array, lambda: tensor, f"send to rank {dest}", async_op)

    def recv(self, tensor, source: int, tag: int = 0, async_op: bool = False):
        """Receive from rank ``source`` into ``tensor``, in place; returns it."""
        self._check_rank(source, "recv", "source")
        array, finish = self._writable(tensor, "recv")
        request = self.mpi.Irecv(array, source, tag)
        return self._run(request, array, finish, f"recv from rank {source}", async_op)

    # Collectives

    def broadcast(self, tensor, root: int = 0, async_op: bool = False):
        """Give every rank the values that ``tensor`` has on rank ``root``, in place; returns it."""
        self._check_rank(root, "broadcast", "root")
        array, finish = self._writable(tensor, "broadcast")
        return self._run(self.mpi.Ibcast(array, root), array, finish, f"broadcast from rank {root}", async_op)

    def all_reduce(self, tensor, op: str = "sum", async_op: bool = False):
        """Combine ``tensor`` over all ranks, element by element, in place; every rank gets the result.

        ``op`` is ``sum``, ``mean``, ``max``, ``min`` or ``prod``; returns ``tensor``.
        """
        check_reduction(tensor, op, "all_reduce")
        array, finish = self._reducible(tensor, op, "all_reduce")
        request = self.mpi.Iallreduce(_in_place(), array, _mpi_op(op))
        return self._run(request, array, finish, f"all_reduce({op})", async_op)

    def reduce(self, tensor, root: int = 0, op: str = "sum", async_op: bool = False):
        """Like ``all_reduce``, but only rank ``root`` gets the result; the others keep their values."""
        self._check_rank(root, "reduce", "root")
        check_reduction(tensor, op, "reduce")
        array, finish = self._reducible(tensor, op, "reduce")
        if self.rank == root:
            request = self.mpi.Ireduce(_in_place(), array, _mpi_op(op), root)
        else:
            request, finish = self.mpi.Ireduce(array, None, _mpi_op(op), root), lambda: tensor
        return self._run(request, array, finish, f"reduce({op}) to rank {root}", async_op)

    def all_gather(self, out, tensor, async_op: bool = False):
        """Put every rank's ``tensor`` one after the other, in rank order, into ``out`` on every rank.

        ``out`` has ``size`` times as many elements as ``tensor`` and the same dtype; returns ``out``.
        """
        sizes = [as_array(each, "all_gather").size for each in (out, tensor)]
        if out.dtype != tensor.dtype or sizes[0] != self.size * sizes[1]:
            raise CommunicationError(
                f"all_gather on {self.size} ranks needs an out of {self.size} times the elements of tensor and its "
                f"dtype: out is {tuple(out.shape)} {out.dtype}, tensor is {tuple(tensor.shape)} {tensor.dtype}."
            )
        array, finish = self._writable(out, "all_gather")
        part = np.ascontiguousarray(as_array(tensor, "all_gather"))
        return self._run(self.mpi.Iallgather(part, array), (array, part), finish, "all_gather", async_op)

    def barrier(self, async_op: bool = False):
        """Wait until every rank has come here."""
        return self._run(self.mpi.Ibarrier(), None, lambda: None, "barrier", async_op)

    # Small Python things

    def all_gather_object(self, thing) -> list:
        """A list of every rank's ``thing`` (anything that pickles), in rank order, on every rank."""
        from mpi4py import MPI

        mine = np.frombuffer(MPI.pickle.dumps(thing), dtype=np.uint8)
        sizes = self.all_gather(np.zeros(self.size, dtype=np.int64), np.array([mine.size], dtype=np.int64))
        # Every part is padded to the longest, so that one all_gather of equal parts carries them all.
        padded = np.zeros(sizes.max(), dtype=np.uint8)
        padded[: mine.size] = mine
        parts = self.all_gather(np.zeros((self.size, padded.size), dtype=np.uint8), padded)
        return [MPI.pickle.loads(part[:size].tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def broadcast_object(self, thing, root: int = 0):
        """The ``thing`` of rank ``root`` (anything that pickles), on every rank."""
        from mpi4py import MPI

        self._check_rank(root, "broadcast_object", "root")
        mine = np.frombuffer(MPI.pickle.dumps(thing) if self.rank == root else b"", dtype=np.uint8)
        size = self.broadcast(np.array([mine.size], dtype=np.int64), root)
        data = mine.copy() if self.rank == root else np.zeros(size[0], dtype=np.uint8)
        return MPI.pickle.loads(self.broadcast(data, root).tobytes())

    # What the verbs share

    def wait_for(self, request, buffers, description: str):
        """Wait for an mpi4py request of this communicator as the verbs do: to be interrupted, and timed out."""
        self._run(request, buffers, lambda: None, description, async_op=False)

    def _run(self, request, buffers, finish, description, async_op):
        handle = Handle(request, buffers, finish, f"Rank {self.rank}: {description}", self.time_limit)
        return handle if async_op else handle.wait()

    def _writable(self, tensor, verb):
        """Contiguous memory for the result, and what brings the result back into ``tensor``."""
        target = self._target(tensor, verb)
        return self._staged(tensor, target, np.ascontiguousarray(target))

    def _reducible(self, tensor, op, verb):
        """The same in the type in which values are combined; a mean is a sum that is divided at the end."""
        target = self._target(tensor, verb)
        array = np.ascontiguousarray(target, dtype=type_for_reduction(target))
        return self._staged(tensor, target, array, divide_by=self.size if op == "mean" else 1)

    def _target(self, tensor, verb):
        target = as_array(tensor, verb)
        if not target.flags.writeable:
            raise CommunicationError(f"{verb} writes into its argument, and this array is read-only: pass a copy.")
        return target

    def _staged(self, tensor, target, array, divide_by=1):
        def finish():
            if divide_by != 1:
                np.divide(array, divide_by, out=array)
            if not np.shares_memory(array, target):
                target[...] = array.astype(target.dtype, copy=False)
            return tensor

        return array, finish

    def _check_rank(self, rank, verb, name):
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise CommunicationError(
                f"{verb}({name}={rank!r}): the ranks of this communicator are 0 to {self.size - 1}."
            )


def _in_place():
    from mpi4py import MPI

    return MPI.IN_PLACE


def _mpi_op(op):
    from mpi4py import MPI

    return {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}[op]
