"""The verbs: what a rank says to others.

Every rank of the communicator calls the same collective in the same order. Tensors live on the CPU (torch tensors, or
numpy arrays where torch is not needed) and travel through mpi4py without a copy if they are contiguous.
"""

import pickle

import numpy as np

from dtlib.comm import algorithms, types
from dtlib.comm.link import CALLER_TAGS, Link, Message, SlowLink, Wire
from dtlib.comm.selection import choose
from dtlib.comm.waiting import Handle, Queue, Task, post
from dtlib.errors import CommunicationError


class Communicator:
    """Verbs over an mpi4py communicator.

    Args:
        mpi: an ``mpi4py.MPI.Comm``.
        time_limit: seconds that a wait may take before it ends as ``WaitTimeout``; None waits for ever.

    Every verb on tensors takes ``async_op=True`` and then returns a ``Handle`` with ``wait()`` and ``done()``.
    ``algorithm=`` overrides the choice that is made by size and ranks (selection.py); ``"mpi"`` is MPI's own, which
    cannot be interrupted. Counterparts: mpi4py's upper-case methods and the functions of ``torch.distributed``.
    """

    def __init__(self, mpi, time_limit: float | None = None):
        self.mpi = mpi
        self.time_limit = time_limit
        self.rank = mpi.Get_rank()
        self.size = mpi.Get_size()
        self.wire = None  # an emulated slow network
        self._queue = Queue()
        self._buffers = {}
        self._count = 0

    def __repr__(self):
        return f"Communicator(rank={self.rank}, size={self.size})"

    # Point to point

    def send(self, tensor, dest: int, tag: int = 0, async_op: bool = False):
        """Send ``tensor`` to rank ``dest``, which calls ``recv`` with the same shape and dtype; returns it."""
        self._check_rank(dest, "send", "dest")
        content = types.payload(tensor, "send", writes=False)
        link = self._link(tag)
        steps = iter([[link.send(content.flat, dest)]])
        return self._start(steps, link, lambda: tensor, f"send to rank {dest}", async_op, content, in_order=False)

    def recv(self, tensor, source: int, tag: int = 0, async_op: bool = False):
        """Receive from rank ``source`` into ``tensor``, in place; returns it."""
        self._check_rank(source, "recv", "source")
        content = types.payload(tensor, "recv", writes=True)
        request = self._link(tag).recv(content.flat, source)
        message = Message(content.flat.nbytes, f"recv from rank {source}")

        def finish():
            message.check_length()
            return content.store()

        return self._start(iter([[request]]), message, finish, message.description, async_op, content, in_order=False)

    # One to all, all to one

    def broadcast(self, tensor, root: int = 0, async_op: bool = False, algorithm: str | None = None):
        """Give every rank the values that ``tensor`` has on rank ``root``, in place; returns it."""
        self._check_rank(root, "broadcast", "root")
        content = types.payload(tensor, "broadcast", writes=self.rank != root)
        link = self._link()
        steps = {
            "tree": lambda: algorithms.tree_broadcast(link, content.flat, root),
            "mpi": lambda: _at_once(lambda: self.mpi.Bcast(content.flat, root)),
        }
        detail = f"from rank {root}"
        return self._collective("broadcast", detail, steps, algorithm, content.flat, link, content.store, async_op)

    def reduce(self, tensor, root: int = 0, op: str = "sum", async_op: bool = False, algorithm: str | None = None):
        """Like ``all_reduce``, but only rank ``root`` gets the result; the others keep their values."""
        self._check_rank(root, "reduce", "root")
        content = types.payload(tensor, "reduce", writes=self.rank == root)
        combine = types.combiner(tensor, op, "reduce")
        link = self._link()
        # Partial results must not show in the caller's tensor.
        flat = content.flat if self.rank == root else content.flat.copy()
        steps = {"tree": lambda: algorithms.tree_reduce(link, flat, root, combine)}

        def finish():
            return self._finish_mean(content, op) if self.rank == root else tensor

        return self._collective("reduce", f"{op} to rank {root}", steps, algorithm, flat, link, finish, async_op)

    def scatter(self, out, tensor=None, root: int = 0, async_op: bool = False):
        """Give rank r part r of the ``tensor`` of rank ``root``, which has ``size`` equal parts; returns ``out``."""
        self._check_rank(root, "scatter", "root")
        mine = types.payload(out, "scatter", writes=True)
        parts = self._parts(out, tensor, "scatter") if self.rank == root else None
        link = self._link()
        steps = {"direct": lambda: algorithms.direct_scatter(link, mine.flat, parts, root)}
        detail = f"from rank {root}"
        return self._collective("scatter", detail, steps, None, mine.flat, link, mine.store, async_op, parts)

    def gather(self, out, tensor, root: int = 0, async_op: bool = False):
        """The reverse: ``out`` on rank ``root`` gets every rank's ``tensor``, in rank order; None elsewhere will do."""
        self._check_rank(root, "gather", "root")
        mine = types.payload(tensor, "gather", writes=False)
        link = self._link()
        whole = parts = None
        if self.rank == root:
            whole, parts = self._whole(out, tensor, "gather")
        steps = {"direct": lambda: algorithms.direct_gather(link, parts, mine.flat, root)}
        finish = whole.store if whole else lambda: out
        return self._collective("gather", f"to rank {root}", steps, None, mine.flat, link, finish, async_op)

    # All to all

    def all_reduce(self, tensor, op: str = "sum", async_op: bool = False, algorithm: str | None = None):
        """Combine ``tensor`` over all ranks, element by element, in place; every rank gets the same result.

        ``op`` is ``sum``, ``mean``, ``max``, ``min`` or ``prod``; ``algorithm`` is ``ring``, ``recursive_doubling``,
        ``tree``, ``naive`` or ``mpi``. Returns ``tensor``.
        """
        content = types.payload(tensor, "all_reduce", writes=True)
        combine = types.combiner(tensor, op, "all_reduce")
        link, flat = self._link(), content.flat
        steps = {
            "ring": lambda: algorithms.ring_all_reduce(link, flat, combine),
            "recursive_doubling": lambda: algorithms.recursive_doubling_all_reduce(link, flat, combine),
            "tree": lambda: algorithms.tree_all_reduce(link, flat, combine),
            "naive": lambda: algorithms.naive_all_reduce(link, flat, combine),
            "mpi": lambda: _at_once(lambda: self.mpi.Allreduce(_in_place(), flat, _mpi_operation(tensor, op))),
        }

        def finish():
            return self._finish_mean(content, op)

        return self._collective("all_reduce", op, steps, algorithm, flat, link, finish, async_op)

    def reduce_scatter(self, out, tensor, op: str = "sum", async_op: bool = False, algorithm: str | None = None):
        """Combine ``tensor`` over all ranks; rank r gets part r of the result in ``out``.

        ``tensor`` has ``size`` equal parts and keeps its values; returns ``out``.
        """
        mine = types.payload(out, "reduce_scatter", writes=True)
        combine = types.combiner(out, op, "reduce_scatter")
        parts = self._parts(out, tensor, "reduce_scatter")
        link = self._link()
        steps = {"ring": lambda: algorithms.ring_reduce_scatter(link, mine.flat, parts, combine)}

        def finish():
            return self._finish_mean(mine, op)

        return self._collective("reduce_scatter", op, steps, algorithm, mine.flat, link, finish, async_op, parts)

    def all_gather(self, out, tensor, async_op: bool = False, algorithm: str | None = None):
        """Put every rank's ``tensor`` one after the other, in rank order, into ``out`` on every rank.

        ``out`` has ``size`` times as many elements as ``tensor`` and the same dtype; returns ``out``.
        """
        mine = types.payload(tensor, "all_gather", writes=False)
        whole, parts = self._whole(out, tensor, "all_gather")
        if not np.shares_memory(parts[self.rank], mine.flat):
            parts[self.rank][...] = mine.flat
        link = self._link()
        steps = {"ring": lambda: algorithms.ring_all_gather(link, parts)}
        return self._collective("all_gather", "", steps, algorithm, whole.flat, link, whole.store, async_op)

    def all_to_all(self, out, tensor, async_op: bool = False):
        """Send part r of ``tensor`` to rank r; part r of ``out`` comes from there. Both have ``size`` equal parts."""
        whole = types.payload(out, "all_to_all", writes=True)
        content = types.payload(tensor, "all_to_all", writes=False)
        sizes = {whole.flat.size, content.flat.size}
        if types.type_name(out) != types.type_name(tensor) or len(sizes) > 1 or whole.flat.size % self.size:
            raise CommunicationError(
                f"all_to_all on {self.size} ranks needs an out like tensor, in {self.size} equal parts: out is "
                f"{_shape(out)}, tensor is {_shape(tensor)}."
            )
        link = self._link()
        out_parts, parts = (algorithms.parts_of(flat, self.size) for flat in (whole.flat, content.flat))
        steps = {"pairwise": lambda: algorithms.pairwise_all_to_all(link, out_parts, parts)}
        return self._collective("all_to_all", "", steps, None, whole.flat, link, whole.store, async_op, parts)

    def barrier(self, async_op: bool = False):
        """Wait until every rank has come here."""
        link = self._link()
        steps = {"dissemination": lambda: algorithms.dissemination_barrier(link)}
        return self._collective("barrier", "", steps, None, None, link, lambda: None, async_op)

    # Small Python things

    def all_gather_object(self, thing) -> list:
        """A list of every rank's ``thing`` (anything that pickles), in rank order, on every rank."""
        mine = np.frombuffer(pickle.dumps(thing), dtype=np.uint8)
        sizes = self.all_gather(np.zeros(self.size, dtype=np.int64), np.array([mine.size]))
        # Every part is padded to the longest, so that one all_gather of equal parts carries them all.
        padded = np.zeros(sizes.max(), dtype=np.uint8)
        padded[: mine.size] = mine
        parts = self.all_gather(np.zeros((self.size, padded.size), dtype=np.uint8), padded)
        return [pickle.loads(part[:size].tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def broadcast_object(self, thing, root: int = 0):
        """The ``thing`` of rank ``root`` (anything that pickles), on every rank."""
        self._check_rank(root, "broadcast_object", "root")
        mine = np.frombuffer(pickle.dumps(thing) if self.rank == root else b"", dtype=np.uint8)
        size = self.broadcast(np.array([mine.size]), root)
        data = mine.copy() if self.rank == root else np.zeros(size[0], dtype=np.uint8)
        return pickle.loads(self.broadcast(data, root).tobytes())

    # Other communicators

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """A communicator of the ranks that pass the same ``color``, ordered by ``key``, then by rank.

        All ranks call it; who passes None gets None.
        """
        from mpi4py import MPI

        self.barrier()  # the split itself cannot be interrupted: let everybody be here first
        mpi = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        return None if color is None else Communicator(mpi, self.time_limit)

    def emulate_network(self, latency: float, bandwidth: float) -> "Communicator":
        """A communicator of the same ranks whose messages take longer: ``latency`` seconds each, ``bandwidth`` bytes a
        second. EMULATED: for lessons, never for claims. All ranks call it."""
        slow = self.split(0)
        slow.wire = Wire(latency, bandwidth)
        return slow

    # What the verbs share

    def wait_for(self, request, buffers, description: str):
        """Wait for an mpi4py request of this communicator as the verbs do: to be interrupted, and timed out."""
        steps = iter([[request]])
        link = Link(self.mpi, self.rank, self.size, 0, {})
        self._start(steps, link, lambda: None, description, False, buffers, in_order=False)

    def _link(self, tag: int | None = None) -> Link:
        """The messages of one verb. Collectives get a tag of their own, so that two under way cannot mix."""
        if tag is None:
            self._count += 1
            tag = CALLER_TAGS + self._count % (CALLER_TAGS - 1)
        elif not 0 <= tag < CALLER_TAGS:
            raise CommunicationError(f"tag={tag!r}: tags are whole numbers from 0 to {CALLER_TAGS - 1}.")
        arguments = self.mpi, self.rank, self.size, tag, self._buffers
        return SlowLink(*arguments, self.wire) if self.wire else Link(*arguments)

    def _collective(self, verb, detail, steps, algorithm, flat, link, finish, async_op, keep=None):
        """Start the chosen algorithm of a collective. ``steps`` maps the names of algorithms to their generators."""
        name = algorithm or choose(verb, 0 if flat is None else flat.nbytes, self.size, steps)
        if name not in steps:
            raise CommunicationError(f"{verb} has no algorithm {name!r}: choose one of {', '.join(steps)}.")
        description = f"{verb}({detail})" if detail else verb
        return self._start(steps[name](), link, finish, description, async_op, (flat, keep), in_order=True)

    def _start(self, steps, link, finish, description, async_op, keep, in_order):
        if self._queue.broken:
            raise CommunicationError(
                f"This communicator {self._queue.broken}, so ranks are out of step: call dtlib.reset() on all ranks."
            )
        task = Task(steps, link, finish, f"Rank {self.rank}: {description}", keep)
        self._queue.append(task) if in_order else post(task)
        handle = Handle(task, self._queue, self.time_limit)
        return handle if async_op else handle.wait()

    def _finish_mean(self, content, op):
        if op == "mean":
            types.divide(content.tensor, content.flat, self.size)
        return content.store()

    def _parts(self, out, tensor, verb):
        """``tensor`` as ``size`` parts, each like ``out``."""
        content = types.payload(tensor, verb, writes=False)
        self._check_whole(tensor, content.flat.size, out, types.payload(out, verb, writes=False).flat.size, verb)
        return algorithms.parts_of(content.flat, self.size)

    def _whole(self, out, tensor, verb):
        """``out`` as a payload and as ``size`` parts, each like ``tensor``."""
        whole = types.payload(out, verb, writes=True)
        self._check_whole(out, whole.flat.size, tensor, types.payload(tensor, verb, writes=False).flat.size, verb)
        return whole, algorithms.parts_of(whole.flat, self.size)

    def _check_whole(self, whole, count, part, part_count, verb):
        if types.type_name(whole) != types.type_name(part) or count != self.size * part_count:
            raise CommunicationError(
                f"{verb} on {self.size} ranks needs one tensor of {self.size} times the elements of the other and of "
                f"its dtype: they are {_shape(whole)} and {_shape(part)}."
            )

    def _check_rank(self, rank, verb, name):
        if not (isinstance(rank, int) or hasattr(rank, "__index__")) or not 0 <= rank < self.size:
            raise CommunicationError(
                f"{verb}({name}={rank!r}): the ranks of this communicator are 0 to {self.size - 1}."
            )


def _shape(tensor) -> str:
    return f"{tuple(tensor.shape)} {types.type_name(tensor)}"


def _at_once(call):
    """A blocking MPI call as a generator that waits for nothing."""
    call()
    yield []


def _in_place():
    from mpi4py import MPI

    return MPI.IN_PLACE


def _mpi_operation(tensor, op):
    from mpi4py import MPI

    if types.type_name(tensor) in ("float16", "bfloat16"):
        raise CommunicationError(f"MPI's own all_reduce adds {types.type_name(tensor)} wrongly: leave algorithm= out.")
    return {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}[op]
