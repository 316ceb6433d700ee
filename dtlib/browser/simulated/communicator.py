"""The operations of one rank that takes turns: SIMULATED. Algorithms, checks and messages are the library's."""

from collections.abc import Generator
from dataclasses import dataclass, field
from types import coroutine
from typing import NoReturn, TypeAlias, Union

from dtlib.browser.simulated.tensors import Tensor
from dtlib.comm.algorithms import chunks_of, same_memory
from dtlib.comm.call import Call, callers_line, shape_and_type
from dtlib.comm.numbers import COMBINE, combiner
from dtlib.comm.objects import ArgumentChecks
from dtlib.comm.selection import choose
from dtlib.comm.waiting import Operation, Queue
from dtlib.comm.watch.board import BoardEntry
from dtlib.comm.watch.missing_ranks import disagreement, mismatch
from dtlib.errors import RESET, CommunicationError, MissingName
from dtlib.lessons.l03.simulated_network import Network, SimulatedLink

OPERATIONS = (
    "all_reduce", "broadcast", "reduce", "scatter", "gather", "reduce_scatter", "all_gather", "all_to_all", "barrier",
    "send", "recv",
)  # fmt: skip
Started: TypeAlias = Union["Pending", "Handle"]  # a handle if async_op=True


@dataclass
class Event:
    """An operation of a rank, from round ``start`` to round ``end``; None means that it never completed."""

    rank: int
    name: str
    what: str
    start: int
    end: int | None = None
    messages: int = 0
    bytes: int = 0


@dataclass
class Wires:
    """State that all ranks share: the network, calls and last position of each rank, and a trace."""

    size: int
    network: Network = field(init=False)
    called: dict = field(default_factory=dict)  # (world, collective's number) -> rank -> (call, line)
    seen: dict = field(default_factory=dict)
    events: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = Network(self.size)


class Pending:
    """An operation in flight. ``await`` lets the other ranks run until it is complete."""

    def __init__(self, comm: "SimulatedCommunicator", task: Operation, event: Event, link: SimulatedLink):
        self.comm, self.task, self.event, self.link = comm, task, event, link

    def __await__(self) -> Generator["Pending", None, object]:
        call, seen = self.task.call, self.comm.wires.seen
        while not self.task.complete:
            seen[self.comm.rank] = _entry("waits", call)
            yield self
        if self.task.error:
            seen[self.comm.rank] = _entry(f"raised {type(self.task.error).__name__}", call)
            raise self.task.error
        seen[self.comm.rank] = _entry("finished", call)
        return self.task.value

    def ended(self) -> None:
        """Record the round in which the operation completed."""
        if self.event.end is None and self.task.complete and not self.task.error:
            self.event.end = self.comm.wires.network.number


class Handle:
    """The handle of an operation with ``async_op=True``."""

    def __init__(self, pending: Pending):
        self._pending = pending

    def wait(self) -> Pending:
        """Return the operation; the cell awaits it."""
        return self._pending

    @coroutine
    def done(self) -> Generator[None, None, bool]:
        """Let the other ranks run once, then return whether the operation is complete; the cell awaits it."""
        yield None
        return self._pending.task.complete


class AllCalled:
    """A request that completes when all ranks have called the collective."""

    def __init__(self, said: dict, size: int):
        self._said, self._size = said, size

    @property
    def done(self) -> bool:
        return len(self._said) == self._size


