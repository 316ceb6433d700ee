"""What all operations share: from the arguments of a call to a task under way."""

import pickle

from dtlib.comm import lifetime, types
from dtlib.comm.link import (
    CALLER_TAGS,
    COLLECTIVE_TAGS,
    FIRST_COLLECTIVE_TAG,
    NOTES_OF_COLLECTIVES,
    Awaited,
    IncomingLink,
    Link,
    SlowLink,
)
from dtlib.comm.objects import ObjectOperations
from dtlib.comm.selection import choose
from dtlib.comm.waiting import Handle, Queue, Task, idle
from dtlib.comm.watch import board, recorder
from dtlib.comm.watch.call import Call, callers_line
from dtlib.comm.watch.in_step import living
from dtlib.comm.watch.verify import verified
from dtlib.errors import CommunicationError


class Runner(ObjectOperations):
    """The state of a communicator, and how its operations are started."""

    simulated = False  # True where the other ranks do not exist

    def __init__(self, mpi, time_limit: float | None = None, verify: bool = False, name: str = "world"):
        self.mpi = mpi
        self._prepare(mpi.Get_rank(), mpi.Get_size(), world_ranks(mpi), time_limit, verify, name)

    def _prepare(self, rank, size, members, time_limit=None, verify=False, name="world"):
        self.time_limit = time_limit
        self.verify = verify
        self.on_board = True  # whether others may see its operations as the last that this rank called
        self.name = name
        self.rank = rank
        self.size = size
        self.wire = None  # an emulated slow network
        self._members = members  # as the world counts them
        self._nccl = None  # not decided yet; False where CUDA tensors go through host memory
        self._queue = Queue()
        self._buffers = {}
        self.collective_count = 0  # collectives that this rank has called so far
        self._splits = 0
        self._messages = 0  # sent, less those received
        living.add(self)

    def __repr__(self):
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    @property
    def world_rank(self) -> int:
        """This rank as the world counts it."""
        return self._members[self.rank]

    def held(self) -> dict[str, list]:
        """Memory that collectives keep from call to call, as arrays of numpy (measure/held.py)."""
        return {"scratch": [array.base for array in self._buffers.values()]}

    def wait_for(self, request, buffers, description: str, time_limit: float | None = None):
        """Wait for an mpi4py request of this communicator as the operations do: to be interrupted, and timed out; after
        ``time_limit`` seconds, if it is given, instead of the communicator's."""
        call, link = self._call(description, peers=self._members), Awaited(self.mpi)
        limited = time_limit is not None
        handle = self._start(call, iter([[request]]), link, lambda: None, buffers, limited, self._queue.post)
        if limited:
            handle._time_limit = time_limit
            handle.wait()

    def meet(self, operation: str, thing=None) -> list:
        """Every rank's ``thing`` (which pickles), once all are here; what all have no more use for is freed."""
        garbage = lifetime.garbage_among(self._members)
        said = [None] * self.size
        said[self.rank] = pickle.dumps((thing, garbage))
        link = self._side_link(self._next_tag())
        call = self._call(operation, None, self._members, self.collective_count)
        self._start(call, lifetime.exchange(link, said), link, lambda: None, said, False, self._queue.append)
        things, garbage = zip(*map(pickle.loads, said), strict=True)
        lifetime.free(dict(zip(self._members, garbage, strict=True)))
        return list(things)

    def _next_tag(self) -> int:
        """A tag of its own for each collective, so that two that are under way cannot mix."""
        self.collective_count += 1
        return FIRST_COLLECTIVE_TAG + self.collective_count % COLLECTIVE_TAGS

    def _call(self, operation, tensor=None, peers=(), number=0, **facts) -> Call:
        return Call(operation, tensor, self.world_rank, peers, self.name, number, **facts)

    def _link(self, tag: int) -> Link:
        """The messages of one operation."""
        arguments = self.mpi, self.rank, self.size, tag, self._buffers
        return SlowLink(*arguments, self.wire) if self.wire else Link(*arguments)

    def _incoming(self, tag: int) -> IncomingLink:
        """The receiving end of one message."""
        return IncomingLink(self._link(tag))

    def _side_link(self, tag: int) -> Link:
        """Messages that are not the caller's: neither slowed down nor counted."""
        return Link(self.mpi, self.rank, self.size, tag, self._buffers)

    def _notes(self, tag: int) -> Link | None:
        """Where the notes about messages with this tag travel, if there are any."""
        if not isinstance(tag, int) or not 0 <= tag < CALLER_TAGS:
            raise CommunicationError(f"tag={tag!r}: tags are whole numbers from 0 to {CALLER_TAGS - 1}.")
        return self._side_link(tag + CALLER_TAGS) if self.verify else None

    def _point_to_point(self, call, steps, link, finish, async_op, keep):
        self._messages += 1 if call.operation == "send" else -1
        return self._start(call, steps, link, finish, keep, async_op, self._queue.post)

    def _collective(self, operation, tensor, arguments, finish, async_op, algorithm=None, flat=None, **facts):
        """Start a collective: the chosen algorithm with ``(link, *arguments)``, after all others of this communicator.

        ``flat`` is the memory that counts for the choice; ``finish()`` gives what the operation returns; ``facts`` are
        ``op`` and ``peer`` of the call.
        """
        if algorithm == "mpi" and async_op:
            raise CommunicationError(f"{operation}(algorithm='mpi') cannot be asynchronous, as MPI's own call blocks.")
        steps = choose(operation, 0 if flat is None else flat.nbytes, self.size, algorithm)
        link = self._link(self._next_tag())
        members, number = self._members, self.collective_count
        call = Call(
            operation, tensor, members[self.rank], members, self.name, number, algorithm=algorithm or "", **facts
        )
        return self._start(call, steps(link, *arguments), link, finish, flat, async_op, self._queue.append)

    def _on_gpus(self, tensor, algorithm=None):
        """Who carries out a collective on this CUDA tensor: NCCL, or None where it goes through host memory."""
        if algorithm is not None or self.wire or self.simulated or self._queue.broken:
            return None
        if self._nccl is None:
            from dtlib.comm.torch.nccl import nccl_communicator

            self._nccl = nccl_communicator(self, tensor.device) or False
        return self._nccl or None

    def _start(self, call, steps, link, finish, keep, async_op, enqueue):
        """Start an operation, and wait for it unless it is asynchronous; ``enqueue`` says what comes before it."""
        if self._queue.broken:
            raise CommunicationError(
                f"This communicator {self._queue.broken}, so ranks are out of step: call dtlib.reset() on all ranks."
            )
        watched, recorded = self.on_board and self.time_limit is not None, recorder.active()
        if watched or recorded or self.verify:
            call.where = callers_line()
        if call.number and self.verify and self.size > 1:
            steps = verified(self._side_link(NOTES_OF_COLLECTIVES), call, steps)
        task = Task(steps, link, finish, call, keep)
        if recorded:
            task.event = recorder.event_of(call, lane="background" if async_op else "main")
            task.event.emulated, task.event.simulated = self.wire is not None, self.simulated
        call.watched = watched
        if watched:
            board.publish("started", call)
        handle = Handle(task, self._queue, self.time_limit, not async_op)
        if async_op:
            enqueue(task)
            return handle
        if not idle() or not handle.finish_soon():
            enqueue(task)
        return handle.wait()

    def _finish_mean(self, content, op):
        if op == "mean":
            types.divide(content.tensor, content.flat, self.size)
        return content.store()


def world_ranks(mpi) -> tuple[int, ...]:
    """The members of a communicator as the world counts them."""
    from mpi4py import MPI

    group, everyone = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, list(range(group.size)), everyone))
    finally:
        group.Free()
        everyone.Free()