class SimulatedCommunicator(ArgumentChecks):
    """The operations of ``dtlib.comm.Communicator`` on tensors of the stand-in."""

    simulated = True

    def __init__(self, rank: int, wires: Wires, world: int = 0):
        self.rank, self.size, self.wires = rank, wires.size, wires
        self.collective_count = 0
        self.time_limit = None  # time is not simulated, so no limit applies
        self._world, self._queue = world, Queue()
        self.pending: list[Pending] = []

    def __repr__(self) -> str:
        return f"SimulatedCommunicator(rank={self.rank}, size={self.size})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingName(f"comm.{name} is not simulated; these are: {', '.join(OPERATIONS)}.")

    @property
    def group(self) -> "SimulatedCommunicator":
        """The process group for this page's ``torch.distributed``: the communicator itself."""
        return self

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", async_op: bool = False, algorithm: str | None = None
    ) -> Started:
        flat, combine = _flat(tensor, "all_reduce"), _combiner(tensor, op, "all_reduce")
        arguments, finish = (flat, combine), lambda: self._mean(tensor, op)
        return self._collective("all_reduce", tensor, arguments, finish, async_op, algorithm, op=op)

    def broadcast(self, tensor: Tensor, root: int = 0, async_op: bool = False) -> Started:
        self._check_rank(root, "broadcast", "root")
        arguments = _flat(tensor, "broadcast"), root
        return self._collective("broadcast", tensor, arguments, lambda: tensor, async_op, peer=root)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = "sum", async_op: bool = False) -> Started:
        self._check_rank(root, "reduce", "root")
        flat, combine = _flat(tensor, "reduce"), _combiner(tensor, op, "reduce")
        # The algorithm writes into its buffer, but only the root's tensor may change.
        flat = flat if self.rank == root else flat.copy()
        return self._collective(
            "reduce", tensor, (flat, root, combine),
            lambda: self._mean(tensor, op) if self.rank == root else tensor, async_op, op=op, peer=root,
        )  # fmt: skip

    def scatter(self, out: Tensor, tensor: Tensor | None = None, root: int = 0, async_op: bool = False) -> Started:
        self._check_rank(root, "scatter", "root")
        chunks = self._chunks(tensor, out, "scatter") if self.rank == root else None
        arguments = _flat(out, "scatter"), chunks, root
        return self._collective("scatter", out, arguments, lambda: out, async_op, peer=root)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int = 0, async_op: bool = False) -> Started:
        self._check_rank(root, "gather", "root")
        chunks = self._chunks(out, tensor, "gather") if self.rank == root else None
        arguments = chunks, _flat(tensor, "gather"), root
        return self._collective("gather", tensor, arguments, lambda: out, async_op, peer=root)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Started:
        flat, combine = _flat(out, "reduce_scatter"), _combiner(out, op, "reduce_scatter")
        chunks = self._chunks(tensor, out, "reduce_scatter")
        # The algorithm adds into the chunks: copy them, unless `out` is a part of `tensor`.
        if not same_memory(flat, chunks[self.rank]):
            chunks = [chunk.copy() for chunk in chunks]
        return self._collective(
            "reduce_scatter", tensor, (flat, chunks, combine), lambda: self._mean(out, op), async_op, op=op
        )

    def all_gather(self, out: Tensor, tensor: Tensor, async_op: bool = False) -> Started:
        chunks = self._chunks(out, tensor, "all_gather")
        chunks[self.rank][...] = _flat(tensor, "all_gather")
        return self._collective("all_gather", tensor, (chunks,), lambda: out, async_op)

    def all_to_all(self, out: Tensor, tensor: Tensor, async_op: bool = False) -> Started:
        self._pieces(out, tensor, None, None)
        arguments = chunks_of(_flat(out, "all_to_all"), self.size), chunks_of(tensor.flat.copy(), self.size)
        return self._collective("all_to_all", tensor, arguments, lambda: out, async_op)

    def barrier(self, async_op: bool = False) -> Started:
        return self._collective("barrier", None, (), lambda: None, async_op)

    def send(self, tensor: Tensor, dest: int, tag: int = 0, async_op: bool = False) -> Started:
        self._check_rank(dest, "send", "dest")
        flat, call = _flat(tensor, "send"), self._call("send", tensor, (dest,), peer=dest, tag=tag)
        link = self._link(("message", tag), (shape_and_type(tensor), call.where))  # type: ignore[arg-type]  # it has a shape and a dtype
        return self._start(call, iter([[link.send(flat, dest)]]), link, lambda: tensor, async_op, self._queue.post)

    def recv(self, tensor: Tensor, source: int, tag: int = 0, async_op: bool = False) -> Started:
        self._check_rank(source, "recv", "source")
        flat, call = _flat(tensor, "recv"), self._call("recv", tensor, (source,), peer=source, tag=tag)
        link = self._link(("message", tag))
        steps = _receive(link, flat, source, call)
        return self._start(call, steps, link, lambda: tensor, async_op, self._queue.post)

    def abandon(self, why: str) -> None:
        """Make later calls raise, with the reason ``why``, until ``dtlib.reset()``."""
        self._queue.abandon(why)

    def _call(self, operation, tensor=None, peers=(), number=0, **facts) -> Call:
        shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
        name, where = f"world {self._world}", callers_line()
        return Call(operation, shape, dtype, self.rank, peers, name, number, where=where, **facts)

    def _link(self, tag, what=None) -> SimulatedLink:
        return SimulatedLink(self.wires.network, self.rank, (self._world, tag), what)

    def _collective(self, operation, tensor, arguments, finish, async_op, algorithm=None, **facts):
        self.collective_count += 1
        steps = choose(operation, tensor.nbytes if tensor is not None else 0, self.size, algorithm)
        members, number = tuple(range(self.size)), self.collective_count
        call = self._call(operation, tensor, members, number, algorithm=algorithm or "", **facts)
        link = self._link(number)
        steps = self._verified(call, steps(link, *arguments))
        return self._start(call, steps, link, finish, async_op, self._queue.append)

    def _verified(self, call, steps):
        """Run ``steps`` once all ranks have called the same operation; raise if they disagree."""
        said = self.wires.called.setdefault((self._world, call.number), {})
        said[self.rank] = (str(call), call.where)
        yield [AllCalled(said, self.size)]
        if len({what for what, _ in said.values()}) > 1:
            raise CommunicationError(disagreement(said))
        yield from steps

    def _start(self, call, steps, link, finish, async_op, enqueue):
        # After an interrupt, ranks have called different numbers of collectives, which would match wrongly.
        if self._queue.broken:
            raise CommunicationError(f"This communicator {self._queue.broken}, so ranks are out of step. {RESET}")
        task = Operation(call, link, steps, finish)
        event = Event(self.rank, call.operation, str(call), self.wires.network.number)
        self.wires.events.append(event)
        self.wires.seen[self.rank] = _entry("started", call)
        pending = Pending(self, task, event, link)
        self.pending.append(pending)
        enqueue(task)
        return Handle(pending) if async_op else pending

    def _mean(self, tensor, op):
        if op == "mean":
            tensor.flat[...] = [value / self.size for value in tensor.flat]
        return tensor

    def _chunks(self, whole, chunk, operation):
        self._check_whole(whole, len(_flat(whole, operation)), chunk, len(_flat(chunk, operation)), operation)
        return chunks_of(whole.flat, self.size)


def _receive(link, flat, source, call):
    arriving = link.recv(flat, source)
    yield [arriving]
    sent, where = arriving.other.what
    if sent != shape_and_type(call):
        raise CommunicationError(mismatch(source, sent, where, call.rank, shape_and_type(call), call.where))


def _flat(tensor, operation):
    if not isinstance(tensor, Tensor):
        raise CommunicationError(f"{operation} takes a tensor, such as torch.tensor(3), and got {tensor!r:.60}.")
    return tensor.flat


def _combiner(tensor, op, operation):
    if op not in COMBINE:
        raise CommunicationError(f"{operation} has no op {op!r}: choose one of {', '.join(COMBINE)}.")
    if op == "mean" and not tensor.flat.dtype.startswith("float"):
        raise CommunicationError(
            f"{operation}(op='mean') does not take {tensor.flat.dtype}; it would round: use op='sum' and divide, or "
            "convert with tensor.float()."
        )
    return combiner(op)


def _entry(state: str, call: Call) -> BoardEntry:
    return BoardEntry(state, call.operation, str(call), call.where, call.group, call.number, tuple(call.peers))
